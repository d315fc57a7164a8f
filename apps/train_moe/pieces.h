// SPDX-License-Identifier: Apache-2.0
// These are the parts of epx_moe.h that a layer needs when it routes without epx, on vectors of float.
#pragma once

#include <cstdint>
#include <vector>

#include "apps/train_moe/options.h"
#include "epx/epx_moe.hpp"

namespace train {

// Router selects the experts of T tokens, and computes the gradients of their logits.
class Router {
public:
  Router(const ModelOptions& model, double aux_loss);

  // Writes topk_idx[T, K], topk_weights[T, K] and info[3].
  void forward(const float* logits, int64_t num_tokens, int32_t* topk_idx, float* topk_weights, int64_t* info) const;
  void backward(const float* logits, int64_t num_tokens, const int32_t* topk_idx, const float* grad_topk_weights,
                const std::vector<int32_t>& global_counts, float* grad_logits) const;

private:
  epx::moe::RouterConfig config_;
};

// A Permutation sorts rows by expert on this rank.
class Permutation {
public:
  // topk_idx[T, K] names experts 0..E-1.
  Permutation(const int32_t* topk_idx, int64_t num_tokens, int64_t top_k, int64_t num_experts);

  int64_t num_rows() const { return offsets_.back(); }
  const std::vector<int32_t>& counts() const { return counts_; }   // [E]
  const std::vector<int32_t>& offsets() const { return offsets_; } // [E + 1]

  std::vector<float> permute(const float* tokens, int64_t hidden) const; // [T, H] -> [N, H]
  void permute_bwd(const std::vector<float>& grad_rows, int64_t hidden, float* grad_tokens) const;
  // rows[N, H], weights[T, K] or NULL -> tokens[T, H]
  void unpermute(const std::vector<float>& rows, const float* topk_weights, int64_t hidden, float* tokens) const;
  // Returns grad_rows[N, H].
  std::vector<float> unpermute_bwd(const float* grad_tokens, const std::vector<float>& rows, const float* topk_weights,
                                   int64_t hidden, float* grad_topk_weights) const;

private:
  epx::ConstTensor map() const;

  int64_t num_tokens_, top_k_;
  std::vector<int32_t> counts_, offsets_, row_map_;
};

// The tensors of one layer's experts on this rank, gate_up [E_l, 2F, H] and down [E_l, H, F], as epx takes them.
epx::moe::FfnParams expert_params(const ModelOptions& model, int64_t num_local_experts, const void* gate_up,
                                  const void* down, epx_dtype dtype = EPX_FLOAT32);
epx::moe::FfnGrads expert_grads(const ModelOptions& model, int64_t num_local_experts, float* gate_up, float* down);

// GroupedFfn runs SwiGLU experts on rows sorted by expert.
class GroupedFfn {
public:
  GroupedFfn(const ModelOptions& model, int64_t num_local_experts);

  std::vector<float> forward(const std::vector<float>& rows, const Permutation& zones, const epx::moe::FfnParams& params,
                             std::vector<float>& pre_act) const;
  // Returns grad_rows; overwrites grads.
  std::vector<float> backward(const std::vector<float>& rows, const Permutation& zones, const epx::moe::FfnParams& params,
                              const std::vector<float>& pre_act, const std::vector<float>& grad_out,
                              const epx::moe::FfnGrads& grads) const;

private:
  epx::moe::FfnConfig config_;
};

} // namespace train
