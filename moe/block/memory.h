// SPDX-License-Identifier: Apache-2.0
// Memory of this process or of a GPU, and what orders the calls on a GPU that use it. What needs CUDA is in cuda/device.cc, and
// is called in builds with CUDA only.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <string_view>

#include "base/error.h"
#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"

namespace epx::cuda {
class StreamOrder;
}

namespace epx::moe {

inline constexpr std::align_val_t kHostAlignment{256};
struct FreeHost {
  void operator()(std::byte* memory) const { operator delete(memory, kHostAlignment); }
};
using HostMemory = std::unique_ptr<std::byte, FreeHost>; // not initialised, so that pages that nobody uses cost nothing

inline HostMemory make_host_memory(size_t bytes) {
  HostMemory memory(static_cast<std::byte*>(operator new(bytes, kHostAlignment, std::nothrow)));
  if (memory == nullptr)
    fail(EPX_ERROR_OUT_OF_MEMORY, "the block needs {} bytes of host memory, which cannot be allocated", bytes);
  return memory;
}

namespace cuda {

void free_device_memory(std::byte* memory) noexcept; // waits for the GPU
struct FreeDevice {
  void operator()(std::byte* memory) const noexcept {
    if constexpr (kWithCuda) free_device_memory(memory);
  }
};
using DeviceMemory = std::unique_ptr<std::byte, FreeDevice>; // not initialised

// The GPU that the memory belongs to.
int device_of(const void* memory);
DeviceMemory make_device_memory(int device, size_t bytes); // aligned to 256 bytes

void copy_async(void* to, const void* from, size_t bytes, epx_stream stream);

// Loads the kernels that a block of the dtype launches, in FP8 or not, onto the current device. CUDA would load each at its
// first launch and wait for the kernels that run, one of which may wait for a peer.
void load_block_kernels(epx_dtype dtype, bool is_fp8);

void delete_stream_order(epx::cuda::StreamOrder* order) noexcept;
struct DeleteStreamOrder {
  void operator()(epx::cuda::StreamOrder* order) const noexcept {
    if constexpr (kWithCuda) delete_stream_order(order);
  }
};
using OwnedStreamOrder = std::unique_ptr<epx::cuda::StreamOrder, DeleteStreamOrder>;
OwnedStreamOrder make_stream_order(int device);

// Before the launches of `call`, which is captured if this returns true. Throws when a capture keeps it from being launched.
bool begin_call(epx::cuda::StreamOrder& order, std::string_view call, epx_stream stream);
// Behind the launches of a call that is not captured.
void end_call(epx::cuda::StreamOrder& order, epx_stream stream);

} // namespace cuda
} // namespace epx::moe
