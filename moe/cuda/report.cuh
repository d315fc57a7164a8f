// SPDX-License-Identifier: Apache-2.0
// Kernels report bad data to the host.
#pragma once

#include "base/device/memory_order.cuh"
#include "moe/cuda/error_record.h"

namespace epx::moe::cuda {

// Any thread may call this. The record is host memory, where an atomic operation of the device is atomic for the device alone;
// that is enough, since the host only reads.
__device__ __noinline__ inline void report(const ErrorSink& sink, epx_moe_error_kind kind, int64_t i, int64_t j,
                                           int64_t value, int64_t limit = 0) {
  if (sink.record == nullptr) return;
  ErrorRecord& record = *sink.record;
  if (atomicAdd(&record.num_errors, 1ull) != 0) return;
  record.op = sink.op;
  record.kind = kind;
  record.i = i;
  record.j = j;
  record.value = value;
  record.limit = limit;
  epx::cuda::store_release_sys(&record.is_written, 1u); // the host reads the values once it has acquired this
}

} // namespace epx::moe::cuda
