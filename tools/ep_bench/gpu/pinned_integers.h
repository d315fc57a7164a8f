// SPDX-License-Identifier: Apache-2.0
// Integers in pinned memory of the host, which copies to and from the GPU use, and the event that tells when one has ended.
#pragma once

#include <cstdint>
#include <memory>

#include <cuda_runtime_api.h>

#include "tools/ep_bench/gpu/gpu.h"

namespace epx::bench {

struct FreeHost {
  void operator()(int32_t* memory) const { cudaFreeHost(memory); }
};
using PinnedIntegers = std::unique_ptr<int32_t, FreeHost>;

// Throws RuntimeError.
inline PinnedIntegers allocate_pinned(int64_t count) {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, static_cast<size_t>(count) * sizeof(int32_t), cudaHostAllocDefault), "cudaHostAlloc");
  return PinnedIntegers(static_cast<int32_t*>(memory));
}

struct DestroyEvent {
  using pointer = cudaEvent_t;
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using CopyEvent = std::unique_ptr<CUevent_st, DestroyEvent>;

// Throws RuntimeError.
inline CopyEvent make_copy_event() {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return CopyEvent(event);
}

} // namespace epx::bench
