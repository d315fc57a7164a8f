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

// Computes on the host, in T, as the functions below. The args have been checked.
template <typename T>
void route(const epx_moe_router_config& config, const epx_moe_router_args& args);

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

// `load` may be NULL, without a load-balance loss.
template <typename T>
void route_bwd(const epx_moe_router_config& config, const epx_moe_router_bwd_args& args, const ExpertLoad* load);

// The share of the args' tokens in the load-balance loss.
template <typename T>
double aux_loss(const epx_moe_router_config& config, const epx_moe_aux_loss_args& args, const ExpertLoad& load);

template <typename T>
void update_bias(const ExpertLoad& load, double rate, int num_experts, T* selection_bias);

} // namespace epx::moe
