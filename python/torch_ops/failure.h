// SPDX-License-Identifier: Apache-2.0
// How an operator fails. PyTorch turns a std::runtime_error into a RuntimeError with the sentence, and the package's Python
// functions, which ask epx_torch_take_failure() for the status, turn that into the package's exceptions.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

#include <epx/epx.h>

namespace epx_torch {

// Throws. The status and the sentence stay with the calling thread.
[[noreturn]] void fail(epx_status status, const std::string& sentence);

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream sentence;
  (sentence << ... << parts);
  fail(EPX_ERROR_INVALID_ARGUMENT, sentence.str());
}

// Throws with the library's own sentence unless the call has succeeded.
inline void throw_if_failed(epx_status status) {
  if (status != EPX_SUCCESS) fail(status, epx_last_error());
}

} // namespace epx_torch

extern "C" {
/** The status of the last operator that failed on this thread, which is forgotten; EPX_SUCCESS when none has since the last
 * look. */
EPX_API int32_t epx_torch_take_failure(void);
}
