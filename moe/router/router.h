// SPDX-License-Identifier: Apache-2.0
// The router: from logits to selected experts and their weights, and back. Arguments are checked by whoever calls.
#pragma once

#include <cstdint>
#include <vector>

#include "epx/epx_moe.h"
#include "moe/tensors.h"

namespace epx::moe {

// Throws with the field and its value.
void validate(const epx_moe_router_config& config);

template <typename T>
struct RouterInputs {
  int64_t num_tokens = 0;
  const T* logits = nullptr;           // [T, E]
  const T* selection_bias = nullptr;   // [E] or NULL
  const uint8_t* token_mask = nullptr; // [T] or NULL
};

struct RouterInfo {
  int64_t masked_tokens = 0;
  int64_t bad_tokens = 0;
  int64_t first_bad_token = -1;
};

inline void write_info(const RouterInfo& info, const epx_tensor& tensor) {
  auto* const values = data_of<int64_t>(&tensor); // [3]
  values[0] = info.masked_tokens;
  values[1] = info.bad_tokens;
  values[2] = info.first_bad_token;
}

// Writes topk_idx[T, K] and topk_weights[T, K].
template <typename T>
RouterInfo route(const epx_moe_router_config& config, const RouterInputs<T>& inputs, Integers topk_idx, T* topk_weights);

// counts_by_rank[P, E] summed over the ranks, as what the load-balance loss needs of it.
class ExpertLoad {
public:
  ExpertLoad(Integers counts_by_rank, int64_t num_ranks, int num_experts);

  double routes(int expert) const { return routes_[expert]; } // n_e
  double total() const { return total_; }

private:
  std::vector<double> routes_; // exact below 2^53
  double total_ = 0;
};

// Writes grad_logits[T, E]. grad_topk_weights may be NULL; so may `load`, without a load-balance loss.
template <typename T>
void route_bwd(const epx_moe_router_config& config, int64_t num_tokens, const T* logits, Integers topk_idx,
               const T* grad_topk_weights, const ExpertLoad* load, double aux_loss_grad, T* grad_logits);

// The share of these tokens in the load-balance loss.
template <typename T>
double aux_loss(const epx_moe_router_config& config, int64_t num_tokens, const T* logits, Integers topk_idx,
                const ExpertLoad& load);

template <typename T>
void update_bias(const ExpertLoad& load, double rate, int num_experts, T* selection_bias);

} // namespace epx::moe
