// SPDX-License-Identifier: Apache-2.0
// The block runs on groups whose ranks are threads: with EPX_COMBINE_EXACT it has the bits of the local block that has all the
// ranks' tokens and experts.
#include <exception>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "epx/epx.hpp"
#include "tests/moe/block_run.h"
#include "tests/support/check.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"

namespace epx::test {
namespace {

constexpr int32_t kNumExperts = 7; // no number of ranks but 1 and 7 divides it
constexpr int32_t kHidden = 33;
constexpr int32_t kMaxTopK = kNumExperts;
constexpr int32_t kMaxAlignment = 8;
constexpr int64_t kNumTokens = 17; // of all ranks
constexpr int64_t kMaskedToken = 2;

// Tokens of each rank for 1, 2, 3 and 4 ranks.
const std::vector<int64_t> kSplits[] = {{17}, {5, 12}, {0, 9, 8}, {6, 1, 0, 10}};

struct Rank {
  epx_group group;
  int rank;
  int num_ranks;
  int64_t first_token;
  int64_t num_tokens;
  int64_t first_expert;
  int64_t num_experts;
};

GroupConfig group_config(epx_combine_precision precision) {
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

void each_rank(const std::vector<int64_t>& split, const epx_group_config& config,
               const std::function<void(const Rank&)>& body) {
  const int num_ranks = static_cast<int>(split.size());
  LocalRendezvous rendezvous(num_ranks);
  run_threads(num_ranks, [&](int rank) {
    const Group group(rendezvous.bootstrap(rank), config);
    const epx_group_info info = group.query();
    Rank self = {group.get(),           rank, num_ranks, 0, split[static_cast<size_t>(rank)], info.first_local_expert,
                 info.num_local_experts};
    for (int before = 0; before < rank; ++before)
      self.first_token += split[static_cast<size_t>(before)];
    body(self);
  });
}

BlockInput<float> share_of(const Rank& rank, const BlockInput<float>& input) {
  BlockInput<float> share = {slice_rows(input.tokens, rank.first_token, rank.num_tokens),
                             slice_rows(input.logits, rank.first_token, rank.num_tokens),
                             slice_rows(input.grad_out, rank.first_token, rank.num_tokens), input.bias,
                             Tensor<uint8_t>({rank.num_tokens})};
  for (int64_t t = 0; t < rank.num_tokens; ++t)
    (*share.mask)[t] = (*input.mask)[rank.first_token + t];
  return share;
}

FfnParams<float> share_of(const Rank& rank, const FfnParams<float>& params) {
  FfnParams<float> share;
  for (const auto& name : params.kNames) {
    if (!(params.*name.tensor)) continue;
    const Tensor<float>& all = *(params.*name.tensor);
    Tensor<float> part = all.ndim() == 2 ? Tensor<float>({rank.num_experts, all.size(1)})
                                         : Tensor<float>({rank.num_experts, all.size(1), all.size(2)});
    for (int64_t i = 0; i < part.count(); ++i)
      part[i] = all[rank.first_expert * all.per_row() + i];
    share.*name.tensor = std::move(part);
  }
  return share;
}

// A Layer has the tokens and experts of all ranks, and the local block's results.
struct Layer {
  epx_moe_block_config config;
  BlockInput<float> input;
  FfnParams<float> params;
  BlockOutput<float> output;
  BlockGradients<float> gradients;

  BlockGradients<float> gradients_of(const Rank& rank) const {
    return {slice_rows(gradients.tokens, rank.first_token, rank.num_tokens),
            slice_rows(gradients.logits, rank.first_token, rank.num_tokens), share_of(rank, gradients.params)};
  }
};

struct LayerOptions {
  int32_t top_k = 3;
  epx_moe_weighting weighting = EPX_MOE_WEIGHT_LATE;
  int32_t alignment = 1;
  double aux_loss_coeff = 0;
};

void run_locally(Layer& layer) {
  const Block<float> block(nullptr, layer.config);
  layer.output = block.forward(layer.input, layer.params);
  layer.gradients = block.backward(layer.input, layer.params);
}

Layer make_layer(uint64_t seed, const LayerOptions& options) {
  Rng rng(mix(seed, 0xb10c));
  const BlockShape shape = {kNumExperts, options.top_k, kHidden, 9, kNumTokens, EPX_MOE_SWIGLU};
  Layer layer;
  layer.config = block_config<float>(shape);
  layer.config.router.score = EPX_MOE_SIGMOID;
  layer.config.router.renormalize = 1;
  layer.config.router.aux_loss_coeff = options.aux_loss_coeff;
  layer.config.weighting = options.weighting;
  layer.config.alignment = options.alignment;
  layer.config.max_in_flight = 2;
  layer.input = {random_tensor<float>({kNumTokens, kHidden}, rng), random_tensor<float>({kNumTokens, kNumExperts}, rng),
                 random_tensor<float>({kNumTokens, kHidden}, rng), random_tensor<float>({kNumExperts}, rng, -0.1, 0.1),
                 Tensor<uint8_t>({kNumTokens}, 1)};
  (*layer.input.mask)[kMaskedToken] = 0;
  layer.params = random_params<float>(shape.ffn_shape(kNumExperts), {}, rng);
  run_locally(layer);
  return layer;
}

// Runs one rank's block of a layer forward and backward.
class RankBlock {
public:
  RankBlock(const Rank& rank, const Layer& layer)
      : rank_(rank), layer_(layer), input_(share_of(rank, layer.input)), params_(share_of(rank, layer.params)),
        block_(rank.group, layer.config, rank.num_ranks) {}

  // tolerance 0: the same bits
  void forward(int32_t flight, double tolerance = 0) {
    const auto output = block_.forward(input_, params_, flight);
    const auto expected = slice_rows(layer_.output.out, rank_.first_token, rank_.num_tokens);
    expect_none("out", tolerance == 0 ? difference(output.out, expected)
                                      : difference(output.out, expected, tolerance, max_abs(converted<double>(expected))));
    expect_none("topk_idx",
                difference(output.topk_idx, slice_rows(layer_.output.topk_idx, rank_.first_token, rank_.num_tokens)));
    expect_none("topk_weights", difference(output.topk_weights,
                                           slice_rows(layer_.output.topk_weights, rank_.first_token, rank_.num_tokens)));
    Tensor<int64_t> counts({1, kNumExperts});
    for (int64_t i = 0; i < output.global_counts.count(); ++i)
      counts[i % kNumExperts] += output.global_counts[i];
    expect_none("global_counts", difference(counts, layer_.output.global_counts));
    info_ = output.info;
  }
  void backward(int32_t flight, double tolerance = 0) {
    const auto gradients = block_.backward(input_, params_, flight);
    expect_none("backward", gradient_difference(gradients, layer_.gradients_of(rank_), tolerance));
  }
  void run(double tolerance = 0) {
    forward(0, tolerance);
    backward(0, tolerance);
  }
  const Tensor<int64_t>& info() const { return info_; }

private:
  static void expect_none(const char* what, const std::string& wrong) { check(wrong.empty(), "{}: {}", what, wrong); }

  const Rank& rank_;
  const Layer& layer_;
  BlockInput<float> input_;
  FfnParams<float> params_;
  Block<float> block_;
  Tensor<int64_t> info_;
};

void check_status_clean(const Rank& rank) {
  const epx_group_report report = GroupView(rank.group).status();
  check(report.message[0] == '\0', "the group says: {}", report.message);
}

TEST_CASE("a block on 1, 2, 3 and 4 ranks has the bits of the local one") {
  std::vector<Layer> layers;
  for (const int32_t top_k : {1, 3, kNumExperts}) {
    for (const epx_moe_weighting weighting : {EPX_MOE_WEIGHT_LATE, EPX_MOE_WEIGHT_EARLY})
      layers.push_back(make_layer(layers.size(), {top_k, weighting, top_k == 3 ? 4 : 1, top_k == 3 ? 0.1 : 0}));
  }
  for (const auto& split : kSplits) {
    each_rank(split, group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
      for (const Layer& layer : layers)
        RankBlock(rank, layer).run();
      check_status_clean(rank);
    });
  }
}

TEST_CASE("three layers and two flights are in progress at once") {
  std::vector<Layer> layers;
  for (uint64_t i = 0; i < 3; ++i)
    layers.push_back(make_layer(10 + i, {2, i == 1 ? EPX_MOE_WEIGHT_EARLY : EPX_MOE_WEIGHT_LATE, 8}));
  each_rank(kSplits[2], group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
    RankBlock first(rank, layers[0]), second(rank, layers[1]), third(rank, layers[2]);
    for (const int32_t flight : {0, 1}) {
      first.forward(flight);
      second.forward(flight);
      third.forward(flight);
    }
    for (const int32_t flight : {1, 0}) {
      third.backward(flight);
      second.backward(flight);
      first.backward(flight);
    }
  });
}

TEST_CASE("wire precision agrees with the local block up to rounding") {
  const Layer late = make_layer(20, {3, EPX_MOE_WEIGHT_LATE, 1});
  const Layer early = make_layer(21, {3, EPX_MOE_WEIGHT_EARLY, 4});
  each_rank(kSplits[3], group_config(EPX_COMBINE_WIRE), [&](const Rank& rank) {
    RankBlock(rank, late).run(1e-5);
    RankBlock(rank, early).run(1e-5);
  });
}

TEST_CASE("no rank waits for one whose logits have a NaN") {
  constexpr int64_t kBadToken = 4; // it belongs to rank 1 of 3
  const Layer clean = make_layer(30, {});
  Layer layer = clean;
  layer.input.logits(kBadToken, 6) = std::numeric_limits<float>::quiet_NaN();
  run_locally(layer);
  for (int64_t t = 0; t < kNumTokens; ++t) { // the local block leaves the other tokens alone
    if (t == kBadToken) continue;
    REQUIRE(difference(slice_rows(layer.output.out, t, 1), slice_rows(clean.output.out, t, 1)) == "");
    REQUIRE(difference(slice_rows(layer.gradients.tokens, t, 1), slice_rows(clean.gradients.tokens, t, 1)) == "");
  }
  each_rank(kSplits[2], group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
    RankBlock block(rank, layer);
    block.run();
    const auto expected = rank.rank == 1 ? Tensor<int64_t>({3}, {1, 1, kBadToken}) : Tensor<int64_t>({3}, {0, 0, -1});
    const std::string wrong = difference(block.info(), expected);
    check(wrong.empty(), "info: {}", wrong);
    check_status_clean(rank);
  });
}

TEST_CASE("a block that does not fit its group is refused before any call on the group") {
  using Config = epx_moe_block_config;
  struct Refusal {
    std::function<void(Config&)> spoil;
    std::vector<std::string> words;
  };
  const std::vector<Refusal> table = {
      {[](Config& c) { c.router.num_experts = 6; }, {"num_experts", "6", "7"}},
      {[](Config& c) { c.ffn.hidden_dim = 65; }, {"hidden_dim", "65", "33"}},
      {[](Config& c) { c.router.top_k = 5; }, {"top_k", "5", "max_top_k", "3"}},
      {[](Config& c) { c.alignment = 16; }, {"alignment", "16", "max_alignment", "8"}},
      {[](Config& c) { c.dtype = EPX_FLOAT64; }, {"float64|FLOAT64", "group"}},
  };
  const Layer layer = make_layer(40, {2});
  epx_group_config narrow = group_config(EPX_COMBINE_EXACT);
  narrow.max_top_k = 3;
  each_rank(kSplits[1], narrow, [&](const Rank& rank) {
    for (size_t i = static_cast<size_t>(rank.rank); i < table.size(); i += 2) { // each rank takes configs of its own
      Config config = layer.config;
      table[i].spoil(config);
      epx_moe_block block = nullptr;
      const std::string fault = not_refused(epx_moe_block_create(rank.group, &config, &block), table[i].words);
      check(fault.empty(), "case {}: {}", i, fault);
      check(block == nullptr, "case {} made a block", i);
    }
    RankBlock(rank, layer).run();
  });

  epx_group_config bfloat16 = group_config(EPX_COMBINE_EXACT);
  bfloat16.max_token_dtype = EPX_BFLOAT16;
  each_rank({kNumTokens}, bfloat16, [&](const Rank& rank) {
    epx_moe_block block = nullptr;
    const std::string fault =
        not_refused(epx_moe_block_create(rank.group, &layer.config, &block), {"max_token_dtype", "bfloat16", "float32"});
    check(fault.empty(), "{}", fault);
  });
}

TEST_CASE("what has ended the group is what the calls of its block return") {
  const Layer layer = make_layer(50, {2});
  each_rank(kSplits[0], group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
    const auto check_aborted = [](const std::string& function, const auto& call) {
      try {
        call();
      } catch (const std::exception& failure) {
        const std::string sentence = failure.what();
        const std::string begin = function + " returned EPX_ERROR_ABORTED: " + function + ": ";
        check(sentence.starts_with(begin) && contains(sentence, "this rank aborted the group"), "{}", sentence);
        return;
      }
      fail_check("{} succeeded", function);
    };
    RankBlock block(rank, layer);
    block.forward(0);
    GroupView(rank.group).abort();
    check_aborted("epx_moe_block_fwd", [&] { block.forward(1); });
    check_aborted("epx_moe_block_bwd", [&] { block.backward(0); });
    check_aborted("epx_moe_block_create", [&] { RankBlock(rank, layer); });
  });
}

} // namespace
} // namespace epx::test
