// SPDX-License-Identifier: Apache-2.0
// Elements of tensors as floats, and back with one rounding to nearest even.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "epx/epx.h"

namespace epx::moe::cuda {

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(__half x) {
  return __half2float(x);
}
__device__ inline float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// kCount neighbouring elements, which one instruction loads or stores.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T elements[kCount];
};

template <typename T, int kCount>
__device__ inline void load(const T* from, float (&x)[kCount]) {
  const auto vector = *reinterpret_cast<const Vector<T, kCount>*>(from);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    x[i] = to_float(vector.elements[i]);
}
template <typename T, int kCount>
__device__ inline void store(T* to, const float (&x)[kCount]) {
  Vector<T, kCount> vector;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    vector.elements[i] = from_float<T>(x[i]);
  *reinterpret_cast<Vector<T, kCount>*>(to) = vector;
}

// A value that is T for some inputs and fp32 for others, such as a bias.
template <typename T>
__device__ inline float load_either(const void* values, bool is_fp32, int64_t i) {
  return is_fp32 ? static_cast<const float*>(values)[i] : to_float(static_cast<const T*>(values)[i]);
}

// Calls run(T{}) with the type of a token dtype.
template <typename Run>
auto with_element_type(epx_dtype dtype, Run&& run) {
  if (dtype == EPX_BFLOAT16) return run(__nv_bfloat16{});
  if (dtype == EPX_FLOAT16) return run(__half{});
  return run(float{});
}

} // namespace epx::moe::cuda
