// SPDX-License-Identifier: Apache-2.0
// Runs MoE blocks, local or on a group, for the tests. It works on any thread, since failures are thrown.
#pragma once

#include <exception>
#include <optional>

#include "epx/epx_moe.h"
#include "tests/moe/ffn_run.h"
#include "tests/moe/tensors.h"

namespace epx::test {

struct BlockShape {
  int32_t num_experts = 4;
  int32_t top_k = 2;
  int32_t hidden = 5;
  int32_t ffn = 4;
  int32_t max_tokens = 8;
  epx_moe_activation activation = EPX_MOE_SWIGLU;

  FfnShape ffn_shape(int32_t num_local_experts) const { return {num_local_experts, hidden, ffn, activation}; }
};

template <typename Real>
epx_moe_block_config block_config(const BlockShape& shape) {
  epx_moe_block_config config;
  require_ok(epx_moe_block_config_init(&config), "epx_moe_block_config_init");
  config.router.num_experts = shape.num_experts;
  config.router.top_k = shape.top_k;
  config.ffn.hidden_dim = shape.hidden;
  config.ffn.ffn_dim = shape.ffn;
  config.ffn.activation = shape.activation;
  config.dtype = kDtype<Real>;
  config.max_tokens_per_rank = shape.max_tokens;
  return config;
}

template <typename Real>
struct BlockInput {
  Tensor<Real> tokens;                 // [T, H]
  Tensor<Real> logits;                 // [T, E]
  Tensor<Real> grad_out;               // [T, H]
  std::optional<Tensor<Real>> bias;    // [E]
  std::optional<Tensor<uint8_t>> mask; // [T]
};

template <typename Real>
struct BlockOutput {
  Tensor<Real> out;              // [T, H]
  Tensor<int64_t> topk_idx;      // [T, K]
  Tensor<Real> topk_weights;     // [T, K]
  Tensor<int64_t> global_counts; // [P, E]
  Tensor<int64_t> info;          // [3]
};

template <typename Real>
struct BlockGradients {
  Tensor<Real> tokens;    // [T, H]
  Tensor<Real> logits;    // [T, E]
  FfnParams<Real> params; // of this rank's experts
};

// Owns a block and runs it forward and backward.
template <typename Real>
class Block {
public:
  Block(epx_group group, const epx_moe_block_config& config, int num_ranks = 1)
      : group_(group), config_(config), num_ranks_(num_ranks) {
    require_ok(epx_moe_block_create(group, &config, &block_), "epx_moe_block_create");
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    // Destroying is collective, and a rank that has failed must not wait for those that continue.
    if (group_ != nullptr && std::uncaught_exceptions() > 0) epx_group_abort(group_);
    epx_moe_block_destroy(block_);
  }

  epx_moe_block handle() const { return block_; }

  BlockOutput<Real> forward(const BlockInput<Real>& input, const FfnParams<Real>& params, int32_t flight = 0) const {
    const int64_t num_tokens = input.tokens.size(0);
    const int64_t top_k = config_.router.top_k;
    BlockOutput<Real> output = {scribbled<Real>({num_tokens, config_.ffn.hidden_dim}),
                                scribbled<int64_t>({num_tokens, top_k}), scribbled<Real>({num_tokens, top_k}),
                                scribbled<int64_t>({num_ranks_, config_.router.num_experts}), scribbled<int64_t>({3})};
    const epx_moe_ffn_params view = params.view();
    epx_moe_block_fwd_args args = {};
    args.struct_size = sizeof(args);
    args.flight = flight;
    args.tokens = input.tokens.get();
    args.logits = input.logits.get();
    args.selection_bias = input.bias ? input.bias->get() : nullptr;
    args.token_mask = input.mask ? input.mask->get() : nullptr;
    args.params = &view;
    args.out = output.out.get();
    args.topk_idx = output.topk_idx.get();
    args.topk_weights = output.topk_weights.get();
    args.global_counts = output.global_counts.get();
    args.info = output.info.get();
    require_ok(epx_moe_block_fwd(block_, &args), "epx_moe_block_fwd");
    return output;
  }

  BlockGradients<Real> backward(const BlockInput<Real>& input, const FfnParams<Real>& params, int32_t flight = 0,
                                double aux_loss_grad = 1) const {
    const int64_t num_tokens = input.tokens.size(0);
    BlockGradients<Real> gradients = {scribbled<Real>({num_tokens, config_.ffn.hidden_dim}),
                                      scribbled<Real>({num_tokens, config_.router.num_experts}), scribbled_like(params)};
    const epx_moe_ffn_params view = params.view();
    const epx_moe_ffn_params grads = gradients.params.view();
    epx_moe_block_bwd_args args = {};
    args.struct_size = sizeof(args);
    args.flight = flight;
    args.params = &view;
    args.grad_out = input.grad_out.get();
    args.aux_loss_grad = aux_loss_grad;
    args.grad_tokens = gradients.tokens.get();
    args.grad_logits = gradients.logits.get();
    args.grads = &grads;
    require_ok(epx_moe_block_bwd(block_, &args), "epx_moe_block_bwd");
    return gradients;
  }

private:
  epx_group group_;
  epx_moe_block_config config_;
  int num_ranks_;
  epx_moe_block block_ = nullptr;
};

// Returns "" when both have the same bits, or differ by no more than the tolerance, relative to each tensor's largest element.
template <typename Real>
std::string gradient_difference(const BlockGradients<Real>& actual, const BlockGradients<Real>& expected,
                                double tolerance = 0) {
  std::string wrong;
  const auto compare = [&](const char* name, const Tensor<Real>& a, const Tensor<Real>& b) {
    const std::string text = tolerance == 0 ? difference(a, b) : difference(a, b, tolerance, max_abs(converted<double>(b)));
    if (!text.empty()) wrong += std::string(name) + ": " + text + "; ";
  };
  compare("grad_tokens", actual.tokens, expected.tokens);
  compare("grad_logits", actual.logits, expected.logits);
  for_each_tensor(compare, actual.params, expected.params);
  return wrong;
}

} // namespace epx::test
