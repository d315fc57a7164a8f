// SPDX-License-Identifier: Apache-2.0
// Memory of this process or of a GPU, and what orders the calls on a GPU that use it. What needs CUDA is in cuda/device.cc, and
// is called in builds with CUDA only.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"

namespace epx::moe {

inline constexpr std::align_val_t kHostAlignment{256};
struct FreeHost {
  void operator()(std::byte* memory) const { operator delete(memory, kHostAlignment); }
};
using HostMemory = std::unique_ptr<std::byte, FreeHost>; // not initialised, so that pages that nobody uses cost nothing

inline HostMemory make_host_memory(size_t bytes) {
  return HostMemory(static_cast<std::byte*>(operator new(bytes, kHostAlignment)));
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
int current_device();
DeviceMemory make_device_memory(int device, size_t bytes); // aligned to 256 bytes

void copy_async(void* to, const void* from, size_t bytes, epx_stream stream);

// Makes calls on different streams run in the order in which they are made. Calls that are captured are left out.
class StreamOrder {
public:
  explicit StreamOrder(int device);
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;
  ~StreamOrder() {
    if constexpr (kWithCuda) destroy();
  }

  void begin(epx_stream stream); // the stream waits for the call before
  void end(epx_stream stream);

private:
  void destroy() noexcept;

  void* event_ = nullptr; // a cudaEvent_t
  epx_stream last_ = nullptr;
  bool has_last_ = false;
};

} // namespace cuda
} // namespace epx::moe
