// SPDX-License-Identifier: Apache-2.0
// Runs MoE blocks, local or on a group, for the tests. It works on any thread, since failures are thrown.
#pragma once

#include <exception>
#include <optional>

#include "epx/epx_moe.hpp"
#include "tests/moe/ffn_fp8_run.h"
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

using moe::BlockConfig;

template <typename Real>
BlockConfig block_config(const BlockShape& shape) {
  BlockConfig config;
  config.router.num_experts = shape.num_experts;
  config.router.top_k = shape.top_k;
  config.ffn.hidden_dim = shape.hidden;
  config.ffn.ffn_dim = shape.ffn;
  config.ffn.activation = shape.activation;
  config.dtype = kDtype<Real>;
  config.max_tokens_per_rank = shape.max_tokens;
  return config;
}

// T is the dtype of the block.
template <typename T>
struct BlockInput {
  Tensor<T> tokens;                      // [T, H]
  Tensor<RealOf<T>> logits;              // [T, E]
  Tensor<T> grad_out;                    // [T, H]
  std::optional<Tensor<RealOf<T>>> bias; // [E]
  std::optional<Tensor<uint8_t>> mask;   // [T]
};

template <typename T>
struct BlockOutput {
  Tensor<T> out;                  // [T, H]
  Tensor<int64_t> topk_idx;       // [T, K]
  Tensor<RealOf<T>> topk_weights; // [T, K]
  Tensor<int64_t> global_counts;  // [P, E]
  Tensor<int64_t> info;           // [3]
};

template <typename T>
struct BlockGradients {
  Tensor<T> tokens;            // [T, H]
  Tensor<RealOf<T>> logits;    // [T, E]
  FfnParams<RealOf<T>> params; // of this rank's experts
};

// Owns an arena for blocks of this config.
class BlockArena {
public:
  BlockArena(epx_group group, const BlockConfig& config, int32_t num_flights, int64_t max_rows = 0)
      : group_(group), arena_(group_, {.block = config, .num_flights = num_flights, .max_rows = max_rows}) {}
  BlockArena(const BlockArena&) = delete;
  BlockArena& operator=(const BlockArena&) = delete;
  ~BlockArena() {
    // Destroying is collective, and a rank that has failed must not wait for those that continue.
    if (std::uncaught_exceptions() > 0) group_.abort();
    epx_moe_arena_destroy(arena_.release());
  }

  epx_moe_arena handle() const { return arena_.get(); }
  epx_moe_arena_info info() const { return arena_.query(); }
  BlockConfig serve(BlockConfig config) const {
    config.arena = arena_.get();
    return config;
  }

private:
  GroupView group_;
  moe::Arena arena_;
};

// Owns a block and runs it forward and backward.
template <typename T>
class Block {
public:
  Block(epx_group group, const BlockConfig& config, int num_ranks = 1)
      : group_(group), config_(config), num_ranks_(num_ranks), block_(group_, config) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    if (std::uncaught_exceptions() > 0) group_.abort(); // as BlockArena
    epx_moe_block_destroy(block_.release());
  }

  epx_moe_block handle() const { return block_.get(); }

  BlockOutput<T> make_output(int64_t num_tokens) const {
    return {scribbled<T>({num_tokens, config_.ffn.hidden_dim}), scribbled<int64_t>({num_tokens, config_.router.top_k}),
            scribbled<RealOf<T>>({num_tokens, config_.router.top_k}),
            scribbled<int64_t>({num_ranks_, config_.router.num_experts}), scribbled<int64_t>({3})};
  }
  BlockGradients<T> make_gradients(int64_t num_tokens, const FfnParams<T>& params) const {
    return {scribbled<T>({num_tokens, config_.ffn.hidden_dim}),
            scribbled<RealOf<T>>({num_tokens, config_.router.num_experts}),
            scribbled_like(converted_params<RealOf<T>>(params))};
  }

  // The arguments of a call, which are valid as long as the tensors live. They are made before a capture begins, since that
  // copies the tensors to the device.
  struct Params {
    epx_moe_ffn_params wide;
    Fp8Params quantised; // with a recipe in FP8
    epx_moe_fp8_params fp8;
  };
  struct Forward {
    Params params;
    epx_moe_block_fwd_args args;
  };
  struct Backward {
    Params params;
    epx_moe_ffn_params grads;
    epx_moe_block_bwd_args args;
  };
  void make_call(Forward& call, const BlockInput<T>& input, const FfnParams<T>& params, int32_t flight,
                 const BlockOutput<T>& output) const {
    call.args = {};
    set_params(call, params);
    call.args.struct_size = sizeof(call.args);
    call.args.cuda = place_of_call();
    call.args.flight = flight;
    call.args.tokens = input.tokens.get();
    call.args.logits = input.logits.get();
    call.args.selection_bias = input.bias ? input.bias->get() : nullptr;
    call.args.token_mask = input.mask ? input.mask->get() : nullptr;
    call.args.out = output.out.get();
    call.args.topk_idx = output.topk_idx.get();
    call.args.topk_weights = output.topk_weights.get();
    call.args.global_counts = output.global_counts.get();
    call.args.info = output.info.get();
  }
  void make_call(Backward& call, const BlockInput<T>& input, const FfnParams<T>& params, int32_t flight,
                 const BlockGradients<T>& gradients, double aux_loss_grad = 1) const {
    call.grads = gradients.params.view();
    call.args = {};
    set_params(call, params);
    call.args.struct_size = sizeof(call.args);
    call.args.cuda = place_of_call();
    call.args.flight = flight;
    call.args.grad_out = input.grad_out.get();
    call.args.aux_loss_grad = aux_loss_grad;
    call.args.grad_tokens = gradients.tokens.get();
    call.args.grad_logits = gradients.logits.get();
    call.args.grads = &call.grads;
  }
  // On a GPU these only enqueue.
  void run(const Forward& call) const { require_ok(epx_moe_block_fwd(handle(), &call.args), "epx_moe_block_fwd"); }
  void run(const Backward& call) const { require_ok(epx_moe_block_bwd(handle(), &call.args), "epx_moe_block_bwd"); }

  BlockOutput<T> forward(const BlockInput<T>& input, const FfnParams<T>& params, int32_t flight = 0) const {
    BlockOutput<T> output = make_output(input.tokens.size(0));
    Forward call;
    make_call(call, input, params, flight, output);
    run(call);
    finish_call();
    return output;
  }
  BlockGradients<T> backward(const BlockInput<T>& input, const FfnParams<T>& params, int32_t flight = 0,
                             double aux_loss_grad = 1) const {
    BlockGradients<T> gradients = make_gradients(input.tokens.size(0), params);
    Backward call;
    make_call(call, input, params, flight, gradients, aux_loss_grad);
    run(call);
    finish_call();
    return gradients;
  }

private:
  // Those of the block's recipe.
  template <typename Call>
  void set_params(Call& call, const FfnParams<T>& params) const {
    if (config_.recipe == EPX_MOE_RECIPE_WIDE) {
      call.params.wide = params.view();
      call.args.params = &call.params.wide;
    } else {
      call.params.quantised = quantised_params(converted_params<float>(params));
      call.params.fp8 = call.params.quantised.view();
      call.args.fp8_params = &call.params.fp8;
    }
  }

  GroupView group_;
  BlockConfig config_;
  int num_ranks_;
  moe::Block block_;
};

// Returns "" when both have the same bits, or differ by no more than the tolerance, relative to the largest element.
template <typename A, typename B>
std::string tensor_difference(const char* name, const Tensor<A>& actual, const Tensor<B>& expected, double tolerance) {
  const auto wide = converted<double>(expected);
  const std::string text = tolerance == 0 ? difference(converted<B>(actual), expected)
                                          : difference(converted<double>(actual), wide, tolerance, max_abs(wide));
  return text.empty() ? "" : std::string(name) + ": " + text + "; ";
}

// The same for each tensor. A is the dtype of a block under test, B of the one that computes what is expected.
template <typename A, typename B>
std::string gradient_difference(const BlockGradients<A>& actual, const BlockGradients<B>& expected, double tolerance = 0) {
  std::string wrong = tensor_difference("grad_tokens", actual.tokens, expected.tokens, tolerance) +
                      tensor_difference("grad_logits", actual.logits, expected.logits, tolerance);
  for_each_tensor(
      [&](const char* name, const auto& a, const auto& b) { wrong += tensor_difference(name, a, b, tolerance); },
      actual.params, expected.params);
  return wrong;
}

} // namespace epx::test
