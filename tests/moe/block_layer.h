// SPDX-License-Identifier: Apache-2.0
// A layer for tests of the block on groups: the tokens and experts of all ranks, what the local block on the host makes of
// them, and the part of each rank. The group may be on the host or on GPUs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "epx/epx.hpp"
#include "tests/moe/block_run.h"
#include "tests/support/check.h"

namespace epx::test {

inline constexpr int32_t kNumExperts = 7; // no number of ranks but 1 and 7 divides it
inline constexpr int32_t kHidden = 33;
inline constexpr int32_t kMaxTopK = kNumExperts;
inline constexpr int32_t kMaxAlignment = 8;
inline constexpr int64_t kNumTokens = 17; // of all ranks
inline constexpr int64_t kMaskedToken = 2;

// Tokens of each rank for 1, 2, 3 and 4 ranks.
inline const std::vector<int64_t> kSplits[] = {{17}, {5, 12}, {0, 9, 8}, {6, 1, 0, 10}};

struct Rank {
  epx_group group;
  int rank;
  int num_ranks;
  int64_t first_token;
  int64_t num_tokens;
  int64_t first_expert;
  int64_t num_experts;
};

inline Rank make_rank(GroupView group, const std::vector<int64_t>& split) {
  const epx_group_info info = group.query();
  Rank self = {
      group.get(),           info.rank, info.num_ranks, 0, split[static_cast<size_t>(info.rank)], info.first_local_expert,
      info.num_local_experts};
  for (int before = 0; before < info.rank; ++before)
    self.first_token += split[static_cast<size_t>(before)];
  return self;
}

inline GroupConfig group_config(epx_combine_precision precision) {
  GroupConfig config;
  config.num_experts = kNumExperts;
  config.max_tokens_per_rank = kNumTokens;
  config.hidden_dim = kHidden;
  config.max_top_k = kMaxTopK;
  config.max_alignment = kMaxAlignment;
  config.max_token_dtype = EPX_FLOAT32;
  config.combine_precision = precision;
  config.transport = EPX_TRANSPORT_HOST;
  config.timeout_ms = 60'000;
  return config;
}

// Of a group for experts in FP8.
inline GroupConfig fp8_group_config(GroupConfig config) {
  config.hidden_dim = 128;
  config.max_alignment = 16;
  return config;
}

template <typename T>
BlockInput<T> share_of(const Rank& rank, const BlockInput<T>& input) {
  BlockInput<T> share = {slice_rows(input.tokens, rank.first_token, rank.num_tokens),
                         slice_rows(input.logits, rank.first_token, rank.num_tokens),
                         slice_rows(input.grad_out, rank.first_token, rank.num_tokens), input.bias,
                         Tensor<uint8_t>({rank.num_tokens})};
  for (int64_t t = 0; t < rank.num_tokens; ++t)
    (*share.mask)[t] = (*input.mask)[rank.first_token + t];
  return share;
}

template <typename T>
FfnParams<T> share_of(const Rank& rank, const FfnParams<T>& params) {
  FfnParams<T> share;
  for (const auto& name : params.kNames) {
    if (!(params.*name.tensor)) continue;
    const Tensor<T>& all = *(params.*name.tensor);
    Tensor<T> part = all.ndim() == 2 ? Tensor<T>({rank.num_experts, all.size(1)})
                                     : Tensor<T>({rank.num_experts, all.size(1), all.size(2)});
    for (int64_t i = 0; i < part.count(); ++i)
      part[i] = all[rank.first_expert * all.per_row() + i];
    share.*name.tensor = std::move(part);
  }
  return share;
}

// T is the dtype of the block under test; the expected results are computed in float32 from the same values.
template <typename T>
struct LayerOf {
  BlockConfig config;
  BlockInput<T> input;
  FfnParams<T> params;
  BlockOutput<float> output;
  BlockGradients<float> gradients;

  BlockGradients<float> gradients_of(const Rank& rank) const {
    return {slice_rows(gradients.tokens, rank.first_token, rank.num_tokens),
            slice_rows(gradients.logits, rank.first_token, rank.num_tokens), share_of(rank, gradients.params)};
  }

  void run_locally() {
    const OnHost host;
    BlockConfig local = config;
    local.dtype = EPX_FLOAT32;
    local.recompute = 0;
    const BlockInput<float> wide = {converted<float>(input.tokens), input.logits, converted<float>(input.grad_out),
                                    input.bias, input.mask};
    const FfnParams<float> wide_params = converted_params<float>(params);
    const Block<float> block(nullptr, local);
    output = block.forward(wide, wide_params);
    gradients = block.backward(wide, wide_params);
  }
};

struct LayerOptions {
  int32_t top_k = 3;
  epx_moe_weighting weighting = EPX_MOE_WEIGHT_LATE;
  int32_t alignment = 1;
  double aux_loss_coeff = 0;
  bool bfloat16_logits = false; // their values can be stored in two bytes
  int32_t hidden = kHidden;
  int32_t ffn = 9;
  std::optional<epx_row_format> dispatch_format = {};
  epx_moe_recipe recipe = EPX_MOE_RECIPE_WIDE;
};

// Of a layer whose experts are in FP8: H is 128, in a group that has it.
inline LayerOptions fp8_options(epx_moe_recipe recipe, int32_t top_k = 3) {
  LayerOptions options;
  options.top_k = top_k;
  options.weighting = EPX_MOE_WEIGHT_EARLY;
  options.alignment = 16;
  options.hidden = options.ffn = 128;
  options.recipe = recipe;
  return options;
}

template <typename T>
LayerOf<T> make_layer_of(uint64_t seed, const LayerOptions& options) {
  Rng rng(mix(seed, 0xb10c));
  const BlockShape shape = {kNumExperts, options.top_k, options.hidden, options.ffn, kNumTokens, EPX_MOE_SWIGLU};
  LayerOf<T> layer;
  layer.config = block_config<T>(shape);
  layer.config.router.score = EPX_MOE_SIGMOID;
  layer.config.router.renormalize = options.top_k > 1 ? 1 : 0; // a lone weight would have no gradient
  layer.config.router.aux_loss_coeff = options.aux_loss_coeff;
  layer.config.weighting = options.weighting;
  layer.config.alignment = options.alignment;
  layer.config.max_in_flight = 2;
  layer.config.dispatch_format = options.dispatch_format;
  layer.config.recipe = options.recipe;
  layer.input = {random_tensor<T>({kNumTokens, options.hidden}, rng), random_tensor<float>({kNumTokens, kNumExperts}, rng),
                 random_tensor<T>({kNumTokens, options.hidden}, rng), random_tensor<float>({kNumExperts}, rng, -0.1, 0.1),
                 Tensor<uint8_t>({kNumTokens}, 1)};
  if (options.bfloat16_logits) layer.input.logits = converted<float>(converted<Bfloat16>(layer.input.logits));
  (*layer.input.mask)[kMaskedToken] = 0;
  layer.params =
      random_params<T>(shape.ffn_shape(kNumExperts), options.recipe == EPX_MOE_RECIPE_WIDE ? FfnForm{} : kStacked, rng);
  layer.run_locally();
  return layer;
}

inline void expect_none(const char* what, const std::string& wrong) {
  check(wrong.empty(), "{}: {}", what, wrong);
}

// Compares this rank's part of a layer. tolerance 0: the same bits.
template <typename T>
void expect_forward(const Rank& rank, const LayerOf<T>& layer, const BlockOutput<T>& output, double tolerance) {
  const auto part = [&](const auto& tensor) { return slice_rows(tensor, rank.first_token, rank.num_tokens); };
  const double of_weights = on_cuda() ? 1e-5 : 0; // the sigmoid of a GPU differs from the host's in the last bits
  expect_none("forward",
              tensor_difference("out", output.out, part(layer.output.out), tolerance) +
                  tensor_difference("topk_weights", output.topk_weights, part(layer.output.topk_weights), of_weights));
  expect_none("topk_idx", difference(output.topk_idx, part(layer.output.topk_idx)));
  Tensor<int64_t> counts({1, kNumExperts});
  for (int64_t i = 0; i < output.global_counts.count(); ++i)
    counts[i % kNumExperts] += output.global_counts[i];
  expect_none("global_counts", difference(counts, layer.output.global_counts));
}
template <typename T>
void expect_backward(const Rank& rank, const LayerOf<T>& layer, const BlockGradients<T>& gradients, double tolerance) {
  expect_none("backward", gradient_difference(gradients, layer.gradients_of(rank), tolerance));
}

// Runs one rank's block of a layer forward and backward.
template <typename T>
class RankBlockOf {
public:
  RankBlockOf(const Rank& rank, const LayerOf<T>& layer) : RankBlockOf(rank, layer, layer.config) {}
  // With the layer's config but for what does not change the results, an arena for instance.
  RankBlockOf(const Rank& rank, const LayerOf<T>& layer, const BlockConfig& config)
      : rank_(rank), layer_(layer), input_(share_of(rank, layer.input)), params_(share_of(rank, layer.params)),
        block_(rank.group, config, rank.num_ranks) {}

  const BlockInput<T>& input() const { return input_; }
  const FfnParams<T>& params() const { return params_; }
  const Block<T>& block() const { return block_; }
  const Tensor<int64_t>& info() const { return info_; }

  // tolerance 0: the same bits
  BlockOutput<T> forward(int32_t flight, double tolerance = 0) {
    BlockOutput<T> output = block_.forward(input_, params_, flight);
    expect_forward(rank_, layer_, output, tolerance);
    info_ = output.info;
    return output;
  }
  BlockGradients<T> backward(int32_t flight, double tolerance = 0) {
    BlockGradients<T> gradients = block_.backward(input_, params_, flight);
    expect_backward(rank_, layer_, gradients, tolerance);
    return gradients;
  }
  void run(double tolerance = 0) {
    forward(0, tolerance);
    backward(0, tolerance);
  }

private:
  const Rank& rank_;
  const LayerOf<T>& layer_;
  BlockInput<T> input_;
  FfnParams<T> params_;
  Block<T> block_;
  Tensor<int64_t> info_;
};

inline void check_status_clean(const Rank& rank) {
  const epx_group_report report = GroupView(rank.group).status();
  check(report.message[0] == '\0', "the group says: {}", report.message);
}

} // namespace epx::test
