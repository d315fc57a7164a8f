// SPDX-License-Identifier: Apache-2.0
// The kernels of the grouped FFN that are not matrix products. Rows that belong to no expert are neither read nor written.
#pragma once

#include <vector>

#include <cuda_runtime_api.h>

#include "epx/epx_moe.h"
#include "moe/cuda/error_record.h"
#include "moe/ffn/params.h"
#include "moe/gemm/grouped_gemm.h"

namespace epx::moe::cuda {

// All of them, for rows of the dtype.
std::vector<const void*> ffn_kernels(epx_dtype dtype);

// Reports zones that do not follow each other within the rows, or that have rows and do not begin at a multiple of
// `alignment`. Every kernel bounds what it takes of them by itself.
cudaError_t launch_check_zones(const DeviceZones& zones, const ErrorSink& errors, const LaunchTarget& target,
                               int64_t alignment = 1);

// What the kernels on the inner layer have in common.
struct InnerLayer {
  epx_dtype dtype;
  epx_moe_activation activation;
  int64_t size; // F
  DeviceZones zones;
  const float* recv_weights = nullptr; // [N]; NULL: all 1
};

// Adds the biases to pre_act, in place, and writes h = recv_weights * activation(pre_act).
struct Activate {
  InnerLayer layer;
  void* pre_act = nullptr; // [N, 2F] (gate, then up), or [N, F] without a gate
  ParamTensor gate_bias{}, up_bias{};
  void* h = nullptr; // [N, F]
};
cudaError_t launch_activate(const Activate& call, const LaunchTarget& target);

// From the gradient of recv_weights * h to those of pre_act and of recv_weights. Also writes recv_weights * h again.
struct ActivateBwd {
  InnerLayer layer;
  const void* pre_act = nullptr;         // [N, 2F] or [N, F]
  const void* grad_h = nullptr;          // [N, F]: the gradient of the weighted h
  void* grad_pre_act = nullptr;          // like pre_act
  void* h = nullptr;                     // [N, F]
  float* grad_recv_weights = nullptr;    // [N]; NULL: not wanted
  const void* grad_expert_out = nullptr; // [N, hidden]; with down_bias part of grad_recv_weights
  int64_t hidden = 0;
  ParamTensor down_bias{};
};
cudaError_t launch_activate_bwd(const ActivateBwd& call, const LaunchTarget& target);

// rows += recv_weights * bias, by expert.
struct AddBias {
  epx_dtype dtype;
  DeviceZones zones;
  ParamTensor bias{};                  // [columns] of each expert
  const float* recv_weights = nullptr; // [N]; NULL: all 1
  void* rows = nullptr;                // [N, columns]
  int64_t columns = 0;
};
cudaError_t launch_add_bias(const AddBias& call, const LaunchTarget& target);

// grad = the sum of recv_weights * rows over the rows of each expert, in their order.
struct BiasGrad {
  epx_dtype dtype;
  DeviceZones zones;
  const float* recv_weights = nullptr; // [N]; NULL: all 1
  const void* rows = nullptr;          // [N, row_stride], of which the first `columns` count
  int64_t row_stride = 0;
  int64_t columns = 0;
  ParamTensor grad{}; // [columns] of each expert
  bool accumulate = false;
};
cudaError_t launch_bias_grad(const BiasGrad& call, const LaunchTarget& target);

} // namespace epx::moe::cuda
