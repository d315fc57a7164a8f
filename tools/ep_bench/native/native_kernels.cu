// SPDX-License-Identifier: Apache-2.0
// Warps of the local kernels of the native way:
//
//   kernel           warps   what a warp does, and what it waits for
//   permute_kernel   all     loads a row and stores it to its place; waits for nothing
//   sum_kernel       all     a CTA sums a token's rows, each lane the words of one column; waits for nothing
#include "tools/ep_bench/native/native_kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_types.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/device/launch.h"

namespace epx::bench {
namespace {

using namespace cuda; // base/device

constexpr int kLanes = 32;
constexpr int kPermuteThreads = 512;
constexpr int kPermuteCtasPerSm = 4;
constexpr int kInFlight = 8; // a lane issues so many loads before its first store
constexpr int kSumThreads = 256;
constexpr int kSumCtasPerSm = 8;

// Rows that are no multiple of 16 bytes are copied by narrower words.
template <typename Word, bool kIsScatter>
__global__ void __launch_bounds__(kPermuteThreads) permute_kernel(const __grid_constant__ PermuteParams params) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t warps_per_cta = blockDim.x / kLanes, warp = threadIdx.x / kLanes * int64_t{gridDim.x} + blockIdx.x;
  const int64_t words = params.row_bytes / static_cast<int64_t>(sizeof(Word));
  for (int64_t row = warp; row < params.rows; row += warps_per_cta * gridDim.x) {
    const int64_t other = params.index[row];
    const auto* const from = reinterpret_cast<const Word*>(params.source + (kIsScatter ? row : other) * params.row_bytes);
    auto* const to = reinterpret_cast<Word*>(params.target + (kIsScatter ? other : row) * params.row_bytes);
    for (int64_t begin = lane; begin < words; begin += kLanes * kInFlight) {
      Word loaded[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (begin + i * kLanes < words) loaded[i] = from[begin + i * kLanes];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (begin + i * kLanes < words) to[begin + i * kLanes] = loaded[i];
    }
  }
}

template <typename T>
__device__ float to_float(T x) {
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(x);
  else
    return x;
}
// Rounds to nearest even.
template <typename T>
__device__ T rounded(float x) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(x);
  else
    return x;
}

template <typename T, typename Word>
__global__ void __launch_bounds__(kSumThreads) sum_kernel(const __grid_constant__ SumParams params) {
  constexpr int kElements = static_cast<int>(sizeof(Word) / sizeof(T));
  const int64_t words = params.hidden / kElements;
  const auto* const source = reinterpret_cast<const Word*>(params.source);
  for (int64_t token = blockIdx.x; token < params.tokens; token += gridDim.x)
    for (int64_t word = threadIdx.x; word < words; word += blockDim.x) {
      float sums[kElements] = {};
#pragma unroll 4
      for (int k = 0; k < params.top_k; ++k) {
        const int64_t route = token * params.top_k + k;
        const Word loaded = source[params.index[route] * words + word];
        const float weight = params.weights[route];
        T elements[kElements];
        memcpy(static_cast<void*>(elements), &loaded, sizeof(Word));
#pragma unroll
        for (int i = 0; i < kElements; ++i)
          sums[i] = __fmaf_rn(weight, to_float(elements[i]), sums[i]);
      }
      T elements[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        elements[i] = rounded<T>(sums[i]);
      Word out;
      memcpy(static_cast<void*>(&out), elements, sizeof(Word));
      reinterpret_cast<Word*>(params.out)[token * words + word] = out;
    }
}

bool is_of_vectors(int64_t row_bytes) {
  return row_bytes % static_cast<int64_t>(sizeof(uint4)) == 0;
}

template <bool kIsScatter>
cudaError_t launch_permute(const PermuteParams& params, int num_sms, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  constexpr int64_t kRowsPerCta = kPermuteThreads / kLanes;
  const int64_t blocks =
      std::min<int64_t>((params.rows + kRowsPerCta - 1) / kRowsPerCta, int64_t{num_sms} * kPermuteCtasPerSm);
  return launch(is_of_vectors(params.row_bytes) ? &permute_kernel<uint4, kIsScatter>
                                                : &permute_kernel<uint16_t, kIsScatter>,
                {static_cast<int>(blocks), kPermuteThreads}, stream, params);
}

template <typename T>
cudaError_t launch_sum(const SumParams& params, int num_sms, cudaStream_t stream) {
  if (params.tokens == 0) return cudaSuccess;
  const int64_t blocks = std::min<int64_t>(params.tokens, int64_t{num_sms} * kSumCtasPerSm);
  return launch(is_of_vectors(params.hidden * static_cast<int64_t>(sizeof(T))) ? &sum_kernel<T, uint4> : &sum_kernel<T, T>,
                {static_cast<int>(blocks), kSumThreads}, stream, params);
}

} // namespace

cudaError_t launch_gather_rows(const PermuteParams& params, int num_sms, cudaStream_t stream) {
  return launch_permute<false>(params, num_sms, stream);
}

cudaError_t launch_scatter_rows(const PermuteParams& params, int num_sms, cudaStream_t stream) {
  return launch_permute<true>(params, num_sms, stream);
}

cudaError_t launch_sum_rows(const SumParams& params, epx_dtype dtype, int num_sms, cudaStream_t stream) {
  if (dtype == EPX_FLOAT16) return launch_sum<__half>(params, num_sms, stream);
  if (dtype == EPX_BFLOAT16) return launch_sum<__nv_bfloat16>(params, num_sms, stream);
  return dtype == EPX_FLOAT32 ? launch_sum<float>(params, num_sms, stream) : cudaErrorInvalidValue;
}

cudaError_t load_native_kernels() {
  for (cudaError_t error :
       {load(&permute_kernel<uint4, false>), load(&permute_kernel<uint16_t, false>), load(&permute_kernel<uint4, true>),
        load(&permute_kernel<uint16_t, true>), load(&sum_kernel<__half, uint4>), load(&sum_kernel<__half, __half>),
        load(&sum_kernel<__nv_bfloat16, uint4>), load(&sum_kernel<__nv_bfloat16, __nv_bfloat16>),
        load(&sum_kernel<float, uint4>), load(&sum_kernel<float, float>)})
    if (error != cudaSuccess) return error;
  return cudaSuccess;
}

} // namespace epx::bench
