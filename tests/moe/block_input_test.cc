// SPDX-License-Identifier: Apache-2.0
// Calls of a local block with bad input are refused with a sentence that has the names and values, and write nothing.
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/block_run.h"

namespace epx::test {
namespace {

TEST_CASE("the defaults of a block") {
  epx_moe_block_config config;
  std::memset(&config, 0xA5, sizeof(config));
  REQUIRE(epx_moe_block_config_init(&config, sizeof(config)) == EPX_SUCCESS);
  CHECK(config.struct_size == sizeof(config));
  CHECK(config.router == nullptr);
  CHECK(config.ffn == nullptr);
  CHECK(config.arena == nullptr);
  CHECK(config.dtype == EPX_FLOAT32);
  CHECK(config.weighting == EPX_MOE_WEIGHT_LATE);
  CHECK(config.alignment == 1);
  CHECK(config.max_in_flight == 1);
  CHECK(config.recompute == 0);
  CHECK(config.dispatch_format == nullptr);
  CHECK(not_refused(epx_moe_block_config_init(nullptr, sizeof(config)), {"config", "NULL"}) == "");
  CHECK(not_refused(epx_moe_block_config_init(&config, 16), {"struct_size", "16", std::to_string(sizeof(config))}) == "");
  CHECK(epx_moe_block_destroy(nullptr) == EPX_SUCCESS);

  epx_moe_arena_config arena;
  std::memset(&arena, 0xA5, sizeof(arena));
  REQUIRE(epx_moe_arena_config_init(&arena, sizeof(arena)) == EPX_SUCCESS);
  CHECK(arena.struct_size == sizeof(arena));
  CHECK(arena.block == nullptr);
  CHECK(arena.num_flights == 1);
  CHECK(arena.max_rows == 0);
  CHECK(not_refused(epx_moe_arena_config_init(&arena, 16), {"struct_size", "16", std::to_string(sizeof(arena))}) == "");
  CHECK(epx_moe_arena_destroy(nullptr) == EPX_SUCCESS);
}

constexpr epx_tensor kAnyTensor = {};
constexpr epx_moe_fp8_params kAnyFp8Params = {};

// Gives the config a format that is good, and that a case spoils.
epx_row_format& spoiled_format(BlockConfig& config, epx_scaling scaling = EPX_SCALING_BLOCK128) {
  return config.dispatch_format.emplace(RowFormat(scaling).get());
}

// A config for experts in FP8, of which a case spoils another field.
BlockConfig& spoiled_recipe(BlockConfig& config) {
  config.recipe = EPX_MOE_RECIPE_FP8;
  config.ffn.hidden_dim = config.ffn.ffn_dim = 128;
  config.weighting = EPX_MOE_WEIGHT_EARLY;
  config.alignment = 16;
  return config;
}

TEST_CASE("a bad block config is refused") {
  using Config = BlockConfig;
  struct Refusal {
    std::function<void(Config&)> spoil;
    std::vector<std::string> words;
  };
  const std::vector<Refusal> table = {
      {[](Config& c) { c.struct_size = 5; }, {"struct_size", "5"}},
      {[](Config& c) { c.router.struct_size = 6; }, {"struct_size", "6"}},
      {[](Config& c) { c.ffn.struct_size = 7; }, {"struct_size", "7"}},
      {[](Config& c) { c.router.num_experts = 0; }, {"num_experts", "0"}},
      {[](Config& c) { c.router.top_k = 0; }, {"top_k", "0"}},
      {[](Config& c) { c.router.top_k = 5; }, {"top_k", "5", "4"}},
      {[](Config& c) { c.router.num_groups = 3; }, {"num_groups", "3", "4"}},
      {[](Config& c) { c.router.scaling_factor = std::numeric_limits<double>::infinity(); }, {"scaling_factor", "inf"}},
      {[](Config& c) { c.ffn.hidden_dim = 0; }, {"hidden_dim", "0"}},
      {[](Config& c) { c.ffn.ffn_dim = -1; }, {"ffn_dim", "-1"}},
      {[](Config& c) { c.ffn.activation = static_cast<epx_moe_activation>(8); }, {"activation", "8"}},
      {[](Config& c) { c.dtype = EPX_FLOAT16; }, {"dtype", "float16"}},
      {[](Config& c) { c.dtype = EPX_DTYPE_UNSET; }, {"dtype"}},
      {[](Config& c) { c.weighting = static_cast<epx_moe_weighting>(2); }, {"weighting", "2"}},
      {[](Config& c) { c.alignment = -4; }, {"alignment", "-4"}},
      {[](Config& c) { c.max_in_flight = 0; }, {"max_in_flight", "0"}},
      {[](Config& c) { c.max_tokens_per_rank = 0; }, {"max_tokens_per_rank", "0"}},
      {[](Config& c) { c.max_tokens_per_rank = 2000000000; }, {"max_tokens_per_rank", "2000000000", "int32"}},
      {[](Config& c) { c.ffn.hidden_dim = 1388718588, c.alignment = 1685696, c.max_in_flight = 984; }, {"int64"}},
      {[](Config& c) { c.router.scaling_factor = 1e39; }, {"scaling_factor", "1e+39", "float32"}},
      {[](Config& c) { c.ffn.reserved[0] = 3; }, {"reserved", "3"}},
      {[](Config& c) { c.recompute = 2; }, {"recompute", "2"}},
      {[](Config& c) { c.reserved[1] = 4; }, {"reserved", "4"}},
      {[](Config& c) { spoiled_format(c).struct_size = 8; }, {"config.dispatch_format.struct_size is 8"}},
      {[](Config& c) { spoiled_format(c).scaling = static_cast<epx_scaling>(9); }, {"dispatch_format: scaling is 9"}},
      {[](Config& c) { spoiled_format(c).scaling = EPX_SCALING_NONE; }, {"dispatch_format: scaling is 0 (none)"}},
      {[](Config& c) { spoiled_format(c).dtype = EPX_FLOAT8_E5M2; },
       {"dispatch_format: format has dtype", "float8_e5m2", "block128", "float8_e4m3"}},
      {[](Config& c) { spoiled_format(c).amax_floor = -1; }, {"dispatch_format: format.amax_floor is -1"}},
      {[](Config& c) { spoiled_format(c).reserved[3] = 1; }, {"dispatch_format", "reserved"}},
      {[](Config& c) { spoiled_format(c).scale_layout = EPX_SCALES_COLUMNS; },
       {"dispatch_format.scale_layout is 1", "ROWS"}},
      {[](Config& c) { spoiled_format(c).scales = &kAnyTensor; }, {"dispatch_format.scales is given", "NULL"}},
      {[](Config& c) { spoiled_format(c).row_scales = &kAnyTensor; }, {"dispatch_format.row_scales is given", "NULL"}},
      {[](Config& c) { spoiled_format(c).encode_scale = &kAnyTensor; }, {"dispatch_format.encode_scale is given", "NULL"}},
      {[](Config& c) { spoiled_format(c).recv_scales = &kAnyTensor; }, {"dispatch_format.recv_scales is given", "NULL"}},
      {[](Config& c) { spoiled_format(c).recv_row_scales = &kAnyTensor; },
       {"dispatch_format.recv_row_scales is given", "NULL"}},
      {[](Config& c) { spoiled_format(c, EPX_SCALING_NV); }, {"dispatch_format: H is 5", "nv", "even"}},
      {[](Config& c) { c.recipe = static_cast<epx_moe_recipe>(3); }, {"recipe is 3"}},
      {[](Config& c) { c.path = static_cast<epx_moe_path>(3); }, {"path is 3"}},
      {[](Config& c) { c.path = EPX_MOE_PATH_RING; }, {"weighting", "path ring", "EARLY"}},
      {[](Config& c) { spoiled_recipe(c).path = EPX_MOE_PATH_RAGGED; }, {"recipe is fp8", "path ragged", "wide"}},
      {[](Config& c) {
         spoiled_format(c).recv_scales = nullptr, c.weighting = EPX_MOE_WEIGHT_EARLY, c.path = EPX_MOE_PATH_RING;
       },
       {"dispatch_format is given", "path ring", "NULL"}},
      {[](Config& c) { spoiled_recipe(c).ffn.hidden_dim = 192; }, {"ffn.hidden_dim is 192", "128"}},
      {[](Config& c) { spoiled_recipe(c).ffn.ffn_dim = 4; }, {"ffn.ffn_dim is 4", "128"}},
      {[](Config& c) { spoiled_recipe(c).ffn.activation = EPX_MOE_RELU2; }, {"ffn.activation is 2", "SWIGLU"}},
      {[](Config& c) { spoiled_recipe(c).weighting = EPX_MOE_WEIGHT_LATE; }, {"weighting", "EARLY"}},
      {[](Config& c) { spoiled_recipe(c).alignment = 8; }, {"alignment is 8", "multiple of 16"}},
      {[](Config& c) { spoiled_format(spoiled_recipe(c)); }, {"dispatch_format is given", "NULL"}},
      {[](Config& c) { spoiled_recipe(c).dtype = EPX_FLOAT64; }, {"dtype is float64", "float32"}},
      {[](Config& c) { spoiled_format(c), c.dtype = EPX_FLOAT64; }, {"dtype is float64", "dispatch_format", "float32"}},
  };
  for (size_t i = 0; i < table.size(); ++i) {
    CAPTURE(i);
    Config config = block_config<float>({});
    table[i].spoil(config);
    epx_moe_block block = nullptr;
    const epx_moe_block_config view = config.c_config();
    CHECK(not_refused(epx_moe_block_create(nullptr, &view, &block), table[i].words) == "");
    CHECK(block == nullptr);
    epx_moe_block_destroy(block); // in case the block was created all the same
  }
  epx_moe_block block = nullptr;
  const Config good = block_config<float>({});
  epx_moe_block_config config = good.c_config();
  CHECK(not_refused(epx_moe_block_create(nullptr, nullptr, &block), {"config", "NULL"}) == "");
  CHECK(not_refused(epx_moe_block_create(nullptr, &config, nullptr), {"block", "NULL"}) == "");
  config.router = nullptr;
  CHECK(not_refused(epx_moe_block_create(nullptr, &config, &block), {"config.router", "NULL"}) == "");
  config = good.c_config();
  config.ffn = nullptr;
  CHECK(not_refused(epx_moe_block_create(nullptr, &config, &block), {"config.ffn", "NULL"}) == "");
}

// These calls of a block with T = 3, E = 4, K = 2, H = 5, F = 4 and room for two flights are good. A case spoils one argument.
struct BlockCalls {
  static BlockConfig config() {
    BlockConfig config = block_config<float>({});
    config.max_in_flight = 2;
    return config;
  }

  Rng rng{81};
  Block<float> block{nullptr, config()};
  epx_moe_block handle = block.handle();
  BlockInput<float> input = {Tensor<float>({3, 5}, 1.0f), Tensor<float>({3, 4}, 0.5f), Tensor<float>({3, 5}, 1.0f), {}, {}};
  FfnParams<float> params_data = random_params<float>({4, 5, 4, EPX_MOE_SWIGLU}, {}, rng);
  FfnParams<float> grads_data = scribbled_like(params_data);
  Argument<float> out = scribbled<float>({3, 5});
  Argument<int32_t> idx = scribbled<int32_t>({3, 2});
  Argument<float> grad_tokens = scribbled<float>({3, 5});
  Argument<float> grad_logits = scribbled<float>({3, 4});
  Argument<float> bias = Tensor<float>({4});
  Argument<uint8_t> mask = Tensor<uint8_t>({3}, 1);
  Argument<int64_t> counts = scribbled<int64_t>({1, 4});

  epx_moe_ffn_params params = params_data.view();
  epx_moe_ffn_params grads = grads_data.view();
  epx_tensor tokens = *input.tokens.get();
  epx_tensor logits = *input.logits.get();
  epx_tensor grad_out = *input.grad_out.get();
  epx_moe_block_fwd_args fwd = {sizeof(fwd), nullptr, 0,    &tokens, &logits, &bias,   &mask,
                                &params,     nullptr, &out, &idx,    nullptr, &counts, nullptr};
  epx_moe_block_bwd_args bwd = {sizeof(bwd),  nullptr,      0,      &params, nullptr, &grad_out, 1.0,
                                &grad_tokens, &grad_logits, &grads, 0};

  std::string changed_output() const {
    std::string changed;
    if (out.is_written()) changed += " out";
    if (idx.is_written()) changed += " topk_idx";
    if (counts.is_written()) changed += " global_counts";
    if (grad_tokens.is_written()) changed += " grad_tokens";
    if (grad_logits.is_written()) changed += " grad_logits";
    const auto untouched = scribbled_like(grads_data);
    for_each_tensor(
        [&](const char* name, const Tensor<float>& grad, const Tensor<float>& before) {
          if (!difference(grad, before).empty()) changed += std::string(" ") + name;
        },
        grads_data, untouched);
    return changed;
  }
};

using C = BlockCalls;

struct Refusal {
  std::function<void(C&)> spoil;
  std::vector<std::string> words;
};

TEST_CASE("a local block computes on the host") {
  const epx_moe_cuda cuda = {sizeof(cuda), nullptr, nullptr, 0, nullptr, 0, 0};
  BlockCalls calls;
  calls.fwd.cuda = calls.bwd.cuda = &cuda;
  CHECK(not_refused(epx_moe_block_fwd(calls.handle, &calls.fwd), {"cuda", "host"}) == "");
  CHECK(not_refused(epx_moe_block_bwd(calls.handle, &calls.bwd), {"cuda", "host"}) == "");
  epx_moe_errors_report report = {sizeof(report), 0, EPX_MOE_OP_NONE, EPX_MOE_ERROR_NONE, 0, 0, 0, 0, {}};
  CHECK(not_refused(epx_moe_block_errors(calls.handle, &report), {"host"}) == "");
  CHECK(calls.changed_output() == "");
}

TEST_CASE("a bad forward is refused, and the good one after it is not") {
  const std::vector<Refusal> table = {
      {[](C& c) { c.handle = nullptr; }, {"block", "NULL"}},
      {[](C& c) { c.fwd.struct_size = 9; }, {"struct_size", "9"}},
      {[](C& c) { c.fwd.cuda = &kBadCuda; }, {"cuda.struct_size", "3"}},
      {[](C& c) { c.fwd.flight = 2; }, {"flight", "2", "max_in_flight"}},
      {[](C& c) { c.fwd.flight = -1; }, {"flight", "-1"}},
      {[](C& c) { c.fwd.tokens = nullptr; }, {"tokens", "NULL"}},
      {[](C& c) { c.fwd.logits = nullptr; }, {"logits", "NULL"}},
      {[](C& c) { c.fwd.out = nullptr; }, {"out", "NULL"}},
      {[](C& c) { c.fwd.params = nullptr; }, {"params", "NULL"}},
      {[](C& c) { c.fwd.fp8_params = &kAnyFp8Params; }, {"fp8_params is given", "WIDE"}},
      {[](C& c) { c.params.down_weight = nullptr; }, {"down_weight"}},
      {[](C& c) { c.tokens.sizes[1] = 4; }, {"tokens", "4", "5"}},
      {[](C& c) { c.tokens.reserved[0] = 1; }, {"tokens", "reserved"}}, // which epx_dispatch would refuse after epx_prepare
      {[](C& c) { c.out.reserved[1] = 1; }, {"out", "reserved"}},
      {[](C& c) { c.tokens.sizes[0] = c.logits.sizes[0] = c.out.sizes[0] = 9; }, {"tokens", "9", "8"}},
      {[](C& c) { c.tokens.dtype = EPX_FLOAT64; }, {"tokens", "float64", "float32"}},
      {[](C& c) { c.logits.dtype = EPX_FLOAT64; }, {"logits", "float64", "float32"}},
      {[](C& c) { c.logits.sizes[1] = 3; }, {"logits", "3", "4"}},
      {[](C& c) { c.logits.sizes[0] = 2; }, {"logits", "2", "3"}},
      {[](C& c) { c.bias.sizes[0] = 3; }, {"selection_bias", "3", "4"}},
      {[](C& c) { c.mask.sizes[0] = 4; }, {"token_mask", "4", "3"}},
      {[](C& c) { c.out.sizes[0] = 2; }, {"out", "2", "3"}},
      {[](C& c) { c.idx.dtype = EPX_FLOAT32; }, {"topk_idx", "float32"}},
      {[](C& c) { c.idx.sizes[1] = 3; }, {"topk_idx", "3", "2"}},
      {[](C& c) { c.counts.sizes[0] = 2; }, {"global_counts", "2", "1"}},
  };
  for (size_t i = 0; i < table.size(); ++i) {
    CAPTURE(i);
    BlockCalls calls;
    table[i].spoil(calls);
    CHECK(not_refused(epx_moe_block_fwd(calls.handle, &calls.fwd), table[i].words) == "");
    CHECK(calls.changed_output() == "");
    calls.block.forward(calls.input, calls.params_data);
  }
  BlockCalls calls;
  CHECK(not_refused(epx_moe_block_fwd(calls.handle, nullptr), {"args", "NULL"}) == "");
}

TEST_CASE("a bad backward is refused, and the good one after it is not") {
  const std::vector<Refusal> table = {
      {[](C& c) { c.handle = nullptr; }, {"block", "NULL"}},
      {[](C& c) { c.bwd.struct_size = 9; }, {"struct_size", "9"}},
      {[](C& c) { c.bwd.flight = 2; }, {"flight", "2", "max_in_flight"}},
      {[](C& c) { c.bwd.flight = 1; }, {"flight", "1", "forward|fwd"}}, // its forward was of flight 0
      {[](C& c) { c.bwd.params = nullptr; }, {"params", "NULL"}},
      {[](C& c) { c.bwd.fp8_params = &kAnyFp8Params; }, {"fp8_params is given", "WIDE"}},
      {[](C& c) { c.params.up_weight = nullptr; }, {"up_weight"}},
      {[](C& c) { c.params.up_bias = nullptr; }, {"up_bias"}}, // whose gradient is wanted
      {[](C& c) { c.bwd.grad_out = nullptr; }, {"grad_out", "NULL"}},
      {[](C& c) { c.bwd.grad_tokens = nullptr; }, {"grad_tokens", "NULL"}},
      {[](C& c) { c.bwd.grad_logits = nullptr; }, {"grad_logits", "NULL"}},
      {[](C& c) { c.grad_out.sizes[0] = 2; }, {"grad_out", "2", "3"}},
      {[](C& c) { c.grad_tokens.sizes[1] = 4; }, {"grad_tokens", "4", "5"}},
      {[](C& c) { c.grad_logits.sizes[1] = 5; }, {"grad_logits", "5", "4"}},
      {[](C& c) { c.grad_logits.dtype = EPX_FLOAT64; }, {"grad_logits", "float64", "float32"}},
      {[](C& c) { c.bwd.accumulate = -1; }, {"accumulate", "-1"}},
      {[](C& c) { c.grad_out.reserved[0] = 1; }, {"grad_out", "reserved"}},
      {[](C& c) { c.grad_tokens.reserved[0] = 1; }, {"grad_tokens", "reserved"}},
      {[](C& c) { c.bwd.aux_loss_grad = std::numeric_limits<double>::quiet_NaN(); }, {"aux_loss_grad", "nan"}},
  };
  for (size_t i = 0; i < table.size(); ++i) {
    CAPTURE(i);
    BlockCalls calls;
    calls.block.forward(calls.input, calls.params_data);
    table[i].spoil(calls);
    CHECK(not_refused(epx_moe_block_bwd(calls.handle, &calls.bwd), table[i].words) == "");
    CHECK(calls.changed_output() == "");
    calls.block.backward(calls.input, calls.params_data);
  }
  BlockCalls calls;
  CHECK(not_refused(epx_moe_block_bwd(calls.handle, nullptr), {"args", "NULL"}) == "");
  CHECK(not_refused(epx_moe_block_bwd(calls.handle, &calls.bwd), {"flight", "0", "forward|fwd"}) == "");
  CHECK(calls.changed_output() == "");
}

TEST_CASE("a block whose experts are in FP8 is given their parameters, and no others") {
  BlockConfig config = block_config<float>({4, 2, 128, 128, 8, EPX_MOE_SWIGLU});
  spoiled_recipe(config);
  const Block<float> block(nullptr, config);
  Rng rng(82);
  const BlockInput<float> input = {
      random_tensor<float>({3, 128}, rng), random_tensor<float>({3, 4}, rng), random_tensor<float>({3, 128}, rng), {}, {}};
  const FfnParams<float> params = random_params<float>({4, 128, 128, EPX_MOE_SWIGLU}, kStacked, rng);
  const epx_moe_ffn_params wide = params.view();
  Block<float>::Forward forward;
  const BlockOutput<float> output = block.make_output(3);
  block.make_call(forward, input, params, 0, output);
  forward.args.params = &wide;
  CHECK(not_refused(epx_moe_block_fwd(block.handle(), &forward.args), {"params is given", "fp8_params"}) == "");
  forward.args.params = nullptr;
  forward.args.fp8_params = nullptr;
  CHECK(not_refused(epx_moe_block_fwd(block.handle(), &forward.args), {"fp8_params is NULL", "FP8"}) == "");
  block.forward(input, params);

  Block<float>::Backward backward;
  const BlockGradients<float> gradients = block.make_gradients(3, params);
  block.make_call(backward, input, params, 0, gradients);
  backward.args.params = &wide;
  CHECK(not_refused(epx_moe_block_bwd(block.handle(), &backward.args), {"params is given", "fp8_params"}) == "");
  backward.args.params = nullptr;
  backward.params.fp8.down_transposed_codes = nullptr;
  CHECK(not_refused(epx_moe_block_bwd(block.handle(), &backward.args), {"down_transposed_codes", "NULL"}) == "");
  block.backward(input, params);
}

} // namespace
} // namespace epx::test
