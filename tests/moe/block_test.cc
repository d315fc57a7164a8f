// SPDX-License-Identifier: Apache-2.0
// These tests compare gradients of the local block (without a group) with finite differences, and check which results have the
// same bits.
#include <cmath>
#include <limits>
#include <string>

#include <doctest/doctest.h>

#include "tests/moe/block_run.h"
#include "tests/moe/permute_run.h"
#include "tests/moe/router_run.h"
#include "tests/moe/row_formats.h"

namespace epx::test {
namespace {

template <typename Real>
BlockInput<Real> random_input(const BlockShape& shape, int64_t num_tokens, Rng& rng) {
  BlockInput<Real> input;
  input.tokens = random_tensor<Real>({num_tokens, shape.hidden}, rng);
  input.logits = converted<Real>(spaced_logits(num_tokens, shape.num_experts, rng));
  input.grad_out = random_tensor<Real>({num_tokens, shape.hidden}, rng);
  return input;
}

template <typename Real>
FfnParams<Real> random_block_params(const BlockShape& shape, Rng& rng) {
  return random_params<Real>(shape.ffn_shape(shape.num_experts), {}, rng);
}

// Loss = <out, grad_out> + 0.6 * load-balance loss, whose counts are constants.
void check_block_gradients(const BlockShape& shape, BlockConfig config, bool masked, const std::string& what) {
  constexpr double kAuxGrad = 0.6;
  Rng rng(71);
  auto input = random_input<double>(shape, 6, rng);
  if (masked) input.mask = Tensor<uint8_t>({6}, {1, 0, 1, 1, 0, 1});
  input.bias = random_tensor<double>({shape.num_experts}, rng, -0.05, 0.05);
  auto params = random_block_params<double>(shape, rng);
  const Block<double> block(nullptr, config);
  const auto output = block.forward(input, params);
  const auto gradients = block.backward(input, params, 0, kAuxGrad);
  const auto value = [&] {
    const auto again = block.forward(input, params);
    REQUIRE(difference(again.topk_idx, output.topk_idx) == "");
    const bool with_aux = config.router.aux_loss_coeff != 0;
    const double aux = with_aux ? aux_loss(config.router, input.logits, output.topk_idx, output.global_counts) : 0;
    return dot(again.out, input.grad_out) + kAuxGrad * aux;
  };
  check_gradient(value, input.tokens, gradients.tokens, what + ": tokens");
  check_gradient(value, input.logits, gradients.logits, what + ": logits");
  for_each_tensor([&](const char* name, Tensor<double>& param,
                      const Tensor<double>& grad) { check_gradient(value, param, grad, what + ": " + name); },
                  params, gradients.params);
  for (int64_t h = 0; masked && h < shape.hidden; ++h) {
    CHECK(output.out(1, h) == 0);
    CHECK(gradients.tokens(4, h) == 0);
  }
}

TEST_CASE("gradients of the block by finite differences") {
  for (const epx_moe_weighting weighting : {EPX_MOE_WEIGHT_LATE, EPX_MOE_WEIGHT_EARLY}) {
    for (const int32_t top_k : {1, 2, 4}) {
      for (const double coefficient : {0.0, 0.2}) {
        BlockShape shape;
        shape.top_k = top_k;
        BlockConfig config = block_config<double>(shape);
        config.weighting = weighting;
        config.router.aux_loss_coeff = coefficient;
        config.router.score = top_k == 1 ? EPX_MOE_SIGMOID : EPX_MOE_SOFTMAX_THEN_TOPK;
        config.router.renormalize = top_k == 2;
        config.router.scaling_factor = 1.5;
        check_block_gradients(shape, config, coefficient != 0,
                              "weighting " + std::to_string(weighting) + ", K " + std::to_string(top_k) +
                                  ", aux_loss_coeff " + std::to_string(coefficient));
      }
    }
  }
  BlockShape shape;
  for (const epx_moe_activation activation : {EPX_MOE_GELU, EPX_MOE_RELU2}) {
    shape.activation = activation;
    BlockConfig config = block_config<double>(shape);
    config.alignment = 4;
    check_block_gradients(shape, config, true, "activation " + std::to_string(activation));
  }
}

TEST_CASE("the block has the results of the router, the permutation and the FFN called in turn") {
  Rng rng(72);
  const BlockShape shape = {6, 3, 33, 9, 12, EPX_MOE_SWIGLU};
  const auto input = random_input<float>(shape, 11, rng);
  const auto params = random_block_params<float>(shape, rng);
  BlockConfig config = block_config<float>(shape);
  config.alignment = 4;
  const auto output = Block<float>(nullptr, config).forward(input, params);

  const auto routed = run_router(config.router, input.logits);
  const auto map = run_row_map<int64_t, int32_t>(routed.topk_idx, shape.num_experts, config.alignment);
  const auto rows = run_permute(map.row_map, input.tokens, map.num_rows()).rows;
  const Zones zones = {map.counts, map.offsets, map.num_rows(), {}};
  const auto expert_out = run_ffn(shape.ffn_shape(shape.num_experts), params, zones, rows).expert_out;
  CHECK(difference(output.topk_idx, routed.topk_idx) == "");
  CHECK(difference(output.topk_weights, routed.topk_weights) == "");
  CHECK(difference(output.info, routed.info) == "");
  CHECK(difference(output.out, run_unpermute(map.row_map, expert_out, &routed.topk_weights)) == "");
  for (int64_t e = 0; e < shape.num_experts; ++e)
    CHECK(output.global_counts(0, e) == map.counts[e]);
}

TEST_CASE("late and early weighting agree in float32, with all biases") {
  const BlockShape shape = {7, 3, 33, 17, 40, EPX_MOE_SWIGLU};
  Rng rng(73);
  const auto input = random_input<float>(shape, 40, rng);
  const auto params = random_block_params<float>(shape, rng);
  BlockConfig config = block_config<float>(shape);
  const Block<float> late(nullptr, config);
  config.weighting = EPX_MOE_WEIGHT_EARLY;
  const Block<float> early(nullptr, config);
  const auto expected = late.forward(input, params).out;
  CHECK(difference(early.forward(input, params).out, expected, 1e-5, max_abs(converted<double>(expected))) == "");
  CHECK(gradient_difference(early.backward(input, params), late.backward(input, params), 1e-5) == "");
}

// The gradient passes straight through the quantiser, so it too is that of the tokens that arrive.
TEST_CASE("a block with a format has the bits of one whose tokens were quantised and dequantised before") {
  const BlockShape shape = {6, 3, 300, 9, 12, EPX_MOE_SWIGLU}; // the last block of each scaling is short
  Rng rng(80);
  auto input = random_input<float>(shape, 11, rng);
  for (int64_t t = 0; t < 11; ++t) // rows of other magnitudes have other scales
    for (int64_t h = 0; h < shape.hidden; ++h)
      input.tokens(t, h) *= std::ldexp(1.0F, static_cast<int>(3 * (t % 4 - h / 100)));
  const auto params = random_block_params<float>(shape, rng);
  for (const epx_moe_weighting weighting : {EPX_MOE_WEIGHT_LATE, EPX_MOE_WEIGHT_EARLY}) {
    BlockConfig config = block_config<float>(shape);
    config.weighting = weighting;
    config.alignment = 4;
    const Block<float> wide(nullptr, config);
    const auto wide_out = wide.forward(input, params).out;
    for (const epx_row_format& format : wire_formats()) {
      CAPTURE(weighting);
      CAPTURE(format.scaling);
      CAPTURE(format.dtype);
      auto arrived = input;
      arrived.tokens = as_they_arrive(format, input.tokens);
      const auto expected = wide.forward(arrived, params);
      const auto expected_gradients = wide.backward(arrived, params);
      config.dispatch_format = format;
      const Block<float> block(nullptr, config);
      const auto output = block.forward(input, params);
      CHECK(difference(output.out, expected.out) == "");
      CHECK(difference(output.out, wide_out) != "");
      CHECK(gradient_difference(block.backward(input, params), expected_gradients) == "");
    }
  }
}

TEST_CASE("flights in any order have the same bits") {
  const BlockShape shape;
  Rng rng(74);
  const auto first = random_input<float>(shape, 8, rng);
  const auto second = random_input<float>(shape, 3, rng);
  const auto params = random_block_params<float>(shape, rng);
  for (const epx_moe_weighting weighting : {EPX_MOE_WEIGHT_LATE, EPX_MOE_WEIGHT_EARLY}) {
    CAPTURE(weighting);
    BlockConfig config = block_config<float>(shape);
    config.weighting = weighting;
    config.max_in_flight = 2;
    const Block<float> block(nullptr, config);
    const auto first_out = block.forward(first, params, 0).out;
    const auto first_gradients = block.backward(first, params, 0);
    const auto second_out = block.forward(second, params, 1).out;
    const auto second_gradients = block.backward(second, params, 1);

    CHECK(difference(block.forward(first, params, 0).out, first_out) == "");
    CHECK(difference(block.forward(second, params, 1).out, second_out) == "");
    CHECK(gradient_difference(block.backward(second, params, 1), second_gradients) == "");
    CHECK(gradient_difference(block.backward(first, params, 0), first_gradients) == "");
    CHECK(gradient_difference(block.backward(second, params, 1), second_gradients) == ""); // may be repeated

    block.forward(second, params, 0); // overwrites what was there
    CHECK(gradient_difference(block.backward(second, params, 0), second_gradients) == "");
  }
}

TEST_CASE("local blocks of both dtypes share an arena") {
  const BlockShape shape;
  Rng rng(78);
  const auto wide = random_input<double>(shape, 8, rng);
  const auto wide_params = random_block_params<double>(shape, rng);
  const auto narrow = random_input<float>(shape, 5, rng);
  const auto narrow_params = random_block_params<float>(shape, rng);
  BlockConfig config = block_config<double>(shape);
  BlockConfig narrow_config = block_config<float>(shape);
  narrow_config.weighting = EPX_MOE_WEIGHT_EARLY;
  const Block<double> wide_alone(nullptr, config);
  const Block<float> narrow_alone(nullptr, narrow_config);
  const BlockArena arena(nullptr, config, 2);
  const epx_moe_arena_info info = arena.info();
  CHECK(info.num_flights == 2);
  CHECK(info.max_rows == 16);
  CHECK(info.window_bytes == 0);
  CHECK(info.total_bytes == 2 * info.flight_bytes + info.workspace_bytes);
  CHECK(info.flight_bytes >= (16 * (2 * 5 + 1) + 16 * 8) * 8); // rows and their weights, and pre_act
  const Block<double> wide_block(nullptr, arena.serve(config));
  const Block<float> narrow_block(nullptr, arena.serve(narrow_config));
  const auto wide_out = wide_alone.forward(wide, wide_params).out;
  const auto narrow_out = narrow_alone.forward(narrow, narrow_params).out;
  CHECK(difference(wide_block.forward(wide, wide_params, 1).out, wide_out) == "");
  CHECK(difference(narrow_block.forward(narrow, narrow_params, 0).out, narrow_out) == "");
  CHECK(gradient_difference(wide_block.backward(wide, wide_params, 1), wide_alone.backward(wide, wide_params)) == "");
  CHECK(gradient_difference(narrow_block.backward(narrow, narrow_params, 0),
                            narrow_alone.backward(narrow, narrow_params)) == "");

  const epx_moe_block_config view = config.c_config();
  epx_moe_arena_config refused;
  require_ok(epx_moe_arena_config_init(&refused, sizeof(refused)), "epx_moe_arena_config_init");
  refused.block = &view;
  refused.max_rows = 4;
  epx_moe_arena none = nullptr;
  CHECK(not_refused(epx_moe_arena_create(nullptr, &refused, &none), {"max_rows", "4", "group"}) == "");
  CHECK(none == nullptr);
}

TEST_CASE("recomputing pre_act has the same bits") {
  const BlockShape shape;
  Rng rng(79);
  const auto input = random_input<float>(shape, 8, rng);
  const auto params = random_block_params<float>(shape, rng);
  for (const epx_moe_weighting weighting : {EPX_MOE_WEIGHT_LATE, EPX_MOE_WEIGHT_EARLY}) {
    CAPTURE(weighting);
    BlockConfig config = block_config<float>(shape);
    config.weighting = weighting;
    const Block<float> kept(nullptr, config);
    config.recompute = 1;
    const Block<float> computed(nullptr, config);
    CHECK(difference(computed.forward(input, params).out, kept.forward(input, params).out) == "");
    CHECK(gradient_difference(computed.backward(input, params), kept.backward(input, params)) == "");
  }
}

TEST_CASE("routes of weight zero add nothing") {
  const BlockShape all = {4, 4, 5, 4, 6, EPX_MOE_SWIGLU};
  Rng rng(75);
  auto input = random_input<float>(all, 6, rng);
  for (int64_t t = 0; t < 6; ++t)
    input.logits(t, t % 4) = -std::numeric_limits<float>::infinity();
  const auto params = random_block_params<float>(all, rng);
  for (const epx_moe_weighting weighting : {EPX_MOE_WEIGHT_LATE, EPX_MOE_WEIGHT_EARLY}) {
    CAPTURE(weighting);
    BlockConfig config = block_config<float>(all);
    config.weighting = weighting;
    const Block<float> block(nullptr, config);
    config.router.top_k = 3; // without the expert at -infinity
    const Block<float> block_of_three(nullptr, config);
    const auto output = block.forward(input, params);
    CHECK(output.topk_weights(0, 3) == 0);
    CHECK(difference(output.out, block_of_three.forward(input, params).out, 1e-7) == "");
    const auto gradients = block.backward(input, params);
    CHECK(gradient_difference(gradients, block_of_three.backward(input, params), 1e-6) == "");
    CHECK(gradients.logits(1, 1) == 0);
  }
}

TEST_CASE("a bad token takes part as a masked one") {
  const BlockShape shape;
  Rng rng(76);
  auto input = random_input<float>(shape, 5, rng);
  const auto params = random_block_params<float>(shape, rng);
  const Block<float> block(nullptr, block_config<float>(shape));
  input.mask = Tensor<uint8_t>({5}, {1, 1, 1, 0, 1});
  const auto expected = block.forward(input, params).out;
  const auto expected_gradients = block.backward(input, params);
  input.mask.reset();
  input.logits(3, 2) = std::numeric_limits<float>::quiet_NaN();
  const auto output = block.forward(input, params);
  CHECK(difference(output.out, expected) == "");
  CHECK(difference(output.info, Tensor<int64_t>({3}, {0, 1, 3})) == "");
  CHECK(gradient_difference(block.backward(input, params), expected_gradients) == "");
}

TEST_CASE("a block without tokens") {
  const BlockShape shape;
  Rng rng(77);
  const auto params = random_block_params<float>(shape, rng);
  const auto input = random_input<float>(shape, 0, rng);
  BlockConfig config = block_config<float>(shape);
  config.router.aux_loss_coeff = 0.1;
  const Block<float> block(nullptr, config);
  const auto output = block.forward(input, params);
  CHECK(difference(output.global_counts, Tensor<int64_t>({1, 4})) == "");
  CHECK(difference(output.info, Tensor<int64_t>({3}, {0, 0, -1})) == "");
  auto gradients = block.backward(input, params);
  for_each_tensor(
      [](const char* name, const Tensor<float>& grad) {
        auto zero = grad;
        for (int64_t i = 0; i < zero.count(); ++i)
          zero[i] = 0;
        CHECK_MESSAGE(difference(grad, zero) == "", name);
      },
      gradients.params);
}

} // namespace
} // namespace epx::test
