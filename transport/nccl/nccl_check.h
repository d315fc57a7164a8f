// SPDX-License-Identifier: Apache-2.0
// check_nccl turns NCCL's error codes into exceptions.
#pragma once

#include <string>

#include <fmt/format.h>
#include <nccl.h>

#include "base/error.h"
#include "transport/nccl/nccl_library.h"

namespace epx {

// Names `call` and what NCCL says about it.
inline std::string describe_nccl(ncclResult_t result, const char* call) {
  return fmt::format("{}: {} ({})", call, nccl().GetErrorString(result), nccl().GetLastError(nullptr));
}

inline void check_nccl(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) throw StatusError(EPX_ERROR_SYSTEM, describe_nccl(result, call));
}

} // namespace epx
