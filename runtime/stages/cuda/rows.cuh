// Rows of elements, one warp at a time: copies, conversions, and the arithmetic that the contract fixes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace epx::cuda {

constexpr int kWarp = 32;

__device__ inline int lane() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

// This warp among all warps of the grid.
__device__ inline int64_t global_warp() {
  return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
}
__device__ inline int64_t num_warps() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x / kWarp;
}

template <typename Unit>
__device__ inline void copy_units(std::byte* to, const std::byte* from, int64_t bytes) {
  const auto* source = reinterpret_cast<const Unit*>(from);
  auto* target = reinterpret_cast<Unit*>(to);
  const int64_t units = bytes / static_cast<int64_t>(sizeof(Unit));
  int64_t i = lane();
  for (; i + 3 * kWarp < units; i += 4 * kWarp) { // four loads under way at a time
    const Unit a = source[i], b = source[i + kWarp], c = source[i + 2 * kWarp], d = source[i + 3 * kWarp];
    target[i] = a, target[i + kWarp] = b, target[i + 2 * kWarp] = c, target[i + 3 * kWarp] = d;
  }
  for (; i < units; i += kWarp)
    target[i] = source[i];
}

// One warp copies `bytes` bytes, by the widest unit that both ends and the size allow.
__device__ inline void copy_row(std::byte* to, const std::byte* from, int64_t bytes) {
  const uint64_t bits = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(bytes);
  if (bits % 16 == 0)
    copy_units<uint4>(to, from, bytes);
  else if (bits % 4 == 0)
    copy_units<uint32_t>(to, from, bytes);
  else if (bits % 2 == 0)
    copy_units<uint16_t>(to, from, bytes);
  else
    copy_units<uint8_t>(to, from, bytes);
}

__device__ inline void zero_row(std::byte* to, int64_t bytes) {
  for (int64_t i = lane(); i < bytes; i += kWarp)
    to[i] = std::byte{0};
}

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

// A lane works on runs of kRun elements: lane l has elements [8 l, 8 l + 8) of each stretch of 256.
constexpr int kRun = 8;
constexpr int kStretch = kRun * kWarp;

template <typename T>
struct alignas(16) Run {
  T values[kRun];
};

// Elements [h, h + kRun) of a row of `hidden`; 0 beyond its end.
template <typename T>
__device__ inline void load_run(const T* row, int64_t h, int64_t hidden, float (&out)[kRun]) {
  if (h + kRun <= hidden && reinterpret_cast<uint64_t>(row + h) % 16 == 0) {
    const Run<T> run = *reinterpret_cast<const Run<T>*>(row + h);
    for (int i = 0; i < kRun; ++i)
      out[i] = to_float(run.values[i]);
    return;
  }
  for (int i = 0; i < kRun; ++i)
    out[i] = h + i < hidden ? to_float(row[h + i]) : 0.0f;
}

template <typename T>
__device__ inline void store_run(T* row, int64_t h, int64_t hidden, const float (&in)[kRun]) {
  if (h + kRun <= hidden && reinterpret_cast<uint64_t>(row + h) % 16 == 0) {
    Run<T> run;
    for (int i = 0; i < kRun; ++i)
      run.values[i] = from_float<T>(in[i]);
    *reinterpret_cast<Run<T>*>(row + h) = run;
    return;
  }
  for (int i = 0; i < kRun && h + i < hidden; ++i)
    row[h + i] = from_float<T>(in[i]);
}

// to = round(weight * from); `to` may be `from`.
template <typename T>
__device__ inline void scale_row(T* to, const T* from, float weight, int64_t hidden) {
  for (int64_t h = lane() * kRun; h < hidden; h += kStretch) {
    float x[kRun];
    load_run(from, h, hidden, x);
    for (int i = 0; i < kRun; ++i)
      x[i] = __fmul_rn(weight, x[i]);
    store_run(to, h, hidden, x);
  }
}

// The fixed tree of epx_combine_bwd: 256 accumulators, j = h mod 256, then adjacent pairs. The result is in every lane.
template <typename T>
__device__ inline float dot_rows(const T* a, const T* b, int64_t hidden) {
  float acc[kRun] = {};
  for (int64_t h = lane() * kRun; h < hidden; h += kStretch) {
    float x[kRun], y[kRun];
    load_run(a, h, hidden, x);
    load_run(b, h, hidden, y);
    for (int i = 0; i < kRun && h + i < hidden; ++i) // an absent element takes no step
      acc[i] = __fmaf_rn(x[i], y[i], acc[i]);
  }
  for (int left = kRun / 2; left > 0; left /= 2)
    for (int i = 0; i < left; ++i)
      acc[i] = __fadd_rn(acc[2 * i], acc[2 * i + 1]);
  float sum = acc[0];
  for (int distance = 1; distance < kWarp; distance *= 2)
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
  return sum;
}

} // namespace epx::cuda
