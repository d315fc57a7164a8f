// SPDX-License-Identifier: Apache-2.0
// A block takes one row at a time. It computes in fp32 and rounds what it stores; with biases h comes from the rounded pre_act,
// so that the backward, which reads pre_act, finds the same h.
//
//   kernel                warps   what they do                                     what they wait for
//   activate, add_bias    all     neighbouring threads, neighbouring elements      nothing
//   activate_bwd          all     the same, then add up the gradient of a weight   only barriers of the block
//   bias_grad             all     each thread adds up a column of an expert        nothing
#include "moe/ffn/cuda/kernels.h"

#include <initializer_list>

#include "base/device/kernel_addresses.h"
#include "base/device/launch.h"
#include "moe/cuda/elements.cuh"
#include "moe/cuda/report.cuh"
#include "moe/cuda/warps.cuh"
#include "moe/ffn/activation.h"
#include "moe/gemm/zones.cuh"

namespace epx::moe::cuda {
namespace {

// Blocks that an SM has the registers for, where a thread takes 16 bytes at a time. The grids have so many for each SM, so that
// all blocks begin at the same time, and none is left for a second wave.
constexpr int kActivateBlocksPerSm = 12;
constexpr int kActivateBwdBlocksPerSm = 9;
constexpr int kAddBiasBlocksPerSm = 16;

epx::cuda::Grid grid_of(int num_sms, int blocks_per_sm) {
  return {num_sms * blocks_per_sm, kThreads};
}

// Calls take(row, expert) for the rows of all zones; the threads of a block together, and each row in one block.
template <typename Take>
__device__ void for_each_row(const DeviceZones& zones, const Take& take) {
  const int64_t rows = rows_in_use(zones);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
    if (const int expert = expert_of_row(zones, row); expert >= 0) take(row, expert);
}

__device__ float weight_of(const float* recv_weights, int64_t row) {
  return recv_weights != nullptr ? recv_weights[row] : 1.0f;
}

template <typename T>
__device__ float param_at(const ParamTensor& param, int expert, int64_t i) {
  return load_either<T>(param.data, param.dtype == EPX_FLOAT32, expert * param.stride + i);
}

// Loads kVector neighbouring elements of a parameter, by 16 bytes where that is what kVector elements of T fill.
template <typename T, int kVector>
__device__ void load_params(const ParamTensor& param, int expert, int64_t i, float (&x)[kVector]) {
  const int64_t first = expert * param.stride + i;
  if (param.dtype != EPX_FLOAT32) {
    load(static_cast<const T*>(param.data) + first, x);
    return;
  }
  constexpr int kPart = kVector < 4 ? kVector : 4;
#pragma unroll
  for (int v = 0; v < kVector; v += kPart) {
    float part[kPart];
    load(static_cast<const float*>(param.data) + first + v, part);
#pragma unroll
    for (int p = 0; p < kPart; ++p)
      x[v + p] = part[p];
  }
}

// Adds a bias to kVector elements of `values`, in place, and leaves in x what is stored.
template <typename T, int kVector>
__device__ void add_bias(const ParamTensor& bias, int expert, int64_t i, T* values, float (&x)[kVector]) {
  load(values, x);
  if (bias.data == nullptr) return;
  float b[kVector];
  load_params<T>(bias, expert, i, b);
#pragma unroll
  for (int v = 0; v < kVector; ++v)
    x[v] = to_float(from_float<T>(x[v] + b[v]));
  store(values, x);
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads, kActivateBlocksPerSm) activate_kernel(const __grid_constant__ Activate call) {
  const InnerLayer& layer = call.layer;
  const bool has_gate = call.layer.activation == EPX_MOE_SWIGLU;
  for_each_row(layer.zones, [&](int64_t row, int expert) {
    T* const gates = static_cast<T*>(call.pre_act) + row * layer.size * (has_gate ? 2 : 1);
    T* const ups = gates + (has_gate ? layer.size : 0);
    T* const hs = static_cast<T*>(call.h) + row * layer.size;
    const float weight = weight_of(layer.recv_weights, row);
    for (int64_t i = threadIdx.x * kVector; i < layer.size; i += kThreads * kVector) {
      float gate[kVector] = {};
      float up[kVector];
      float h[kVector];
      if (has_gate) add_bias(call.gate_bias, expert, i, gates + i, gate);
      add_bias(call.up_bias, expert, i, ups + i, up);
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        h[v] = weight * (has_gate ? swiglu(gate[v], up[v]) : ungated(layer.activation, up[v]));
      store(hs + i, h);
    }
  });
}

// Returns the sum of the threads' values, the same in all, added in a fixed order.
__device__ float block_sum(float value) {
  __shared__ float sums[kWarpsPerBlock];
  value = sum_of_lanes(value);
  if (lane() == 0) sums[warp_of_block()] = value;
  __syncthreads();
  float sum = 0;
  for (const float of_warp : sums)
    sum += of_warp;
  __syncthreads(); // all threads have read the sums, and the next row's may be stored
  return sum;
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads, kActivateBwdBlocksPerSm)
    activate_bwd_kernel(const __grid_constant__ ActivateBwd call) {
  const InnerLayer& layer = call.layer;
  const bool has_gate = layer.activation == EPX_MOE_SWIGLU;
  for_each_row(layer.zones, [&](int64_t row, int expert) {
    const int64_t first = row * layer.size * (has_gate ? 2 : 1);
    const int64_t up_offset = has_gate ? layer.size : 0;
    const T* const gates = static_cast<const T*>(call.pre_act) + first;
    T* const grad_gates = static_cast<T*>(call.grad_pre_act) + first;
    const T* const grad_hs = static_cast<const T*>(call.grad_h) + row * layer.size;
    T* const hs = static_cast<T*>(call.h) + row * layer.size;
    const float weight = weight_of(layer.recv_weights, row);
    float grad_weight = 0;
    for (int64_t i = threadIdx.x * kVector; i < layer.size; i += kThreads * kVector) {
      float gate[kVector] = {};
      float up[kVector];
      float grad_h[kVector];
      float h[kVector];
      if (has_gate) load(gates + i, gate);
      load(gates + up_offset + i, up);
      load(grad_hs + i, grad_h);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        h[v] = has_gate ? swiglu(gate[v], up[v]) : ungated(layer.activation, up[v]);
        grad_weight = __fmaf_rn(grad_h[v], h[v], grad_weight);
        h[v] *= weight;
        const float grad = weight * grad_h[v];
        if (has_gate) {
          const GateUp<float> grads = swiglu_bwd(gate[v], up[v], grad);
          gate[v] = grads.gate;
          up[v] = grads.up;
        } else {
          up[v] = ungated_bwd(layer.activation, up[v], grad);
        }
      }
      if (has_gate) store(grad_gates + i, gate);
      store(grad_gates + up_offset + i, up);
      store(hs + i, h);
    }
    if (call.grad_recv_weights == nullptr) return;
    if (call.down_bias.data != nullptr) {
      const T* const grad_out = static_cast<const T*>(call.grad_expert_out) + row * call.hidden;
#pragma unroll 8
      for (int64_t i = threadIdx.x; i < call.hidden; i += kThreads)
        grad_weight = __fmaf_rn(to_float(grad_out[i]), param_at<T>(call.down_bias, expert, i), grad_weight);
    }
    grad_weight = block_sum(grad_weight);
    if (threadIdx.x == 0) call.grad_recv_weights[row] = grad_weight;
  });
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads, kAddBiasBlocksPerSm) add_bias_kernel(const __grid_constant__ AddBias call) {
  for_each_row(call.zones, [&](int64_t row, int expert) {
    T* const elements = static_cast<T*>(call.rows) + row * call.columns;
    const float weight = weight_of(call.recv_weights, row);
#pragma unroll 2
    for (int64_t i = threadIdx.x * kVector; i < call.columns; i += kThreads * kVector) {
      float x[kVector];
      float bias[kVector];
      load(elements + i, x);
      load_params<T>(call.bias, expert, i, bias);
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        x[v] = __fmaf_rn(weight, bias[v], x[v]);
      store(elements + i, x);
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) bias_grad_kernel(const __grid_constant__ BiasGrad call) {
  const int64_t chunks = (call.columns + kThreads - 1) / kThreads;
  for (int64_t i = blockIdx.x; i < call.zones.num_experts * chunks; i += gridDim.x) {
    const auto expert = static_cast<int>(i / chunks);
    const int64_t column = i % chunks * kThreads + threadIdx.x;
    if (column >= call.columns) continue;
    const Zone zone = zone_of(call.zones, expert);
    const T* const rows = static_cast<const T*>(call.rows) + column;
    float sum = 0;
#pragma unroll 8
    for (int64_t row = zone.first_row; row < zone.first_row + zone.num_rows; ++row)
      sum = __fmaf_rn(weight_of(call.recv_weights, row), to_float(rows[row * call.row_stride]), sum);
    const int64_t at = expert * call.grad.stride + column;
    if (call.grad.dtype == EPX_FLOAT32) {
      float& grad = static_cast<float*>(call.grad.data)[at];
      grad = call.accumulate ? grad + sum : sum;
    } else {
      static_cast<T*>(call.grad.data)[at] = from_float<T>(sum);
    }
  }
}

// One thread looks at one zone: that it begins where or behind where the one before ends, and lies within the rows.
__global__ void __launch_bounds__(kThreads)
    check_zones_kernel(const __grid_constant__ DeviceZones zones, int64_t alignment, ErrorSink errors) {
  const int e = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (e > zones.num_experts) return;
  const int64_t first = zones.offsets[e];
  const int64_t low = e == 0 ? 0 : zones.offsets[e - 1];
  if (first < low || first > zones.num_rows) report(errors, EPX_MOE_ERROR_OFFSET, e, 0, first, zones.num_rows);
  if (e == zones.num_experts) return;
  const int64_t count = zones.counts[e];
  const int64_t rows = zones.offsets[e + 1] - first;
  if (count < 0 || count > rows) report(errors, EPX_MOE_ERROR_ZONE_COUNT, e, 0, count, rows);
  if (count > 0 && first % alignment != 0) report(errors, EPX_MOE_ERROR_ZONE_ALIGNMENT, e, 0, first, alignment);
}

// Elements that fill 16 bytes.
template <typename T>
constexpr int kVectorOf = static_cast<int>(16 / sizeof(T));

template <typename T>
bool can_vectorize(int64_t row_elements, std::initializer_list<const void*> tensors) {
  if (row_elements % kVectorOf<T> != 0) return false;
  for (const void* tensor : tensors)
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0) return false;
  return true;
}

} // namespace

std::vector<const void*> ffn_kernels(epx_dtype dtype) {
  return with_element_type(dtype, []<typename T>(T) {
    return epx::cuda::addresses_of(&check_zones_kernel, &activate_kernel<T, kVectorOf<T>>, &activate_kernel<T, 1>,
                                   &activate_bwd_kernel<T, kVectorOf<T>>, &activate_bwd_kernel<T, 1>,
                                   &add_bias_kernel<T, kVectorOf<T>>, &add_bias_kernel<T, 1>, &bias_grad_kernel<T>);
  });
}

cudaError_t launch_check_zones(const DeviceZones& zones, const ErrorSink& errors, const LaunchTarget& target,
                               int64_t alignment) {
  if (errors.record == nullptr) return cudaSuccess;
  const epx::cuda::Grid grid{(zones.num_experts + kThreads) / kThreads, kThreads};
  return epx::cuda::launch(&check_zones_kernel, grid, stream_of(target), zones, alignment, errors);
}

cudaError_t launch_activate(const Activate& call, const LaunchTarget& target) {
  return with_element_type(call.layer.dtype, [&]<typename T>(T) {
    if (can_vectorize<T>(call.layer.size, {call.pre_act, call.h, call.gate_bias.data, call.up_bias.data}))
      return epx::cuda::launch(&activate_kernel<T, kVectorOf<T>>, grid_of(target.num_sms, kActivateBlocksPerSm),
                               stream_of(target), call);
    return epx::cuda::launch(&activate_kernel<T, 1>, grid_of(target.num_sms, kActivateBlocksPerSm), stream_of(target),
                             call);
  });
}

cudaError_t launch_activate_bwd(const ActivateBwd& call, const LaunchTarget& target) {
  return with_element_type(call.layer.dtype, [&]<typename T>(T) {
    if (can_vectorize<T>(call.layer.size, {call.pre_act, call.grad_h, call.grad_pre_act, call.h}))
      return epx::cuda::launch(&activate_bwd_kernel<T, kVectorOf<T>>, grid_of(target.num_sms, kActivateBwdBlocksPerSm),
                               stream_of(target), call);
    return epx::cuda::launch(&activate_bwd_kernel<T, 1>, grid_of(target.num_sms, kActivateBwdBlocksPerSm),
                             stream_of(target), call);
  });
}

cudaError_t launch_add_bias(const AddBias& call, const LaunchTarget& target) {
  return with_element_type(call.dtype, [&]<typename T>(T) {
    if (can_vectorize<T>(call.columns, {call.rows, call.bias.data}))
      return epx::cuda::launch(&add_bias_kernel<T, kVectorOf<T>>, grid_of(target.num_sms, kAddBiasBlocksPerSm),
                               stream_of(target), call);
    return epx::cuda::launch(&add_bias_kernel<T, 1>, grid_of(target.num_sms, kAddBiasBlocksPerSm), stream_of(target), call);
  });
}

cudaError_t launch_bias_grad(const BiasGrad& call, const LaunchTarget& target) {
  return with_element_type(call.dtype, [&]<typename T>(T) {
    return epx::cuda::launch(&bias_grad_kernel<T>, grid_of(target.num_sms, kBlocksPerSm), stream_of(target), call);
  });
}

} // namespace epx::moe::cuda
