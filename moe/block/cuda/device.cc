// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include "base/cuda_error.h"
#include "base/error.h"
#include "moe/block/memory.h"

namespace epx::moe::cuda {
namespace {

// Sets the current device for as long as the object lives.
class DeviceScope {
public:
  explicit DeviceScope(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceScope() { cudaSetDevice(before_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

private:
  int before_ = 0;
};

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

} // namespace

void free_device_memory(std::byte* memory) noexcept {
  cudaFree(memory); // what it may return is an error of an earlier kernel
}

int device_of(const void* memory) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
  return attributes.device;
}

int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

DeviceMemory make_device_memory(int device, size_t bytes) {
  const DeviceScope scope(device);
  void* memory = nullptr;
  if (const cudaError_t error = cudaMalloc(&memory, bytes); error == cudaErrorMemoryAllocation) {
    cudaGetLastError(); // clears it
    fail(EPX_ERROR_OUT_OF_MEMORY, "GPU {} has no room for {} bytes of a block's memory", device, bytes);
  } else {
    check_cuda(error, "cudaMalloc");
  }
  return DeviceMemory(static_cast<std::byte*>(memory));
}

void copy_async(void* to, const void* from, size_t bytes, epx_stream stream) {
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)),
             "cudaMemcpyAsync");
}

StreamOrder::StreamOrder(int device) {
  const DeviceScope scope(device);
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  event_ = event;
}

void StreamOrder::destroy() noexcept {
  cudaEventDestroy(static_cast<cudaEvent_t>(event_));
}

void StreamOrder::begin(epx_stream stream) {
  auto* const call_stream = static_cast<cudaStream_t>(stream);
  if (!has_last_ || last_ == stream || is_capturing(call_stream)) return;
  check_cuda(cudaStreamWaitEvent(call_stream, static_cast<cudaEvent_t>(event_), 0), "cudaStreamWaitEvent");
}

void StreamOrder::end(epx_stream stream) {
  auto* const call_stream = static_cast<cudaStream_t>(stream);
  if (is_capturing(call_stream)) return;
  check_cuda(cudaEventRecord(static_cast<cudaEvent_t>(event_), call_stream), "cudaEventRecord");
  last_ = stream;
  has_last_ = true;
}

} // namespace epx::moe::cuda
