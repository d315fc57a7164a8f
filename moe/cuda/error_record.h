// SPDX-License-Identifier: Apache-2.0
// The record behind epx_moe_errors, in mapped host memory. Kernels write it, and the host reads it at any time.
#pragma once

#include <cstdint>

#include "epx/epx_moe.h"

namespace epx::moe {

struct ErrorRecord {
  unsigned long long num_errors;
  uint32_t is_written; // 1, released once what follows has been stored
  epx_moe_op op;       // of the first error, as all that follows
  epx_moe_error_kind kind;
  int64_t i, j, value, limit;
};

// Where the kernels of one call report.
struct ErrorSink {
  ErrorRecord* record = nullptr; // or NULL: nowhere
  epx_moe_op op = EPX_MOE_OP_NONE;
};

} // namespace epx::moe
