// SPDX-License-Identifier: Apache-2.0
// These tests check the data of ep_bench --block, and what it reports. The expected words were computed by
// examples/native/moe_data.py, which other languages' programs use.
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/unit/ep_bench_support.h"
#include "tools/ep_bench/block/layer.h"
#include "tools/ep_bench/block/report.h"
#include "tools/ep_bench/block/shape.h"
#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/memory_need.h"

namespace epx::bench {
namespace {

TEST_CASE("ep_bench --block has the numbers of moe_data.py") {
  CHECK(mix32(0) == 0);
  CHECK(mix32(1) == 0x688990c0);
  CHECK(mix32(0xffffffff) == 0x6768824a);
  const BlockStream tokens(1, BlockTensor::Tokens, 0), gate_up((uint64_t{1} << 40) + 7, BlockTensor::GateUp, 255);
  CHECK(std::array{tokens.at(0), tokens.at(1), tokens.at(2)} == std::array{0x58263e41u, 0x6c779fe6u, 0xfc986df9u});
  CHECK(std::array{gate_up.at(0), gate_up.at(1), gate_up.at(2)} == std::array{0x900f7a44u, 0xc9f3735fu, 0x75520a7eu});
  const BlockStream down(1, BlockTensor::Down, 5);
  CHECK(std::array{down.symmetric(0), down.symmetric(1), down.symmetric(2)} ==
        std::array{0x1.0fa3p-3f, 0x1.10ed68p-2f, 0x1.2de6p-4f});
  CHECK(bf16_bits(1.00390625f) == 0x3f80); // a tie goes to even
  CHECK(bf16_bits(1.01171875f) == 0x3f82);
  CHECK(bf16_bits(-0.3f) == 0xbe9a);
  CHECK(weight_scale(96) == 0.25f); // sqrt(3 / 96) is in the middle of two powers
  CHECK(weight_scale(1536) == 0.0625f);
  CHECK(weight_scale(7168) == 0x1p-6f);
}

Options block_options(std::vector<const char*> more) {
  std::vector<const char*> arguments{"--block", "--dtype", "fp32"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return options_of(arguments);
}

TEST_CASE("ep_bench --block has the logits of moe_data.py") {
  const Options options =
      block_options({"--tokens", "2", "--experts", "6", "--top-k", "3", "--routing", "zipf:1.2", "--seed", "9"});
  CHECK(block_logits(options, 0, 0) ==
        std::vector<float>{0x1.a9b4p-2f, -0x1.2bf0ep+0f, -0x1.c7dbcp+0f, -0x1.0ebe5p+1f, -0x1.faa78p+0f, -0x1.52966p+0f, //
                           0x1.208ep+0f, -0x1.2f338p-2f, -0x1.92c6cp+0f, -0x1.22b25p+1f, 0x1.070ep-2f, -0x1.65b56p+0f});
  CHECK(block_topk_idx(options, 0, 0) == std::vector<int64_t>{0, 1, 5, /**/ 0, 4, 1});
}

TEST_CASE("ep_bench --block draws experts by popularity, and no logit twice for a token") {
  const auto loads = [](const char* routing) {
    const Options options = block_options({"--tokens", "4000", "--experts", "8", "--top-k", "1", "--routing", routing});
    std::vector<double> load(8);
    for (const int64_t expert : block_topk_idx(options, 0, 0))
      ++load[expert];
    std::ranges::sort(load, std::greater());
    return load;
  };
  const std::vector<double> uniform = loads("uniform"), zipf = loads("zipf:1");
  CHECK(uniform.front() < 600);
  CHECK(uniform.back() > 400); // 500 are expected, with a deviation of 21
  double harmonic = 0;
  for (int n = 1; n <= 8; ++n)
    harmonic += 1.0 / n;
  for (int n = 0; n < 8; ++n)
    CHECK(std::abs(zipf[n] - 4000 / harmonic / (n + 1)) < 150);

  const std::vector<float> logits = block_logits(block_options({"--tokens", "64", "--experts", "256"}), 1, 3);
  for (int token = 0; token < 64; ++token)
    CHECK(std::set<float>(logits.begin() + token * 256, logits.begin() + (token + 1) * 256).size() == 256);
}

TEST_CASE("ep_bench --block refuses what it cannot measure") {
  const auto refusal = [](std::vector<const char*> arguments) { return refusal_of([&] { parse(arguments); }); };
  CHECK(refusal({"--ffn", "8"}) == "--ffn requires --block");
  CHECK(refusal({"--dump", "/tmp"}) == "--dump requires --block");
  CHECK(refusal({"--paced"}) == "--paced requires --block");
  CHECK(refusal({"--block", "--dump-rows", "8"}) == "--dump-rows requires --dump");
  CHECK(refusal({"--block", "--dtype", "fp32", "--iters", "5", "--rounds", "6"}) ==
        "--rounds is 6; it must be between 1 and 5");
  CHECK(refusal({"--block", "--dtype", "bf16"}) ==
        "--dtype is 'bf16' and --block is given; on the host the block computes in fp32");
  CHECK(contains(refusal({"--block", "--dtype", "fp32", "--routing", "hot:0.5"}), "--routing is 'hot:0.5'"));
  CHECK(contains(refusal({"--block", "--dtype", "fp32", "--capacity", "7"}), "--capacity is '7'"));
  CHECK(contains(refusal({"--block", "--dtype", "fp32", "--tokens", "0"}), "--tokens is '0'"));
  const auto recipe_refusal = [&](std::vector<const char*> more) {
    std::vector<const char*> arguments{"--block", "--dtype", "fp32", "--recipe", "fp8"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return refusal(arguments);
  };
  CHECK(recipe_refusal({"--hidden", "64"}) == "--hidden is 64 and --recipe is 'fp8'; it must be a multiple of 128");
  CHECK(recipe_refusal({"--ffn", "200"}) == "--ffn is 200 and --recipe is 'fp8'; it must be a multiple of 128");
  CHECK(recipe_refusal({}) == "--alignment is 0 and --recipe is 'fp8'; it must be a multiple of 16");
  CHECK(recipe_refusal({"--alignment", "16", "--biases"}) ==
        "--biases is given and --recipe is 'fp8'; experts in FP8 have no biases");
  CHECK(refusal({"--recipe", "fp8"}) == "--recipe requires --block");
  CHECK(contains(refusal({"--block", "--dtype", "fp32", "--pause-ms", "9"}), "--pause-ms is '9'"));
  CHECK(refusal({"--block", "--dtype", "fp32", "--ffn", "0"}) == "--ffn is 0; it must be between 1 and 1073741823");
  CHECK(refusal({"--block", "--dtype", "fp32", "--experts", "4097"}) == "--experts is 4097; it must be between 1 and 4096");
}

TEST_CASE("ep_bench --block counts the arena of the block before it is allocated") {
  char directory[] = "/tmp/ep_bench_block.XXXXXX";
  REQUIRE(mkdtemp(directory) != nullptr);
  const Options options =
      block_options({"--tokens", "64", "--hidden", "128", "--experts", "4", "--top-k", "2", "--ffn", "96", "--biases"});
  {
    const Group group(bootstrap_file(directory, "block", 0, 1, std::chrono::seconds(10)), group_config(options));
    moe::BlockConfig block;
    block.router = router_config(options);
    block.ffn = ffn_config(options, 0);
    moe::Arena arena(group, {.block = block});
    const epx_moe_arena_info info = arena.query();
    arena.destroy();

    // The other tensors of 64 tokens, 128 routes and as many rows: in and out, parameters and gradients, the native layer's.
    const double params = 4 * (3 * 96 * 128 + 2 * 96 + 128) * 4;
    const double tensors = 4 * 64 * 512 + 2 * 64 * 4 * 4 + 2 * params;
    const double native = 128 * (2 * 512 + 16) + 128 * (4 * 512 + 2 * 96 * 4 + 8);
    const double counted = memory_need(options, 1, 128).block - tensors - native;
    CHECK(counted <= static_cast<double>(info.total_bytes)); // what the arena aligns is not counted
    CHECK(counted > 0.99 * static_cast<double>(info.total_bytes));
  }
  std::filesystem::remove_all(directory);
  CHECK(memory_need(options_of({}), 1, 128).block == 0);
  const std::string sentence = refusal_of([&] { require_memory(options, 1, 128, memory_need(options, 1, 128).all() - 1); });
  CHECK_MESSAGE(contains(sentence, "--input-sets 4, with --block and --ffn 96, need at least"), sentence);
}

TEST_CASE("ep_bench --block draws the rows of --dump-rows as moe_data.py does") {
  CHECK(std::array{sample_row(1, 0, 1000), sample_row(1, 1, 1000), sample_row(1, 63, 524288)} ==
        std::array<int64_t, 3>{309, 800, 419799});
}

TEST_CASE("ep_bench --block reports ratios to its bounds") {
  BlockFigures line;
  line.name = "block fwd";
  line.median_us = 30;
  line.quartiles = {28, 33};
  line.rounds_us = {29, 31};
  CHECK_FALSE(line.ratio());
  line.dense_us = 12;
  CHECK_FALSE(line.max_ratio());
  line.wire_us = 8;
  CHECK(line.ratio() == 1.5);
  CHECK(line.max_ratio() == 2.5);

  const Options options = block_options({"--ffn", "48", "--tokens", "10", "--top-k", "2", "--hidden", "16"});
  CHECK(forward_flops(options) == 6.0 * 20 * 16 * 48);
  BlockResults results{
      {line},
      {{"native", "out", 0.5, 2, 0.25}, {"native", "grad_tokens", NAN, 2, 0.25}, {"block-fp8", "grad_down", 0.6, 2, 0.25}}};
  CHECK(results.differences[0].passed());
  CHECK_FALSE(results.differences[1].passed());
  CHECK_FALSE(results.differences[2].passed());
  const nlohmann::json json = block_json(results, options);
  CHECK(json["ffn"] == 48);
  CHECK(json["lines"]["block fwd"]["ratio"] == 1.5);
  CHECK(json["lines"]["block fwd"]["paused_us"].is_null());
  CHECK(json["lines"]["block fwd"]["quartiles_us"] == nlohmann::json{28.0, 33.0});
  CHECK(json["lines"]["block fwd"]["rounds_us"] == nlohmann::json{29.0, 31.0});
  CHECK(json["lines"]["block fwd"]["paused_quartiles_us"].is_null());
  CHECK(json["differences"]["block-fp8"]["grad_down"]["passed"] == false);
  CHECK(contains(block_table(results, options),
                 "block-fp8 - block, grad_down: at most 0.6, 0.3 of the largest element; 0.25 is allowed: WRONG"));
}

} // namespace
} // namespace epx::bench
