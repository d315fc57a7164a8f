// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include <cuda_runtime_api.h>

#include "base/cuda.h"
#include "base/error.h"
#include "base/stream_order.h"
#include "moe/block/cuda/kernels.h"
#include "moe/block/memory.h"
#include "moe/ffn/cuda/kernels.h"
#include "moe/gemm/grouped_gemm.h"
#include "moe/permute/cuda/kernels.h"
#include "moe/quantise/cuda/kernels.h"
#include "moe/router/cuda/kernels.h"

namespace epx::moe::cuda {

using epx::cuda::Capture;
using epx::cuda::StreamOrder;

void free_device_memory(std::byte* memory) noexcept {
  cudaFree(memory); // what it may return is an error of an earlier kernel
}

int device_of(const void* memory) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
  return attributes.device;
}

DeviceMemory make_device_memory(int device, size_t bytes) {
  const CudaDeviceScope scope(device);
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

void load_block_kernels(epx_dtype dtype, bool is_fp8) {
  std::vector<std::vector<const void*>> lists = {route_kernels(),    load_kernels(),           route_bwd_kernels(),
                                                 ffn_kernels(dtype), block_kernels(),          grouped_gemm_kernels(dtype),
                                                 row_map_kernels(),  permute_and_sum_kernels()};
  if (is_fp8)
    lists.insert(lists.end(), {block_quantise_rows_kernels(), block_quantise_swiglu_kernels(),
                               block_dequantise_rows_kernels(), grouped_gemm_kernels(EPX_FLOAT8_E4M3)});
  for (const std::vector<const void*>& kernels : lists)
    for (const void* kernel : kernels) {
      cudaFuncAttributes attributes{};
      check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    }
}

void delete_stream_order(StreamOrder* order) noexcept {
  delete order;
}

OwnedStreamOrder make_stream_order(int device) {
  const CudaDeviceScope scope(device);
  return OwnedStreamOrder(new StreamOrder);
}

bool begin_call(StreamOrder& order, std::string_view call, epx_stream stream) {
  auto* const call_stream = static_cast<cudaStream_t>(stream);
  const Capture capture = epx::cuda::capture_of(call_stream);
  if (capture == Capture::active) {
    order.saw_capture();
    return true;
  }
  if (capture == Capture::of_other_stream || !order.wait_for_last(call_stream))
    order.refuse_beside_capture(call, "the arena's", capture);
  return false;
}

void end_call(StreamOrder& order, epx_stream stream) {
  order.launched(static_cast<cudaStream_t>(stream));
}

} // namespace epx::moe::cuda
