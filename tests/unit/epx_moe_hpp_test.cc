// SPDX-License-Identifier: Apache-2.0
// These tests use epx_moe.hpp and the public libraries alone, and compile with the warnings of a strict user. What the calls
// compute is tested in tests/moe; here each member reaches its C function with all of its arguments.
#include "epx/epx_moe.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

const char* failing_function_of_another_file(); // epx_moe_hpp_alone.cc

namespace {

namespace moe = epx::moe;

template <typename Owner, typename View>
constexpr bool kIsOwnerOf = std::is_nothrow_move_constructible_v<Owner>&& std::is_nothrow_move_assignable_v<Owner>&&
                                std::is_nothrow_default_constructible_v<Owner>&& std::is_nothrow_destructible_v<Owner> &&
                            !std::is_copy_constructible_v<Owner> && !std::is_copy_assignable_v<Owner> &&
                            std::is_convertible_v<Owner&, View> && std::is_trivially_copyable_v<View>;
static_assert(kIsOwnerOf<moe::Block, moe::BlockView>);
static_assert(kIsOwnerOf<moe::Arena, moe::ArenaView>);
static_assert(kIsOwnerOf<moe::Errors, moe::ErrorsView>);
static_assert(!std::is_constructible_v<moe::FfnGrads, moe::FfnParams>); // outputs are not const

constexpr int kExperts = 2;
constexpr int64_t kTokens = 3;

template <typename Action>
epx::Error error_of(Action&& action) {
  try {
    action();
  } catch (const epx::Error& error) {
    return error;
  }
  return {EPX_SUCCESS, "nothing was thrown"};
}

// A group of this thread alone.
epx::Group lone_group() {
  const auto gather = [](std::span<const std::byte> send, std::span<std::byte> recv, std::chrono::milliseconds) {
    std::ranges::copy(send, recv.begin());
  };
  epx::GroupConfig config;
  config.num_experts = kExperts;
  config.max_tokens_per_rank = kTokens;
  config.hidden_dim = 1;
  config.max_top_k = 1;
  config.max_token_dtype = EPX_FLOAT32;
  config.transport = EPX_TRANSPORT_HOST;
  return {epx::bootstrap_from(0, 1, gather), config};
}

// One-element experts that compute down * max(up * x, 0)^2, and tokens that go to one of them each.
struct Layer {
  std::vector<float> tokens = {1, 2, 3}, logits = {1, 0, 0, 1, 1, 0};
  std::vector<float> up = {1, -1}, down = {2, 4};

  moe::BlockConfig config() const {
    moe::BlockConfig config;
    config.router.num_experts = kExperts;
    config.router.top_k = 1;
    config.router.aux_loss_coeff = 1;
    config.ffn.hidden_dim = 1;
    config.ffn.ffn_dim = 1;
    config.ffn.activation = EPX_MOE_RELU2;
    config.max_tokens_per_rank = kTokens; // read without a group only
    return config;
  }
  moe::FfnParams params() const { return {.up_weight = {up, {kExperts, 1, 1}}, .down_weight = {down, {kExperts, 1, 1}}}; }

  // A forward and a backward with results that can be computed by hand.
  void check(moe::BlockView block, int32_t flight) const {
    std::vector<float> out(kTokens), topk_weights(kTokens), grad_tokens(kTokens), grad_logits(kTokens * kExperts);
    std::vector<int32_t> topk_idx(kTokens), global_counts(kExperts);
    std::vector<int64_t> info(3);
    const std::array<uint8_t, 3> mask = {1, 1, 0};
    const std::vector<float> bias = {1.5F, 0}; // token 1 goes to expert 0 as well
    block.fwd({.flight = flight,
               .tokens = {tokens, {kTokens, 1}},
               .logits = {logits, {kTokens, kExperts}},
               .selection_bias = bias,
               .token_mask = mask,
               .params = params(),
               .out = {out, {kTokens, 1}},
               .topk_idx = {topk_idx, {kTokens, 1}},
               .topk_weights = {topk_weights, {kTokens, 1}},
               .global_counts = {global_counts, {1, kExperts}},
               .info = info});
    CHECK(out == std::vector<float>{2, 8, 0});
    CHECK(topk_idx == std::vector<int32_t>{0, 0, -1});
    CHECK(topk_weights == std::vector<float>{1, 1, 0});
    CHECK(global_counts == std::vector<int32_t>{2, 0});
    CHECK(info == std::vector<int64_t>{1, 0, -1});

    const std::vector<float> grad_out = {1, 1, 1};
    std::vector<float> grad_up = {100, 100}, grad_down = {100, 100};
    block.bwd({.flight = flight,
               .params = params(),
               .grad_out = {grad_out, {kTokens, 1}},
               .aux_loss_grad = 2,
               .grad_tokens = {grad_tokens, {kTokens, 1}},
               .grad_logits = {grad_logits, {kTokens, kExperts}},
               .grads = {.up_weight = {grad_up, {kExperts, 1, 1}}, .down_weight = {grad_down, {kExperts, 1, 1}}},
               .accumulate = true});
    CHECK(grad_tokens == std::vector<float>{4, 8, 0});   // 2 * 2 x
    CHECK(grad_up == std::vector<float>{100 + 20, 100}); // 2 * 2 x * x, summed over tokens 0 and 1
    CHECK(grad_down == std::vector<float>{100 + 5, 100});
    // All routes go to expert 0, so the loss is the sum of both tokens' p[t, 0]. The softmax of one logit has no gradient.
    const double slope = 2 * 0.731059 * 0.268941;
    CHECK(grad_logits[0] == doctest::Approx(slope));
    CHECK(grad_logits[3] == doctest::Approx(-slope));
    CHECK(grad_logits[4] == 0);
  }
};

} // namespace

TEST_CASE("epx_moe.hpp: configs have the defaults of the C API, and copies hold their own parts") {
  epx_moe_router_config router;
  REQUIRE(epx_moe_router_config_init(&router, sizeof(router)) == EPX_SUCCESS);
  const moe::RouterConfig router_config;
  CHECK(std::memcmp(static_cast<const epx_moe_router_config*>(&router_config), &router, sizeof(router)) == 0);
  CHECK(moe::FfnConfig().struct_size == sizeof(epx_moe_ffn_config));

  moe::BlockConfig config;
  CHECK(config.alignment == 1);
  CHECK(config.dtype == EPX_FLOAT32);
  CHECK(config.c_config().dispatch_format == nullptr);
  config.router.top_k = 3;
  config.dispatch_format = epx::RowFormat(EPX_SCALING_MX).get();
  const moe::BlockConfig copy = config;
  config.router.top_k = 4;
  config.dispatch_format.reset();
  CHECK(copy.c_config().router->top_k == 3);
  CHECK(copy.c_config().ffn == &copy.ffn);
  CHECK(copy.c_config().dispatch_format->scaling == EPX_SCALING_MX);
}

TEST_CASE("epx_moe.hpp: a local block, and blocks that share an arena of a group") {
  const Layer layer;
  moe::Block local(epx::GroupView(), layer.config());
  layer.check(local, 0);
  CHECK(error_of([&] { layer.check(local, 1); }).status() == EPX_ERROR_INVALID_ARGUMENT); // it has one flight
  local.destroy();
  CHECK(!local);
  local.destroy(); // it is empty: nothing

  const epx::Group group = lone_group();
  moe::Arena arena(group, {.block = layer.config(), .num_flights = 2, .max_rows = 3});
  const epx_moe_arena_info info = arena.query();
  CHECK(info.num_flights == 2);
  CHECK(info.max_rows == 3);
  moe::BlockConfig config = layer.config();
  config.arena = arena.get();
  moe::Block first(group, config);
  const moe::Block second(group, config);
  layer.check(first, 0);
  layer.check(second, 1);
  CHECK(error_of([&] { layer.check(first, 2); }).status() == EPX_ERROR_INVALID_ARGUMENT);
  first.destroy();
  CHECK(group.status().message[0] == '\0');
}

TEST_CASE("epx_moe.hpp: owners move, release and adopt, and a block outlives its group") {
  const Layer layer;
  moe::Block block;
  {
    const epx::Group group = lone_group();
    moe::Block made(group, layer.config());
    const epx_moe_block handle = made.get();
    block = std::move(made);
    CHECK(!made);
    CHECK(block.get() == handle);
    moe::Block& itself = block;
    block = std::move(itself);
    CHECK(block.get() == handle);
    block = moe::Block(block.release());
    CHECK(block.get() == handle);
    layer.check(block, 0);
  }
  block.reset();
  CHECK(!block);
  moe::Arena arena;
  arena.destroy(); // it is empty: nothing
  CHECK(!arena);
}

TEST_CASE("epx_moe.hpp: failures throw with the name of the function") {
  const moe::RouterConfig router;
  const moe::FfnConfig ffn;
  for (const auto& [name, call] : std::vector<std::pair<std::string, std::function<void()>>>{
           {"epx_moe_router", [&] { moe::router(router, {}); }},
           {"epx_moe_router_bwd", [&] { moe::router_bwd(router, {}); }},
           {"epx_moe_router_bwd_workspace", [&] { static_cast<void>(moe::router_bwd_workspace(router, {})); }},
           {"epx_moe_aux_loss", [&] { moe::aux_loss(router, {}); }},
           {"epx_moe_aux_loss_workspace", [&] { static_cast<void>(moe::aux_loss_workspace(router, {})); }},
           {"epx_moe_bias_update", [&] { moe::bias_update({}); }},
           {"epx_moe_row_map", [&] { moe::row_map({}); }},
           {"epx_moe_row_map_workspace", [&] { static_cast<void>(moe::row_map_workspace({})); }},
           {"epx_moe_permute", [&] { moe::permute({}); }},
           {"epx_moe_permute_workspace", [&] { static_cast<void>(moe::permute_workspace({})); }},
           {"epx_moe_permute_bwd", [&] { moe::permute_bwd({}); }},
           {"epx_moe_unpermute", [&] { moe::unpermute({}); }},
           {"epx_moe_unpermute_bwd", [&] { moe::unpermute_bwd({}); }},
           {"epx_moe_unpermute_bwd_workspace", [&] { static_cast<void>(moe::unpermute_bwd_workspace({})); }},
           {"epx_moe_quantise_rows", [&] { moe::quantise_rows({}); }},
           {"epx_moe_quantise_swiglu", [&] { moe::quantise_swiglu({}); }},
           {"epx_moe_quantise_swiglu_bwd", [&] { moe::quantise_swiglu_bwd({}); }},
           {"epx_moe_quantise_swiglu_bwd_workspace", [&] { static_cast<void>(moe::quantise_swiglu_bwd_workspace({})); }},
           {"epx_moe_quantise_weights", [&] { moe::quantise_weights({}); }},
           {"epx_moe_quantise_params", [&] { moe::quantise_params({}); }},
           {"epx_moe_transpose_params", [&] { moe::transpose_params({}); }},
           {"epx_moe_ffn", [&] { moe::ffn(ffn, {}); }},
           {"epx_moe_ffn_workspace", [&] { static_cast<void>(moe::ffn_workspace(ffn, {})); }},
           {"epx_moe_ffn_bwd", [&] { moe::ffn_bwd(ffn, {}); }},
           {"epx_moe_ffn_bwd_workspace", [&] { static_cast<void>(moe::ffn_bwd_workspace(ffn, {})); }},
           {"epx_moe_ffn_fp8", [&] { moe::ffn_fp8(ffn, {}); }},
           {"epx_moe_ffn_fp8_workspace", [&] { static_cast<void>(moe::ffn_fp8_workspace(ffn, {})); }},
           {"epx_moe_ffn_fp8_bwd", [&] { moe::ffn_fp8_bwd(ffn, {}); }},
           {"epx_moe_ffn_fp8_bwd_workspace", [&] { static_cast<void>(moe::ffn_fp8_bwd_workspace(ffn, {})); }},
           {"epx_moe_arena_create", [&] { moe::Arena(epx::GroupView(), {}); }},
           {"epx_moe_arena_query", [&] { moe::ArenaView().query(); }},
           {"epx_moe_block_create", [&] { moe::Block(epx::GroupView(), {}); }},
           {"epx_moe_block_fwd", [&] { moe::BlockView().fwd({}); }},
           {"epx_moe_block_bwd", [&] { moe::BlockView().bwd({}); }},
           {"epx_moe_block_errors", [&] { moe::BlockView().errors(); }},
           {"epx_moe_errors_read", [&] { moe::ErrorsView().read(); }}}) {
    const epx::Error error = error_of(call);
    CHECK_MESSAGE(error.status() == EPX_ERROR_INVALID_ARGUMENT, std::string(error.what()));
    CHECK(name == error.function());
    CHECK(std::string(error.what()) == epx_last_error());
  }
  CHECK(std::string(failing_function_of_another_file()) == "epx_moe_row_map");
}

TEST_CASE("epx_moe.hpp: a record of errors is there where a GPU is") {
  try {
    moe::Errors errors = moe::make_errors();
    CHECK(errors.read().num_errors == 0);
    const moe::Errors moved(std::move(errors));
    CHECK(!errors);
    CHECK(moved);
  } catch (const epx::Error& error) {
    CHECK(error.status() == EPX_ERROR_UNSUPPORTED);
    CHECK(std::string(error.function()) == "epx_moe_errors_create");
  }
  CHECK(!moe::Errors());
}

TEST_CASE("epx_moe.hpp: the router, its loss and its bias") {
  moe::RouterConfig config;
  config.num_experts = kExperts;
  config.top_k = 1;
  config.score = EPX_MOE_SOFTMAX_THEN_TOPK;
  config.aux_loss_coeff = 1;
  const std::vector<double> logits = {std::log(3), 0, 0, std::log(3)};
  std::vector<int32_t> topk_idx(2), counts = {1, 1};
  std::vector<double> topk_weights(2), loss(1), grad_logits(4), bias(2);
  moe::router(config, {.logits = {logits, {2, 2}}, .topk_idx = {topk_idx, {2, 1}}, .topk_weights = {topk_weights, {2, 1}}});
  CHECK(topk_idx == std::vector<int32_t>{0, 1});
  CHECK(topk_weights[0] == doctest::Approx(0.75));

  const moe::AuxLossArgs loss_args = {
      .logits = {logits, {2, 2}}, .topk_idx = {topk_idx, {2, 1}}, .global_counts = {counts, {1, 2}}, .loss = loss};
  moe::aux_loss(config, loss_args);
  CHECK(loss[0] == doctest::Approx(1)); // both experts are as busy
  CHECK(moe::aux_loss_workspace(config, loss_args) > 0);

  const std::vector<double> grad_weights = {1, 0};
  const moe::RouterBwdArgs bwd = {.logits = {logits, {2, 2}},
                                  .topk_idx = {topk_idx, {2, 1}},
                                  .grad_topk_weights = {grad_weights, {2, 1}},
                                  .global_counts = {counts, {1, 2}},
                                  .aux_loss_grad = 1,
                                  .grad_logits = {grad_logits, {2, 2}}};
  moe::router_bwd(config, bwd);
  CHECK(grad_logits[0] == doctest::Approx(0.75 * 0.25)); // the loss has no slope where all counts are equal
  CHECK(grad_logits[1] == doctest::Approx(-0.75 * 0.25));
  CHECK(grad_logits[3] == doctest::Approx(0));
  CHECK(moe::router_bwd_workspace(config, bwd) > 0);

  counts = {3, 1};
  moe::bias_update({.global_counts = {counts, {1, 2}}, .rate = 0.5, .selection_bias = bias});
  CHECK(bias == std::vector<double>{-0.5, 0.5});
}

TEST_CASE("epx_moe.hpp: rows are sorted, computed and brought back") {
  const std::vector<int32_t> topk_idx = {1, 0, 1};
  std::vector<int32_t> counts(2), offsets(3), row_map(3);
  const moe::RowMapArgs sort = {.topk_idx = {topk_idx, {kTokens, 1}},
                                .alignment = 2,
                                .counts = counts,
                                .offsets = offsets,
                                .row_map = {row_map, {kTokens, 1}}};
  moe::row_map(sort);
  CHECK(counts == std::vector<int32_t>{1, 2});
  CHECK(offsets == std::vector<int32_t>{0, 2, 4});
  CHECK(row_map == std::vector<int32_t>{2, 0, 3});
  CHECK(moe::row_map_workspace(sort) > 0);

  const std::vector<float> tokens = {1, 2, 3}, weights = {0.5F, 1, 2};
  std::vector<float> rows(4), row_weights(4), out(3), grad_weights(3);
  const moe::PermuteArgs permute = {.row_map = {row_map, {kTokens, 1}},
                                    .tokens = {tokens, {kTokens, 1}},
                                    .topk_weights = {weights, {kTokens, 1}},
                                    .rows = {rows, {4, 1}},
                                    .row_weights = row_weights};
  moe::permute(permute);
  CHECK(rows == std::vector<float>{2, 0, 1, 3});
  CHECK(row_weights == std::vector<float>{1, 0, 0.5F, 2});
  std::vector<float> others_stay(4, -1);
  moe::permute(
      {.row_map = permute.row_map, .tokens = permute.tokens, .rows = {others_stay, {4, 1}}, .pads = EPX_PADS_UNTOUCHED});
  CHECK(others_stay == std::vector<float>{2, -1, 1, 3});
  static_cast<void>(moe::permute_workspace(permute));
  moe::unpermute({.row_map = {row_map, {kTokens, 1}},
                  .rows = {rows, {4, 1}},
                  .topk_weights = {weights, {kTokens, 1}},
                  .tokens = {out, {kTokens, 1}}});
  CHECK(out == std::vector<float>{0.5F, 2, 6});
  moe::permute_bwd({.row_map = {row_map, {kTokens, 1}},
                    .grad_rows = {rows, {4, 1}},
                    .grad_row_weights = row_weights,
                    .grad_tokens = {out, {kTokens, 1}},
                    .grad_topk_weights = {grad_weights, {kTokens, 1}}});
  CHECK(out == tokens);
  CHECK(grad_weights == weights);
  std::vector<float> grad_rows(4);
  const moe::UnpermuteBwdArgs unpermute_bwd = {.row_map = {row_map, {kTokens, 1}},
                                               .grad_tokens = {tokens, {kTokens, 1}},
                                               .rows = {rows, {4, 1}},
                                               .topk_weights = {weights, {kTokens, 1}},
                                               .grad_rows = {grad_rows, {4, 1}},
                                               .grad_topk_weights = {grad_weights, {kTokens, 1}}};
  moe::unpermute_bwd(unpermute_bwd);
  CHECK(grad_rows == std::vector<float>{2, 0, 0.5F, 6});
  CHECK(grad_weights == std::vector<float>{1, 4, 9});
  static_cast<void>(moe::unpermute_bwd_workspace(unpermute_bwd));

  moe::FfnConfig config;
  config.num_local_experts = kExperts;
  config.hidden_dim = 1;
  config.ffn_dim = 1;
  config.activation = EPX_MOE_RELU2;
  const std::vector<float> up = {1, 1}, down = {2, 4};
  const moe::FfnParams params = {.up_weight = {up, {kExperts, 1, 1}}, .down_weight = {down, {kExperts, 1, 1}}};
  std::vector<float> expert_out(4, -1.0F), pre_act(4), grad_recv(4), grad_recv_weights(4), grad_down(2);
  const moe::FfnArgs ffn = {.params = params,
                            .recv_tokens = {rows, {4, 1}},
                            .counts = counts,
                            .offsets = offsets,
                            .recv_weights = row_weights,
                            .expert_out = {expert_out, {4, 1}},
                            .pre_act = {pre_act, {4, 1}}};
  moe::ffn(config, ffn);
  CHECK(expert_out == std::vector<float>{8, -1, 2, 72});
  static_cast<void>(moe::ffn_workspace(config, ffn));
  const std::vector<float> ones = {1, 1, 1, 1};
  const moe::FfnBwdArgs bwd = {.params = params,
                               .recv_tokens = {rows, {4, 1}},
                               .counts = counts,
                               .offsets = offsets,
                               .recv_weights = row_weights,
                               .pre_act = {pre_act, {4, 1}},
                               .grad_expert_out = {ones, {4, 1}},
                               .grad_recv = {grad_recv, {4, 1}},
                               .grad_recv_weights = grad_recv_weights,
                               .grads = {.down_weight = {grad_down, {kExperts, 1, 1}}}};
  moe::ffn_bwd(config, bwd);
  CHECK(grad_recv[0] == 8);          // w * down * 2 x = 1 * 2 * 4
  CHECK(grad_recv[3] == 48);         // 2 * 4 * 6
  CHECK(grad_recv_weights[3] == 36); // down * x^2
  CHECK(grad_down == std::vector<float>{4, 0.5F + 18});
  static_cast<void>(moe::ffn_bwd_workspace(config, bwd));
}

// Of constants, so that each product is one number: h = 2 * silu(1) quantises to 448 of its scale.
TEST_CASE("epx_moe.hpp: the FFN in FP8 forward and backward") {
  constexpr int64_t kSize = 128, kRows = 16;
  moe::FfnConfig config;
  config.num_local_experts = 1;
  config.hidden_dim = config.ffn_dim = kSize;
  const uint8_t one = 0x38; // of E4M3
  std::vector<uint8_t> codes(2 * kSize * kSize, one), rows(kRows * kSize, one);
  const std::vector<float> scales(2, 1.0F / kSize), row_scales(kRows, 1.0F), weights(kRows, 2.0F);
  const std::vector<int32_t> counts = {1}, offsets = {0, 16};
  const moe::Fp8Params params = moe::fp8_tensors(kSize, kSize, [&](epx_dtype dtype, int64_t r, int64_t c) {
    const void* const data = dtype == EPX_FLOAT32 ? static_cast<const void*>(scales.data()) : codes.data();
    return epx::ConstTensor(data, dtype, {1, r, c});
  });
  std::vector<float> out(kRows * kSize, -1.0F), pre_act(kRows * 2 * kSize), grad_recv(kRows * kSize), grad_weights(kRows),
      grad_gate_up(2 * kSize * kSize, -1.0F), grad_down(kSize * kSize, -1.0F);
  const epx::ConstTensor tokens(rows.data(), EPX_FLOAT8_E4M3, {kRows, kSize});
  const moe::FfnFp8Args fwd = {.params = params,
                               .recv_tokens = tokens,
                               .recv_scales = {row_scales, {kRows, 1}},
                               .counts = counts,
                               .offsets = offsets,
                               .recv_weights = weights,
                               .expert_out = {out, {kRows, kSize}},
                               .pre_act = {pre_act, {kRows, 2 * kSize}}};
  moe::ffn_fp8(config, fwd);
  const float silu = 1 / (1 + std::exp(-1.0F));
  CHECK(pre_act[0] == 1);
  CHECK(std::abs(out[0] - 2 * silu) < 1e-5F);
  CHECK(out[kSize] == -1); // a pad
  CHECK(moe::ffn_fp8_workspace(config, fwd) > 0);
  moe::FfnFp8BwdArgs bwd = {
      .params = params,
      .recv_tokens = tokens,
      .recv_scales = {row_scales, {kRows, 1}},
      .counts = counts,
      .offsets = offsets,
      .recv_weights = weights,
      .pre_act = {pre_act, {kRows, 2 * kSize}},
      .grad_expert_out = tokens,
      .grad_scales = {row_scales, {kRows, 1}},
      .grad_recv = {grad_recv, {kRows, kSize}},
      .grad_recv_weights = grad_weights,
      .grads = {.gate_up_weight = {grad_gate_up, {1, 2 * kSize, kSize}}, .down_weight = {grad_down, {1, kSize, kSize}}}};
  const float of_gate = 2 * silu * (2 - silu), of_up = 2 * silu; // the gradient of h is 2
  for (const epx_moe_recipe recipe : {EPX_MOE_RECIPE_FP8_ACTIVATIONS, EPX_MOE_RECIPE_FP8}) {
    bwd.recipe = recipe;
    bwd.accumulate = false;
    moe::ffn_fp8_bwd(config, bwd);
    CHECK(std::abs(grad_recv[0] - (of_gate + of_up)) < 1e-4F);
    CHECK(std::abs(grad_weights[0] - kSize * silu) < 1e-3F);
    CHECK(std::abs(grad_gate_up[0] - of_gate) < 1e-4F);
    CHECK(std::abs(grad_gate_up[kSize * kSize] - of_up) < 1e-4F);
    CHECK(std::abs(grad_down[0] - 2 * silu) < 1e-4F);
    bwd.accumulate = true;
    moe::ffn_fp8_bwd(config, bwd);
    CHECK(std::abs(grad_down[0] - 4 * silu) < 1e-4F);
    CHECK(moe::ffn_fp8_bwd_workspace(config, bwd) > 0);
  }
}

TEST_CASE("epx_moe.hpp: rows and weights are quantised") {
  constexpr int64_t kSize = 128;
  const std::vector<float> rows(2 * kSize, 1.0F), matrix(kSize * kSize, 2.0F);
  const std::vector<int32_t> counts = {0, 1}, offsets = {0, 0, 2};
  std::vector<uint8_t> row_codes(2 * kSize, 9), column_codes(kSize * 2, 9), again(kSize * 2, 9), codes(kSize * kSize, 9),
      transposed_codes(kSize * kSize, 9);
  std::vector<float> row_scales(4, 9.0F), column_scales(2 * kSize, 9.0F), scales(1), transposed_scales(1);
  const epx::RowFormat format(EPX_SCALING_BLOCK128_POW2);
  moe::quantise_rows({.format = format,
                      .rows = {rows, {2, kSize}},
                      .counts = counts,
                      .offsets = offsets,
                      .row_codes = {row_codes.data(), EPX_FLOAT8_E4M3, {2, kSize}},
                      .row_scales = {row_scales.data(), EPX_FLOAT32, {2, 1}},
                      .column_codes = {column_codes.data(), EPX_FLOAT8_E4M3, {kSize, 2}},
                      .column_scales = {column_scales, {2, kSize}}});
  CHECK(row_scales == std::vector<float>{0x1p-8F, 0, 9.0F, 9.0F});
  CHECK(row_codes[0] == 0x78); // 256
  CHECK(row_codes[kSize] == 0);
  CHECK(column_scales[0] == 9.0F);
  CHECK(column_scales[kSize] == 0x1p-8F);
  CHECK(column_codes[0] == 0x78);
  CHECK(column_codes[1] == 0);
  moe::quantise_rows({.format = format,
                      .rows = {row_codes.data(), EPX_FLOAT8_E4M3, {2, kSize}},
                      .scales = {row_scales, {1, 4}},
                      .scale_layout = EPX_SCALES_COLUMNS,
                      .counts = counts,
                      .offsets = offsets,
                      .column_codes = {again.data(), EPX_FLOAT8_E4M3, {kSize, 2}},
                      .column_scales = {column_scales, {2, kSize}}});
  CHECK(again == column_codes);

  moe::quantise_weights({.format = format,
                         .weights = {matrix, {1, kSize, kSize}},
                         .codes = {codes.data(), EPX_FLOAT8_E4M3, {1, kSize, kSize}},
                         .scales = {scales, {1, 1, 1}},
                         .transposed_codes = {transposed_codes.data(), EPX_FLOAT8_E4M3, {1, kSize, kSize}},
                         .transposed_scales = {transposed_scales, {1, 1, 1}}});
  CHECK(scales[0] == 0x1p-7F);
  CHECK(transposed_scales == scales);
  CHECK(codes == std::vector<uint8_t>(kSize * kSize, 0x78));
  CHECK(transposed_codes == codes);

  std::vector<uint8_t> nv_codes(kSize * kSize / 2, 9), nv_scales(kSize * kSize / 16, 9);
  std::vector<float> nv_row_scales(kSize, 9.0F);
  const std::vector<uint8_t> all_codes(nv_codes.size(), 0x77), all_scales(nv_scales.size(), 0x7e); // 6 and 448
  for (const bool is_transposed : {false, true}) {
    const epx::Tensor nv = {nv_codes.data(), EPX_FLOAT4_E2M1, {1, kSize, kSize}},
                      by_16 = {nv_scales.data(), EPX_FLOAT8_E4M3, {1, kSize, kSize / 16}},
                      by_row = {nv_row_scales, {1, kSize}};
    moe::QuantiseWeightsArgs args = {.format = epx::RowFormat(EPX_SCALING_NV), .weights = {matrix, {1, kSize, kSize}}};
    (is_transposed ? args.transposed_codes : args.codes) = nv;
    (is_transposed ? args.transposed_scales : args.scales) = by_16;
    (is_transposed ? args.transposed_row_scales : args.row_scales) = by_row;
    moe::quantise_weights(args);
    CHECK(nv_codes == all_codes);
    CHECK(nv_scales == all_scales);
    CHECK(nv_row_scales == std::vector<float>(kSize, 1 / 1344.0F));
    nv_codes.assign(nv_codes.size(), 9);
    nv_scales.assign(nv_scales.size(), 9);
    nv_row_scales.assign(nv_row_scales.size(), 9.0F);
  }

  const std::vector<float> stacked(2 * kSize * kSize, 2.0F);
  std::vector<uint8_t> stacked_codes(2 * kSize * kSize, 9);
  std::vector<float> stacked_scales(2, 9.0F);
  const moe::Fp8Tensors<epx::Tensor> made = {
      .gate_up_codes = {stacked_codes.data(), EPX_FLOAT8_E4M3, {1, 2 * kSize, kSize}},
      .gate_up_scales = {stacked_scales, {1, 2, 1}},
      .down_transposed_codes = {codes.data(), EPX_FLOAT8_E4M3, {1, kSize, kSize}},
      .down_transposed_scales = {scales, {1, 1, 1}}};
  codes.assign(codes.size(), 9);
  scales[0] = 9;
  moe::quantise_params({.format = format,
                        .gate_up_weight = {stacked, {1, 2 * kSize, kSize}},
                        .down_weight = {matrix, {1, kSize, kSize}},
                        .fp8_params = made});
  CHECK(stacked_scales == std::vector<float>{0x1p-7F, 0x1p-7F});
  CHECK(stacked_codes == std::vector<uint8_t>(2 * kSize * kSize, 0x78));
  CHECK(scales == transposed_scales);
  CHECK(codes == transposed_codes);
  std::vector<uint8_t> stacked_transposed(2 * kSize * kSize, 9);
  std::vector<float> transposed_stacked_scales(2, 9.0F);
  moe::transpose_params(
      {.fp8_params = {.gate_up_codes = made.gate_up_codes,
                      .gate_up_scales = made.gate_up_scales,
                      .gate_up_transposed_codes = {stacked_transposed.data(), EPX_FLOAT8_E4M3, {1, kSize, 2 * kSize}},
                      .gate_up_transposed_scales = {transposed_stacked_scales, {1, 1, 2}}}});
  CHECK(stacked_transposed == stacked_codes);
  CHECK(transposed_stacked_scales == stacked_scales);
  const moe::Fp8Params read = made;
  CHECK(read.gate_up_codes.get()->data == stacked_codes.data());
}

TEST_CASE("epx_moe.hpp: SwiGLU is quantised, and its backward") {
  constexpr int64_t kSize = 128;
  const std::vector<float> pre_act(2 * kSize, 64.0F), grad_h(kSize, 1.0F), recv_weights = {0.5F}; // the sigmoid of 64 is 1
  const std::vector<int32_t> counts = {1}, offsets = {0, 1};
  std::vector<uint8_t> row_codes(kSize), column_codes(kSize), h_codes(kSize), grad_codes(2 * kSize),
      grad_columns(2 * kSize);
  std::vector<float> row_scales(1), column_scales(kSize), h_scales(kSize), grad_scales(2), grad_column_scales(2 * kSize),
      grad_recv_weights(1);
  const epx::RowFormat format(EPX_SCALING_BLOCK128_POW2);
  moe::quantise_swiglu({.format = format,
                        .pre_act = {pre_act, {1, 2 * kSize}},
                        .recv_weights = recv_weights,
                        .counts = counts,
                        .offsets = offsets,
                        .row_codes = {row_codes.data(), EPX_FLOAT8_E4M3, {1, kSize}},
                        .row_scales = {row_scales, {1, 1}},
                        .column_codes = {column_codes.data(), EPX_FLOAT8_E4M3, {kSize, 1}},
                        .column_scales = {column_scales, {1, kSize}}});
  CHECK(row_scales[0] == 8); // 2048 / 8 = 256
  CHECK(row_codes == std::vector<uint8_t>(kSize, 0x78));
  CHECK(column_codes == row_codes);
  CHECK(column_scales == std::vector<float>(kSize, 8));
  const moe::QuantiseSwigluBwdArgs bwd = {.format = format,
                                          .pre_act = {pre_act, {1, 2 * kSize}},
                                          .grad_h = {grad_h, {1, kSize}},
                                          .recv_weights = recv_weights,
                                          .counts = counts,
                                          .offsets = offsets,
                                          .row_codes = {grad_codes.data(), EPX_FLOAT8_E4M3, {1, 2 * kSize}},
                                          .row_scales = {grad_scales, {1, 2}},
                                          .column_codes = {grad_columns.data(), EPX_FLOAT8_E4M3, {2 * kSize, 1}},
                                          .column_scales = {grad_column_scales, {1, 2 * kSize}},
                                          .h_column_codes = {h_codes.data(), EPX_FLOAT8_E4M3, {kSize, 1}},
                                          .h_column_scales = {h_scales, {1, kSize}},
                                          .grad_recv_weights = grad_recv_weights};
  moe::quantise_swiglu_bwd(bwd);
  CHECK(grad_scales == std::vector<float>(2, 0.125F)); // 0.5 * 64 = 32
  CHECK(grad_codes == std::vector<uint8_t>(2 * kSize, 0x78));
  CHECK(grad_columns == grad_codes);
  CHECK(grad_column_scales == std::vector<float>(2 * kSize, 0.125F));
  CHECK(h_codes == column_codes);
  CHECK(h_scales == column_scales);
  CHECK(grad_recv_weights[0] == 128 * 64 * 64);
  CHECK(moe::quantise_swiglu_bwd_workspace(bwd) == 4);
}
