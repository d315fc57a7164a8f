// SPDX-License-Identifier: Apache-2.0
// The router's kernels, for the host code that launches them. Arguments have been checked; each function returns a cudaError_t.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "epx/epx_moe.h"
#include "moe/cuda/error_record.h"
#include "moe/cuda/launch_target.h"
#include "moe/integers.h"

namespace epx::moe::cuda {

// The kernels of a router in a block: of launch_route(), launch_load() and launch_route_bwd().
std::vector<const void*> route_kernels();
std::vector<const void*> load_kernels();
std::vector<const void*> route_bwd_kernels();

constexpr int kMaxGroups = 1024; // their scores are in shared memory

// Logits are FLOAT32 or BFLOAT16, and so are their gradients.
struct Logits {
  const void* data = nullptr; // [T, E]
  bool are_bfloat16 = false;
  int64_t num_tokens = 0;
};

struct RouteCall {
  epx_moe_router_config config;
  Logits logits;
  const float* selection_bias; // [E] or NULL
  const uint8_t* token_mask;   // [T] or NULL
  Integers topk_idx;           // [T, K]
  float* topk_weights;         // [T, K]
  int64_t* info;               // [3] or NULL
};
int launch_route(const RouteCall& call, const LaunchTarget& target);

// ExpertLoad on the device: doubles, the routes to each expert and then their total.
constexpr size_t load_bytes(int64_t num_experts) {
  return round_up_workspace(static_cast<size_t>(num_experts + 1) * sizeof(double));
}
constexpr size_t route_bwd_bytes(const epx_moe_router_config& config) {
  return config.aux_loss_coeff != 0 ? load_bytes(config.num_experts) : 0;
}
struct LoadCall {
  Integers global_counts; // [P, E]
  int64_t num_ranks;
  int num_experts;
  double* load; // [E + 1]
  ErrorSink errors;
};
int launch_load(const LoadCall& call, const LaunchTarget& target);

struct RouteBwdCall {
  epx_moe_router_config config;
  Logits logits;
  Integers topk_idx;              // [T, K]
  const float* grad_topk_weights; // [T, K] or NULL
  const double* load;             // or NULL, without a load-balance loss
  double aux_loss_grad;
  void* grad_logits; // [T, E]
  ErrorSink errors;
};
int launch_route_bwd(const RouteBwdCall& call, const LaunchTarget& target);

// A warp sums the tokens of a chunk in order, so that the sum does not depend on who does.
constexpr int64_t kTokensPerChunk = 8;
constexpr int64_t num_chunks(int64_t num_tokens) {
  return (num_tokens + kTokensPerChunk - 1) / kTokensPerChunk;
}
constexpr size_t aux_loss_bytes(int64_t num_tokens, int64_t num_experts) {
  return load_bytes(num_experts) + round_up_workspace(static_cast<size_t>(num_chunks(num_tokens)) * sizeof(double));
}
struct AuxLossCall {
  epx_moe_router_config config;
  Logits logits;
  Integers topk_idx;  // [T, K]
  const double* load; // [E + 1]
  double* partials;   // [num_chunks], written first
  double* loss;       // [1]
  ErrorSink errors;
};
int launch_aux_loss(const AuxLossCall& call, const LaunchTarget& target);

struct UpdateBiasCall {
  Integers global_counts; // [P, E]
  int64_t num_ranks;
  int num_experts;
  float rate;
  float* selection_bias; // [E]
  ErrorSink errors;
};
int launch_update_bias(const UpdateBiasCall& call, const LaunchTarget& target);

} // namespace epx::moe::cuda
