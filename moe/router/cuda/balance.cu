// SPDX-License-Identifier: Apache-2.0
// The load of the experts, the load-balance loss and the update of the selection bias.
//
// The loss is summed in float64 in an order that depends on the shapes alone: a warp sums the tokens of a chunk in order, and
// one block then sums the chunks by a fixed tree.
#include "moe/router/cuda/kernels.h"

#include "base/device/kernel_addresses.h"
#include "moe/router/cuda/load.cuh"
#include "moe/router/cuda/selection.cuh"

namespace epx::moe::cuda {
namespace {

//   warps  what they do                                      what they wait for
//   all    each thread sums the counts of its experts        barriers of the block
__global__ void __launch_bounds__(kBlockThreads) load_kernel(const __grid_constant__ LoadCall call) {
  double own = 0;
  for (int e = static_cast<int>(threadIdx.x); e < call.num_experts; e += kBlockThreads) {
    const double routes = routes_to(call.global_counts, call.num_ranks, call.num_experts, e, call.errors);
    call.load[e] = routes;
    own += routes;
  }
  const double total = sum_of_block(own);
  if (threadIdx.x == 0) call.load[call.num_experts] = total;
}

//   warps  what they do                          what they wait for
//   all    take one chunk after the other        nothing
template <typename Logit>
__global__ void __launch_bounds__(kThreads) chunk_kernel(const __grid_constant__ AuxLossCall call) {
  const epx_moe_router_config& config = call.config;
  for_each_item(num_chunks(call.logits.num_tokens), [&](int64_t chunk) {
    double sum = 0; // of this lane's experts
    const int64_t end = min((chunk + 1) * kTokensPerChunk, call.logits.num_tokens);
#pragma unroll 1
    for (int64_t token = chunk * kTokensPerChunk; token < end; ++token) {
      if (!has_experts(call.topk_idx, token, config, call.errors)) continue;
      const Logit* const logits = static_cast<const Logit*>(call.logits.data) + token * config.num_experts;
      const BalanceProbabilities<Logit> probabilities(config, logits);
      for_each_of_lane(config.num_experts, [&](int e) {
        sum += static_cast<double>(probabilities(static_cast<float>(logits[e]))) * call.load[e];
      });
    }
    sum = sum_of_lanes(sum);
    if (lane() == 0) call.partials[chunk] = sum;
  });
}

__global__ void __launch_bounds__(kBlockThreads) loss_kernel(const __grid_constant__ AuxLossCall call) {
  double own = 0;
  for (int64_t chunk = threadIdx.x; chunk < num_chunks(call.logits.num_tokens); chunk += kBlockThreads)
    own += call.partials[chunk];
  const double sum = sum_of_block(own);
  if (threadIdx.x == 0) *call.loss = aux_scale(call.config, call.load[call.config.num_experts]) * sum;
}

// The counts are read twice, so that the routes need no memory.
__global__ void __launch_bounds__(kBlockThreads) update_bias_kernel(const __grid_constant__ UpdateBiasCall call) {
  const auto routes = [&](int e, const ErrorSink& errors) {
    return routes_to(call.global_counts, call.num_ranks, call.num_experts, e, errors);
  };
  double own = 0;
  for (int e = static_cast<int>(threadIdx.x); e < call.num_experts; e += kBlockThreads)
    own += routes(e, call.errors);
  const double mean = sum_of_block(own) / call.num_experts;
  for (int e = static_cast<int>(threadIdx.x); e < call.num_experts; e += kBlockThreads)
    call.selection_bias[e] += bias_step(mean, routes(e, {}), call.rate);
}

} // namespace

std::vector<const void*> load_kernels() {
  return epx::cuda::addresses_of(&load_kernel);
}

int launch_load(const LoadCall& call, const LaunchTarget& target) {
  return epx::cuda::launch(&load_kernel, {1, kBlockThreads}, stream_of(target), call);
}

int launch_aux_loss(const AuxLossCall& call, const LaunchTarget& target) {
  if (const int64_t chunks = num_chunks(call.logits.num_tokens); chunks > 0) {
    const cudaError_t error =
        epx::cuda::launch(call.logits.are_bfloat16 ? &chunk_kernel<__nv_bfloat16> : &chunk_kernel<float>,
                          grid_of_warps(chunks, target), stream_of(target), call);
    if (error != cudaSuccess) return error;
  }
  return epx::cuda::launch(&loss_kernel, {1, kBlockThreads}, stream_of(target), call);
}

int launch_update_bias(const UpdateBiasCall& call, const LaunchTarget& target) {
  return epx::cuda::launch(&update_bias_kernel, {1, kBlockThreads}, stream_of(target), call);
}

} // namespace epx::moe::cuda
