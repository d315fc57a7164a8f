// SPDX-License-Identifier: Apache-2.0
// These tests check the weights that ep_bench --gather gathers: their shapes and shards, their comparison, and what is reported.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"
#include "tests/unit/ep_bench_support.h"
#include "tools/ep_bench/block/report.h"
#include "tools/ep_bench/block/weight_gather.h"
#include "tools/ep_bench/memory_need.h"
#include "tools/ep_bench/peers.h"

namespace epx::bench {
namespace {

Options gather_options(const std::string& more) {
  return options_of_line("--block --dtype fp32 --gather wide,fp8 " + more);
}

std::vector<std::vector<int64_t>> shards_of(const GatheredMatrix& matrix, int num_ranks) {
  std::vector<std::vector<int64_t>> shards;
  shards.reserve(static_cast<size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank)
    shards.push_back({matrix.part(rank, num_ranks).first, matrix.part(rank, num_ranks).count});
  return shards;
}

TEST_CASE("ep_bench --gather has matrices of a layer's experts, whose shards follow each other") {
  const Options options = gather_options("--experts 5 --hidden 256 --ffn 128");
  CHECK(gathered_experts(options, 3) == 2);
  const auto shapes = [&](GatherForm form) {
    std::vector<std::vector<int64_t>> found;
    for (const GatheredMatrix& matrix : gathered_matrices(options, form, 3))
      found.push_back({matrix.dtype, matrix.rows, matrix.columns, matrix.row_bytes()});
    return found;
  };
  CHECK(shapes(GatherForm::Wide) ==
        std::vector<std::vector<int64_t>>{{EPX_FLOAT32, 512, 256, 1024}, {EPX_FLOAT32, 512, 128, 512}});
  CHECK(shapes(GatherForm::Fp8) == std::vector<std::vector<int64_t>>{{EPX_FLOAT8_E4M3, 512, 256, 256},
                                                                     {EPX_FLOAT8_E4M3, 512, 128, 128},
                                                                     {EPX_FLOAT32, 4, 2, 8},
                                                                     {EPX_FLOAT32, 4, 1, 4}});
  const std::vector<GatheredMatrix> wide = gathered_matrices(options, GatherForm::Wide, 3),
                                    fp8 = gathered_matrices(options, GatherForm::Fp8, 3);
  CHECK(shards_of(wide[0], 3) == std::vector<std::vector<int64_t>>{{0, 170}, {170, 171}, {341, 171}});
  CHECK(shards_of(fp8[0], 3) == std::vector<std::vector<int64_t>>{{0, 128}, {128, 128}, {256, 256}}); // borders of blocks
  CHECK(shards_of(fp8[2], 3) == std::vector<std::vector<int64_t>>{{0, 1}, {1, 1}, {2, 2}});
}

int64_t elements_of(const std::vector<GatheredMatrix>& matrices) {
  int64_t elements = 0;
  for (const GatheredMatrix& matrix : matrices)
    elements += matrix.rows * matrix.columns;
  return elements;
}

// What a rank of a gather has found.
struct GatherCounts {
  int64_t scribbled = -1, gathered = -1, one_byte = -1, swapped_rows = -1, received_bytes = -1;
};

// Gathers on threads; rank r has the weights of seeds[r].
std::vector<GatherCounts> gather_on_threads(const Options& options, GatherForm form, const std::vector<uint64_t>& seeds) {
  const int num_ranks = static_cast<int>(seeds.size());
  std::vector<GatherCounts> counts(seeds.size());
  test::LocalRendezvous rendezvous(num_ranks);
  test::run_threads(num_ranks, [&](int rank) {
    const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
    const Peers peers(bootstrap, 60'000);
    Options mine = options;
    mine.seed = seeds[rank];
    const std::unique_ptr<Memory> memory = make_memory(mine, rank);
    WeightGather gather(bootstrap, mine, peers, *memory);
    gather.scribble(form);
    peers.barrier();
    GatherCounts& found = counts[rank];
    found.scribbled = gather.count_wrong(form);
    peers.barrier();
    gather.start(form);
    gather.join();
    gather.check();
    found.gathered = gather.count_wrong(form);
    found.received_bytes = gather.received_bytes(form);
    peers.barrier(); // no rank writes any more
    const Buffer& last = gather.wholes(form).back();
    last.bytes().back() ^= std::byte{1};
    found.one_byte = gather.count_wrong(form);
    last.bytes().back() ^= std::byte{1};
    const auto row = static_cast<int64_t>(gathered_matrices(mine, form, num_ranks).front().row_bytes());
    std::byte* const first = gather.wholes(form).front().data();
    std::swap_ranges(first, first + row, first + row);
    found.swapped_rows = gather.count_wrong(form);
  });
  return counts;
}

TEST_CASE("ep_bench --gather brings every shard to every rank, and finds one element or two rows that are wrong") {
  // The second shape is more than is read at once to compare.
  for (const char* shape : {"--experts 5 --hidden 256 --ffn 128", "--experts 7 --hidden 384 --ffn 256"}) {
    const Options options = gather_options(shape);
    for (const GatherForm form : options.block.gathers) {
      const std::vector<GatheredMatrix> matrices = gathered_matrices(options, form, 3);
      const std::vector<GatherCounts> counts = gather_on_threads(options, form, {5, 5, 5});
      for (int rank = 0; rank < 3; ++rank) {
        int64_t received = 0;
        for (const GatheredMatrix& matrix : matrices)
          received += (matrix.rows - matrix.part(rank, 3).count) * matrix.row_bytes();
        CHECK(counts[rank].scribbled >
              elements_of(matrices) * 98 / 100); // a byte is what it was by chance once in 256 times
        CHECK(counts[rank].gathered == 0);
        CHECK(counts[rank].received_bytes == received);
        CHECK(counts[rank].one_byte == 1);
        CHECK(counts[rank].swapped_rows > 2 * matrices.front().columns * 95 / 100);
      }
    }
  }
}

TEST_CASE("ep_bench --gather: rows of any width, and the rows of a rank that has others are wrong on all ranks") {
  const Options options =
      options_of_line("--block --dtype fp32 --gather wide --experts 4 --hidden 33 --ffn 7 --alignment 2");
  const std::vector<GatheredMatrix> matrices = gathered_matrices(options, GatherForm::Wide, 3);
  const std::vector<GatherCounts> counts = gather_on_threads(options, GatherForm::Wide, {5, 6, 5});
  int64_t of_rank_1 = 0;
  for (const GatheredMatrix& matrix : matrices)
    of_rank_1 += matrix.part(1, 3).count * matrix.columns;
  CHECK(of_rank_1 > 0);
  CHECK(counts[0].gathered == of_rank_1);
  CHECK(counts[1].gathered == elements_of(matrices) - of_rank_1);
  CHECK(counts[2].gathered == of_rank_1);
}

TEST_CASE("ep_bench --gather refuses what cannot be gathered") {
  const auto refusal = [](std::vector<const char*> arguments) { return refusal_of([&] { parse(arguments); }); };
  CHECK(refusal({"--gather", "wide"}) == "--gather requires --block");
  CHECK(refusal({"--block", "--dtype", "fp32", "--gather-sms", "8"}) == "--gather-sms requires --gather");
  const auto block_refusal = [&](std::vector<const char*> more) {
    std::vector<const char*> arguments{"--block", "--dtype", "fp32"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return refusal(arguments);
  };
  CHECK(block_refusal({"--gather", "wide,fp4"}) == "--gather is 'fp4'; it must be one of wide, fp8");
  CHECK(contains(block_refusal({"--gather", ""}), "--gather: the value is empty"));
  CHECK(block_refusal({"--gather", "wide,fp8", "--hidden", "64"}) ==
        "--hidden is 64 and --gather is 'fp8'; it must be a multiple of 128");
  CHECK(block_refusal({"--gather", "fp8", "--ffn", "200"}) ==
        "--ffn is 200 and --gather is 'fp8'; it must be a multiple of 128");
  CHECK(block_refusal({"--gather", "wide", "--hidden", "64", "--ffn", "200"}) == "accepted");
  CHECK(block_refusal({"--gather", "wide", "--gather-sms", "-1"}) ==
        "--gather-sms is -1; it must be between 0 and 2147483647");
  CHECK(gather_options("").block.gather_sms == 0);
  CHECK(gather_options("").block.gathers == std::vector{GatherForm::Wide, GatherForm::Fp8});

  const auto rows_refusal = [](const std::string& line, int num_ranks) {
    const Options options = options_of_line("--block --dtype fp32 " + line);
    return refusal_of([&] { require_gather(options, num_ranks); });
  };
  CHECK(rows_refusal("--gather wide --experts 3 --top-k 1 --hidden 4 --ffn 1", 3) ==
        "--gather is 'wide', --experts is 3, --hidden is 4 and --ffn is 1, and 3 ranks share a matrix of 2 rows; it must "
        "have "
        "between 3 and 2147483647");
  CHECK(rows_refusal("--gather wide --experts 3 --top-k 1 --hidden 3 --ffn 2", 3) == "accepted");
  CHECK(contains(rows_refusal("--gather fp8 --experts 2 --top-k 1 --hidden 128 --ffn 128", 2),
                 "2 ranks share a matrix of 128 rows; it must have between 256 and"));
  CHECK(rows_refusal("--gather fp8 --experts 2 --top-k 1 --hidden 256 --ffn 128", 2) == "accepted");
  CHECK(contains(rows_refusal("--gather wide --experts 4096 --ffn 1048576", 1), "a matrix of 8589934592 rows"));

  const auto parts_refusal = [](const std::string& line, int num_ranks) {
    const Options options = options_of_line("--block --dtype fp32 " + line);
    return refusal_of([&] { require_equal_parts(options, num_ranks); });
  };
  CHECK(parts_refusal("--gather wide,fp8 --experts 4 --top-k 1 --hidden 256 --ffn 128", 2) == "accepted");
  CHECK(parts_refusal("--gather wide --experts 3 --top-k 1 --hidden 4 --ffn 2", 3) ==
        "--gather is 'wide' by copy engines, and 3 ranks do not share a matrix of 4 rows evenly; with --gather-sms 16 they "
        "need "
        "not");
  CHECK(contains(parts_refusal("--gather fp8 --experts 3 --top-k 1 --hidden 384 --ffn 128", 3),
                 "a matrix of 256 rows evenly"));
}

TEST_CASE("ep_bench --gather counts its matrices before they are allocated") {
  const std::string shape = "--experts 4 --top-k 1 --hidden 128 --ffn 128";
  const auto need = [&](const std::string& gather) {
    const Options options = options_of_line("--block --dtype fp32 " + gather + shape);
    const epx_memory_plan plan = memory_plan(gather_group_config(options), 2);
    return memory_need(options, 2, 128).gather - static_cast<double>(plan.window_bytes + plan.scratch_bytes);
  };
  const double wide = 1.5 * (512 * 512 + 256 * 512), fp8 = 1.5 * (512 * 128 + 256 * 128 + (4 + 2) * 4); // whole, and a half
  CHECK(need("--gather wide ") == wide);
  CHECK(need("--gather fp8,wide ") == wide + fp8);
  CHECK(memory_need(options_of_line("--block --dtype fp32 " + shape), 2, 128).gather == 0);
  const Options options = options_of_line("--block --dtype fp32 --gather wide " + shape);
  const MemoryNeed all = memory_need(options, 2, 128);
  CHECK(all.all() == all.inputs + all.tensors + all.group + all.block + all.gather);
  CHECK(contains(refusal_of([&] { require_memory(options, 2, 128, all.all() - 1); }), " for --gather; each of 2 ranks"));
}

TEST_CASE("ep_bench --gather reports what it adds, and fails by a wrong element") {
  const Options options = gather_options("--gather-sms 24");
  BlockResults results;
  CHECK(block_json(results, options)["gather"].is_null());
  results.gathered_experts = 16;
  results.gathers = {{GatherForm::Wide, "gather", 800, 1000, std::nullopt, {{"block fwd+bwd", 2.54}}},
                     {GatherForm::Fp8, "gather-fp8", 440, 508, 0, {{"block fwd+bwd", -0.5}, {"block-fp8 fwd+bwd", 1}}}};
  CHECK(results.passed());
  CHECK(results.fp8_to_wide() == 0.55);
  nlohmann::json json = block_json(results, options)["gather"];
  CHECK(json["experts"] == 16);
  CHECK(json["sms"] == 24);
  CHECK(json["fp8_to_wide"] == 0.55);
  CHECK(json["forms"]["wide"] == nlohmann::json{{"line", "gather"},
                                                {"received_bytes", 1000},
                                                {"added_percent", {{"block fwd+bwd", 2.54}}},
                                                {"wrong", nullptr}});
  CHECK(json["forms"]["fp8"]["added_percent"]["block-fp8 fwd+bwd"] == 1);
  CHECK(json["forms"]["fp8"]["wrong"] == 0);
  const std::string table = block_table(results, options);
  CHECK_MESSAGE(
      contains(table, "\ngather: weights of 16 experts, 1000 bytes from other ranks; beside block fwd+bwd it adds 2.5 %\n"),
      table);
  CHECK_MESSAGE(contains(table, "; beside block-fp8 fwd+bwd it adds 1.0 %; 0 elements are wrong\n"), table);
  CHECK(contains(table, "\ngather-fp8 / gather: 0.550 of the time\n"));
  Options on_gpus = gather_options("--gather-sms 24");
  on_gpus.transport = EPX_TRANSPORT_NCCL;
  CHECK(contains(block_table(results, on_gpus), "1000 bytes from other ranks by 24 SMs; beside"));
  on_gpus.block.gather_sms = 0;
  CHECK(contains(block_table(results, on_gpus), "1000 bytes from other ranks by copy engines; beside"));

  results.gathers[1].wrong = 3;
  CHECK_FALSE(results.passed());
  CHECK(contains(block_table(results, options), "; 3 elements are wrong: WRONG\n"));
  results.gathers.pop_back();
  CHECK_FALSE(results.fp8_to_wide());
  CHECK(block_json(results, options)["gather"]["fp8_to_wide"].is_null());
}

} // namespace
} // namespace epx::bench
