// SPDX-License-Identifier: Apache-2.0
// The oracle computes what epx_moe_router and epx_moe_aux_loss must return, by epx_moe.h alone, slowly and plainly on purpose.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "epx/epx_moe.h"
#include "tests/moe/tensors.h"

namespace epx::test {

struct RouterAnswer {
  Tensor<int64_t> topk_idx;    // [T, K]
  Tensor<double> topk_weights; // [T, K]
  std::array<int64_t, 3> info; // masked, bad, first bad
  std::vector<double> gap;     // [T] smallest difference above 0 of compared keys, relative to the largest
};

// bias and mask may be NULL. Ties go to the lower index, among groups too. A masked token is not read.
RouterAnswer route(const epx_moe_router_config& config, const Tensor<double>& logits, const Tensor<double>* bias,
                   const Tensor<uint8_t>* mask);

// Return p of the load-balance loss for one token, and the loss over all tokens. Rows of -1 in topk_idx are masked tokens.
std::vector<double> balance_probabilities(const epx_moe_router_config& config, const double* logits);
double balance_loss(const epx_moe_router_config& config, const Tensor<double>& logits, const Tensor<int64_t>& topk_idx);

} // namespace epx::test
