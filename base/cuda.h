// SPDX-License-Identifier: Apache-2.0
// Owners of CUDA resources. Destructors log and never throw.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <cuda_runtime_api.h>

#include "base/cuda_error.h"
#include "base/log.h"

namespace epx {

inline void log_cuda(cudaError_t error, const char* call) noexcept {
  if (error != cudaSuccess && error != cudaErrorCudartUnloading)
    log::transport().warn("{}: {}", call, cudaGetErrorString(error));
}

// While it exists, this thread may query streams and events although a capture is under way, of another stream or in another
// thread: by itself CUDA refuses, and breaks the capture.
class RelaxedCaptureScope {
public:
  RelaxedCaptureScope() { check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
  ~RelaxedCaptureScope() { log_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
  RelaxedCaptureScope(const RelaxedCaptureScope&) = delete;
  RelaxedCaptureScope& operator=(const RelaxedCaptureScope&) = delete;

private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed; // then the one before
};

// Sets the calling thread's current device for as long as the object lives.
class CudaDeviceScope {
public:
  explicit CudaDeviceScope(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device != previous_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = device != previous_;
  }
  ~CudaDeviceScope() {
    if (changed_) log_cuda(cudaSetDevice(previous_), "cudaSetDevice");
  }
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;

private:
  int previous_ = 0;
  bool changed_ = false;
};

struct CudaFree {
  void operator()(void* memory) const noexcept { log_cuda(cudaFree(memory), "cudaFree"); }
};
struct CudaFreeHost {
  void operator()(void* memory) const noexcept { log_cuda(cudaFreeHost(memory), "cudaFreeHost"); }
};

template <typename T>
using DeviceMemory = std::unique_ptr<T[], CudaFree>;
template <typename T>
using PinnedMemory = std::unique_ptr<T[], CudaFreeHost>; // host memory that the GPU copies to without a detour
template <typename T>
using MappedMemory = std::unique_ptr<T, CudaFreeHost>; // pinned host memory; devices access it at the same address

// The memory is zeroed.
template <typename T>
DeviceMemory<T> make_device_memory(size_t num_elements) {
  void* address = nullptr;
  check_cuda(cudaMalloc(&address, num_elements * sizeof(T)), "cudaMalloc");
  DeviceMemory<T> memory(static_cast<T*>(address));
  check_cuda(cudaMemset(address, 0, num_elements * sizeof(T)), "cudaMemset");
  // Streams that do not wait for the default stream may use the memory at once.
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return memory;
}

// The memory is zeroed.
template <typename T>
MappedMemory<T> make_mapped_memory() {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  return MappedMemory<T>(new (memory) T{});
}

// The memory is zeroed.
template <typename T>
PinnedMemory<T> make_pinned_memory(size_t num_elements) {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, num_elements * sizeof(T), cudaHostAllocPortable), "cudaHostAlloc");
  return PinnedMemory<T>(new (memory) T[num_elements]{});
}

class CudaStream {
public:
  CudaStream() {
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    stream_.reset(stream);
  }

  cudaStream_t get() const { return stream_.get(); }

private:
  struct Destroy {
    void operator()(cudaStream_t stream) const noexcept { log_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy"); }
  };
  std::unique_ptr<CUstream_st, Destroy> stream_;
};

// An event for ordering streams; it does not record the time.
class CudaEvent {
public:
  CudaEvent() {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    event_.reset(event);
  }

  cudaEvent_t get() const { return event_.get(); }

private:
  struct Destroy {
    void operator()(cudaEvent_t event) const noexcept { log_cuda(cudaEventDestroy(event), "cudaEventDestroy"); }
  };
  std::unique_ptr<CUevent_st, Destroy> event_;
};

} // namespace epx
