// SPDX-License-Identifier: Apache-2.0
// Weights in MX or NV. Each warp quantises one row of the weights after the other, as a row that travels, or some of their
// columns, which are rows of the transposed weights. It reads them twice with NV, whose row scale comes first.
#include "base/device/launch.h"
#include "moe/cuda/elements.cuh"
#include "moe/cuda/warps.cuh"
#include "moe/quantise/cuda/kernels.h"
#include "runtime/formats/scaling.h"
#include "runtime/stages/cuda/rows/quantised_row.cuh"

namespace epx::moe::cuda {
namespace {

using epx::cuda::kLaneElements;

// Neighbouring lanes have one column, a block of MX in each step.
constexpr int kColumnLanes = 2;
constexpr int kColumnStep = kColumnLanes * kLaneElements; // rows of the weights
constexpr int kWarpColumns = kWarp / kColumnLanes;
static_assert(kColumnStep == 32 && kQuantiseBlock % kColumnStep == 0 && kQuantiseBlock % kWarpColumns == 0);

template <typename T>
__global__ void __launch_bounds__(kThreads) quantise_weight_rows_kernel(const __grid_constant__ QuantiseWeightRows call) {
  const int64_t size = call.num_columns;
  for_each_item(call.num_matrices * call.num_rows, [&](int64_t row) {
    const T* const from = static_cast<const T*>(call.weights) + row * size;
    const float e = epx::cuda::encode_scale_of<T, true>(call.format, from, size, nullptr);
    epx::cuda::QuantisedPlace to; // of lane 0
    if (lane() == 0)
      to = {call.given.codes + row * call.format.element_bytes(size), call.given.scales + call.given.layout.row_offset(row),
            call.given.row_scales != nullptr ? call.given.row_scales + row : nullptr};
    epx::cuda::quantise_row<T, true>(call.format, from, size, e, call.given.layout, to, 1);
  });
}

// A lane's elements of its column from a row of the weights on.
template <typename T>
__device__ inline void load_column(const T* from, int64_t stride, float (&x)[kLaneElements]) {
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i)
    x[i] = static_cast<float>(from[i * stride]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantise_weight_columns_kernel(const __grid_constant__ QuantiseWeightRows call) {
  const WireFormat& format = call.format;
  const WeightRows& to = call.transposed;
  const int64_t stride = call.num_columns;
  const int per_byte = static_cast<int>(elements_per_byte(format.elements));
  const int first_element = lane() % kColumnLanes * kLaneElements; // of each step
  for_each_item(call.num_matrices * call.num_columns / kWarpColumns, [&](int64_t item) {
    const int64_t row = item * kWarpColumns + lane() / kColumnLanes; // of the transposed weights
    const int64_t matrix = row / call.num_columns, column = row % call.num_columns;
    const T* const from = static_cast<const T*>(call.weights) + matrix * call.num_rows * stride + column;
    float x[kLaneElements];
    float e = 1.0f;
    if (format.has_row_scale()) {
      uint32_t amax = 0;
#pragma unroll 1
      for (int64_t r = first_element; r < call.num_rows; r += kColumnStep) {
        load_column(from + r * stride, stride, x);
#pragma unroll
        for (const float value : x)
          amax = max(amax, epx::cuda::magnitude_if_finite(value));
      }
      for (int distance = 1; distance < kColumnLanes; distance *= 2)
        amax = max(amax, __shfl_xor_sync(~0u, amax, distance));
      e = formats::nv_encode_scale(formats::float_of(amax));
      if (first_element == 0) to.row_scales[row] = formats::nv_row_scale(e);
    }
    std::byte* const codes = to.codes + row * format.element_bytes(call.num_rows);
    std::byte* const scales = to.scales + to.layout.row_offset(row);
#pragma unroll 1
    for (int64_t r = first_element; r < call.num_rows; r += kColumnStep) {
      load_column(from + r * stride, stride, x);
      uint32_t stored = 0;
      epx::cuda::quantise_lane(format, x, e, stored).template store<true>(codes, r, call.num_rows, per_byte);
      if (r % format.block() == 0)
        epx::cuda::store_scale(scales + to.layout.place_offset(r / format.block()), to.layout.scale_bytes, stored);
    }
  });
}

template <typename T>
cudaError_t launch_weights(const QuantiseWeightRows& call, const LaunchTarget& target) {
  const int64_t num_rows = call.num_matrices * call.num_rows, num_columns = call.num_matrices * call.num_columns;
  if (call.given.codes != nullptr) {
    const cudaError_t error =
        epx::cuda::launch(&quantise_weight_rows_kernel<T>, grid_of_warps(num_rows, target), stream_of(target), call);
    if (error != cudaSuccess) return error;
  }
  if (call.transposed.codes == nullptr) return cudaSuccess;
  return epx::cuda::launch(&quantise_weight_columns_kernel<T>, grid_of_warps(num_columns / kWarpColumns, target),
                           stream_of(target), call);
}

} // namespace

int launch_quantise_weights(const QuantiseWeightRows& call, const LaunchTarget& target) {
  if (call.num_matrices == 0) return cudaSuccess;
  return with_element_type(call.dtype, [&]<typename T>(T) { return launch_weights<T>(call, target); });
}

} // namespace epx::moe::cuda
