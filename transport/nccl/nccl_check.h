// SPDX-License-Identifier: Apache-2.0
// check_nccl turns NCCL's error codes into exceptions.
#pragma once

#include <nccl.h>

#include "base/error.h"
#include "transport/nccl/nccl_library.h"

namespace epx {

// The error's message names `call`.
inline void check_nccl(ncclResult_t result, const char* call) {
  if (result != ncclSuccess)
    fail(EPX_ERROR_SYSTEM, "{}: {} ({})", call, nccl().GetErrorString(result), nccl().GetLastError(nullptr));
}

} // namespace epx
