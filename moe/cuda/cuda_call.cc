// SPDX-License-Identifier: Apache-2.0
#include "moe/cuda/cuda_call.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>

#include <cuda_runtime_api.h>

#include "base/cuda_error.h"
#include "moe/tensors.h"

namespace epx::moe {
namespace {

const char* name_of_memory(cudaMemoryType type) {
  return type == cudaMemoryTypeHost ? "pinned host memory" : type == cudaMemoryTypeUnregistered ? "host memory" : "memory";
}

void require_on_device(const void* memory, const char* name, int device) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
  if (attributes.type == cudaMemoryTypeManaged) return;
  if (attributes.type != cudaMemoryTypeDevice)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} is at {}, which is {}; with cuda it must be memory of the current device, {}",
         name, memory, name_of_memory(attributes.type), device);
  if (attributes.device != device)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} is at {}, which is memory of device {}; the current device is {}", name, memory,
         attributes.device, device);
}

bool is_empty(const epx_tensor& tensor) {
  for (int32_t axis = 0; axis < tensor.ndim; ++axis)
    if (tensor.sizes[axis] == 0) return true;
  return false;
}

int attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

void require_new_enough(int device) {
  const int capability = 10 * attribute_of(device, cudaDevAttrComputeCapabilityMajor) +
                         attribute_of(device, cudaDevAttrComputeCapabilityMinor);
  if (const std::string why = why_too_old(capability); !why.empty())
    fail(EPX_ERROR_UNSUPPORTED, "the current device, {}, {}", device, why);
}

} // namespace

int current_device() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    fail(EPX_ERROR_UNSUPPORTED, "there is no GPU: {}", error != cudaSuccess ? cudaGetErrorString(error) : "none was found");
  }
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

CudaCall::CudaCall(const epx_moe_cuda& cuda, epx_moe_op op, size_t workspace_bytes,
                   std::initializer_list<NamedTensor> tensors)
    : device_(current_device()), errors_{cuda.errors != nullptr ? cuda.errors->record : nullptr, op},
      workspace_(cuda.workspace) {
  require_new_enough(device_);
  if (cuda.num_sms < 0) fail(EPX_ERROR_INVALID_ARGUMENT, "cuda.num_sms is {}; it must not be negative", cuda.num_sms);
  if (cuda.reserved0 != 0) fail(EPX_ERROR_INVALID_ARGUMENT, "cuda.reserved0 is {}; it must be 0", cuda.reserved0);
  for (const NamedTensor& named : tensors)
    require_memory(named.tensor, named.name);
  if (workspace_bytes > 0) {
    if (cuda.workspace == nullptr)
      fail(EPX_ERROR_INVALID_ARGUMENT, "cuda.workspace is NULL; this call needs {} bytes", workspace_bytes);
    if (cuda.workspace_bytes < workspace_bytes)
      fail(EPX_ERROR_INVALID_ARGUMENT, "cuda.workspace has {} bytes; this call needs {}", cuda.workspace_bytes,
           workspace_bytes);
    if (reinterpret_cast<uintptr_t>(cuda.workspace) % kWorkspaceAlignment != 0)
      fail(EPX_ERROR_INVALID_ARGUMENT, "cuda.workspace is at {}, which is not aligned to {} bytes", cuda.workspace,
           kWorkspaceAlignment);
    require_on_device(cuda.workspace, "cuda.workspace", device_);
  }
  target_.stream = cuda.stream;
  target_.num_sms = attribute_of(device_, cudaDevAttrMultiProcessorCount);
  if (cuda.num_sms > 0) target_.num_sms = std::min(target_.num_sms, cuda.num_sms);
}

void CudaCall::require_memory(const epx_tensor* tensor, const char* name) const {
  if (tensor != nullptr && !is_empty(*tensor)) require_on_device(tensor->data, name, device_);
}

void CudaCall::require_aligned(const epx_tensor* tensor, const char* name, size_t alignment) const {
  if (tensor == nullptr || is_empty(*tensor) || reinterpret_cast<uintptr_t>(tensor->data) % alignment == 0) return;
  fail(EPX_ERROR_INVALID_ARGUMENT, "{} is at {}, which is not aligned to {} bytes", name, tensor->data, alignment);
}

void CudaCall::require_launched(int error) const {
  check_cuda(static_cast<cudaError_t>(error), "launching a kernel");
}

ErrorRecord* make_error_record() {
  current_device();
  void* memory = nullptr;
  // Portable: kernels of every device may write it, at the same address.
  check_cuda(cudaHostAlloc(&memory, sizeof(ErrorRecord), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  return new (memory) ErrorRecord{};
}

void free_error_record(ErrorRecord* record) noexcept {
  cudaFreeHost(record); // what it may return is an error of an earlier kernel
}

} // namespace epx::moe
