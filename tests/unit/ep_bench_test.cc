// SPDX-License-Identifier: Apache-2.0
// These tests check the command line of ep_bench, and how its ranks fail together.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/ep_bench_support.h"
#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/machines.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/row_format.h"

namespace epx::bench {
namespace {

// Returns the sentence with which a command line is refused.
std::string refusal(const std::vector<const char*>& argv) {
  return refusal_of([&] { parse_options(static_cast<int>(argv.size()), argv.data()); });
}

TEST_CASE("ep_bench options: everything given") {
  const Options options = options_of_line(
      "--transport host --tokens 7 --hidden 33 --experts 9 --top-k 3 --dtype fp16 --routing zipf:1.25 --pads "
      "untouched --alignment 16 --zone-stride 48 --capacity 100 --seed 18446744073709551615 --combine-precision exact "
      "--staged --num-comm-sms 16 --ranks-per-node 1 --timeout-ms 1500 --iters 2 --warmup 0 --input-sets 3 "
      "--verify --json out.json --job-id job");
  CHECK(options.transport == EPX_TRANSPORT_HOST);
  CHECK(options.tokens == 7);
  CHECK(options.hidden == 33);
  CHECK(options.experts == 9);
  CHECK(options.top_k == 3);
  CHECK(options.dtype == EPX_FLOAT16);
  CHECK(options.routing.kind == RoutingSpec::Kind::Zipf);
  CHECK(options.routing.zipf_exponent == 1.25);
  CHECK(options.pads == EPX_PADS_UNTOUCHED);
  CHECK(options.alignment == 16);
  CHECK(options.zone_stride == 48);
  CHECK(options.capacity == 100);
  CHECK(options.seed == UINT64_MAX);
  CHECK(options.combine_precision == EPX_COMBINE_EXACT);
  CHECK(options.staged);
  CHECK(options.num_comm_sms == 16);
  CHECK(options.ranks_per_node == 1);
  CHECK(options.timeout_ms == 1500);
  CHECK(options.iterations == 2);
  CHECK(options.warmup == 0);
  CHECK(options.input_sets == 3);
  CHECK(options.verify);
  CHECK(options.json_file == "out.json");
  CHECK(options.bootstrap_directory == "/tmp");
  CHECK(options.rank == 0);
  CHECK(options.num_ranks == 1);
  CHECK(options.job_id == "job");
  CHECK(row_bytes(options) == 66);
}

TEST_CASE("ep_bench options: defaults and borders") {
  CHECK(options_of({}).dtype == EPX_BFLOAT16);
  CHECK_FALSE(options_of({}).staged);
  CHECK(options_of({"--tokens", "0"}).tokens == 0);
  CHECK(options_of({"--top-k", "64", "--experts", "64"}).top_k == 64);
  CHECK(options_of({"--routing", "zipf:0"}).routing.zipf_exponent == 0);
  CHECK(options_of({"--routing", "text:a b:c"}).routing.text_file == "a b:c");
  CHECK(options_of({"--routing", "text:x", "--top-k", "8", "--experts", "2"}).top_k == 8); // duplicates are routes
  CHECK(options_of({"--routing", "hot:1"}).routing.hot_fraction == 1);
  CHECK(to_string(options_of({"--routing", "hot:0.3"}).routing) == "hot:0.3");
  CHECK(row_bytes(options_of({"--dtype", "fp32", "--hidden", "3"})) == 12);
  CHECK(options_of({"--input-sets", "1"}).num_input_sets() == 1);
  CHECK_FALSE(options_of({}).is_rank_major());
  CHECK(options_of({"--layout", "rank-major", "--tokens", "7"}).rows_per_source() == 7);
  CHECK(options_of({"--layout", "rank-major", "--tokens", "0"}).rows_per_source() == 1);
  CHECK(options_of({"--layout", "rank-major-compact", "--tokens", "7"}).rows_per_source() == 7);
  CHECK(options_of({"--layout", "rank-major-compact"}).is_rank_major());
  CHECK(options_of({"--layout", "rank-major", "--tokens", "7", "--max-rows", "9"}).rows_per_source() == 9);
  CHECK(options_of({"--input-sets", "1", "--verify"}).num_input_sets() == 2);

  std::vector<const char*> bare{"ep_bench"};
  if (built_with_mpi())
    CHECK(std::get<Sweep>(parse_options(1, bare.data())).common().bootstrap_directory.empty());
  else
    CHECK(contains(refusal(bare), "--bootstrap"));
}

TEST_CASE("ep_bench options: row formats, and the bytes of their rows") {
  const auto bytes_of = [](const std::string& line, epx_operation operation = EPX_OP_DISPATCH) {
    return row_bytes_of(options_of_line("--hidden 7168 " + line), operation);
  };
  constexpr int64_t kWide = 14336;
  CHECK(bytes_of("") == RowBytes{kWide, kWide, kWide});
  CHECK(bytes_of("--row-format none --wire-format none") == RowBytes{kWide, kWide, kWide});
  CHECK(bytes_of("--row-format fp8-mx", EPX_OP_COMBINE) == RowBytes{kWide, kWide, kWide});
  constexpr int64_t kBlock128 = 7168 + 56 * 4, kPow2 = 7168 + 56, kMx = 7168 + 224, kNv = 3584 + 448 + 4;
  CHECK(bytes_of("--row-format fp8-block128") == RowBytes{kWide, kBlock128, kBlock128});
  CHECK(bytes_of("--row-format fp8-block128-pow2") == RowBytes{kWide, kBlock128, kBlock128});
  CHECK(bytes_of("--row-format fp8-block128-pow2 --scale-layout packed") == RowBytes{kWide, kPow2, kPow2});
  CHECK(bytes_of("--row-format fp8-block128-pow2 --scale-layout tiles --alignment 128") == RowBytes{kWide, kPow2, kPow2});
  CHECK(bytes_of("--row-format fp8-mx --quantised-input") == RowBytes{kMx, kMx, kMx});
  CHECK(bytes_of("--row-format fp4-nv --dtype fp32") == RowBytes{2 * kWide, kNv, kNv});
  CHECK(bytes_of("--wire-format fp8-block128-pow2") == RowBytes{kWide, kPow2, kWide});
  CHECK(bytes_of("--wire-format fp8-e5m2-mx --layout rank-major") == RowBytes{kWide, kMx, kWide});

  CHECK(bytes_of("--sum-format fp8-block128", EPX_OP_COMBINE) == RowBytes{kWide, kBlock128, kWide});
  CHECK(bytes_of("--sum-format fp8-mx --layout rank-major", EPX_OP_DISPATCH_BWD) == RowBytes{kWide, kMx, kWide});
  CHECK(bytes_of("--sum-format fp8-e5m2-mx --dtype fp32", EPX_OP_COMBINE) == RowBytes{2 * kWide, kMx, 2 * kWide});
  CHECK(bytes_of("--sum-format fp8-mx", EPX_OP_COMBINE_BWD) == RowBytes{kWide, kWide, kWide});
  CHECK(bytes_of("--sum-format fp8-mx") == RowBytes{kWide, kWide, kWide});
  const std::string both = "--sum-format fp8-block128 --row-format fp4-nv";
  CHECK(bytes_of(both) == RowBytes{kWide, kNv, kNv});
  CHECK(bytes_of(both, EPX_OP_DISPATCH_BWD) == RowBytes{kWide, kBlock128, kWide});
  CHECK(quantised_sum(options_of_line("--sum-format fp8-e5m2-mx")).elements == EPX_FLOAT8_E5M2);

  const Options in_call = options_of_line("--row-format fp8-e5m2-mx --scale-layout columns");
  CHECK(tokens_dtype(in_call) == EPX_BFLOAT16);
  CHECK(recv_tokens_dtype(in_call) == EPX_FLOAT8_E5M2);
  CHECK(row_format(in_call).scaling == EPX_SCALING_MX);
  CHECK(row_format(in_call).dtype == EPX_FLOAT8_E5M2);
  CHECK(recv_scales_bytes(in_call, 5) == 32 * 8); // 1024 elements; 5 rows rounded up to a multiple of 4
  CHECK(row_format_text(in_call) == "fp8-e5m2-mx, quantised in the call, scales in columns");
  const Options on_wire = options_of_line("--wire-format fp4-nv");
  CHECK(recv_tokens_dtype(on_wire) == EPX_BFLOAT16);
  CHECK(recv_scales_bytes(on_wire, 5) == 0);
  CHECK(row_format_text(on_wire) == "fp4-nv on the wire alone");
  const Options before = options_of_line("--row-format fp4-nv --quantised-input --scale-layout tiles --alignment 256");
  CHECK(tokens_dtype(before) == EPX_FLOAT4_E2M1);
  CHECK(recv_scales_bytes(before, 129) == 2 * 16 * 512);
  CHECK(recv_scales_bytes(options_of_line("--row-format fp8-mx --scale-layout packed"), 5) == 8 * 8 * 4);
}

TEST_CASE("ep_bench options: of a repeated one the last counts") {
  const Options options =
      options_of_line("--tokens 7 --dtype fp8 --seed -1 --staged --tokens=9 --dtype fp16 --staged --seed 2 --routing hot:2 "
                      "--routing uniform --rank 5 --rank 0 --json a --json b");
  CHECK(options.tokens == 9);
  CHECK(options.dtype == EPX_FLOAT16);
  CHECK(options.seed == 2);
  CHECK(options.staged);
  CHECK(options.routing.kind == RoutingSpec::Kind::Uniform);
  CHECK(options.rank == 0);
  CHECK(options.json_file == "b");
}

TEST_CASE("ep_bench options: GPUs where the build has CUDA") {
  const std::vector<const char*> argv{"ep_bench", "--bootstrap", "file:/tmp", "--rank",  "0",      "--ranks",
                                      "1",        "--transport", "nccl",      "--graph", "--floor"};
  if (!built_with_cuda()) {
    CHECK(contains(refusal(argv), "built without CUDA"));
    return;
  }
  const Options options = options_of({"--transport", "nccl", "--graph", "--floor"});
  CHECK(options.transport == EPX_TRANSPORT_NCCL);
  CHECK(options.graph);
  CHECK(options.floor);
  CHECK_FALSE(options.native);
  if (built_with_moe()) {
    CHECK(options_of({"--transport", "nccl", "--graph", "--native"}).native);
    CHECK(contains(refusal_of([] {
                     options_of({"--transport", "nccl", "--native", "--layout", "rank-major"});
                   }),
                   "--native is given and --layout is 'rank-major'; the native way is expert-major"));
  } else
    CHECK(contains(refusal_of([] { options_of({"--transport", "nccl", "--native"}); }), "built without libepx_moe"));
  CHECK(options.fixed_rail_tokens == 0);
  CHECK(options_of({"--transport", "nccl", "--tokens", "7", "--fixed-rail-tokens", "7"}).fixed_rail_tokens == 7);
  CHECK(contains(refusal_of([] {
                   options_of({"--transport", "nccl", "--tokens", "7", "--fixed-rail-tokens", "8"});
                 }),
                 "--fixed-rail-tokens is 8; it must be between 0 and 7"));
}

TEST_CASE("ep_bench options: fixed sizes of rails belong to nccl") {
  CHECK(contains(refusal_of([] { options_of({"--fixed-rail-tokens", "8"}); }), "--fixed-rail-tokens is given"));
}

TEST_CASE("ep_bench knows which ranks share a machine") {
  const MachineName here = this_machine();
  CHECK(here == this_machine());
  CHECK(here[0] != '\0');
  MachineName elsewhere = here;
  elsewhere[0] = '?';
  CHECK(Machines(std::vector{here, here, here}, 1).is_one());
  const std::vector<MachineName> two{here, here, elsewhere};
  CHECK_FALSE(Machines(two, 0).is_one());
  CHECK(Machines(two, 0).num_ranks_here() == 2);
  CHECK(Machines(two, 2).num_ranks_here() == 1);
}

TEST_CASE("ep_bench options: help and version name what they should") {
  const std::string help = std::get<RequestedText>(parse({"--help"})).text;
  for (const char* part : {"--tokens",    "--routing",    "zipf:S",       "hot:F",      "text:FILE",
                           "--bootstrap", "file:DIR",     "--rank",       "--capacity", "--combine-precision",
                           "--staged",    "microseconds", "memcpy ratio", "--graph",    "--num-comm-sms",
                           "--floor",     "--native",     "native/epx",   "floor us",   "1e9 bytes",
                           "milliseconds"})
    CHECK_MESSAGE(contains(help, part), part);
  CHECK(contains(std::get<RequestedText>(parse({"--version"})).text, "ep_bench 0.2.0"));
}

TEST_CASE("ep_bench options: a bad one is refused with its name and value") {
  struct Case {
    std::vector<const char*> arguments;
    std::vector<const char*> words;
  };
  const std::vector<Case> cases{
      {{"--tokens", "-1"}, {"--tokens", "-1"}},
      {{"--tokens", "many"}, {"--tokens", "many"}},
      {{"--tokens", "99999999999"}, {"--tokens", "99999999999"}},
      {{"--tokens"}, {"--tokens"}},
      {{"--hidden", "0"}, {"--hidden", "0"}},
      {{"--experts", "0"}, {"--experts", "0"}},
      {{"--top-k", "0"}, {"--top-k", "0", "64"}},
      {{"--top-k", "65", "--experts", "128"}, {"--top-k", "65", "64"}},
      {{"--top-k", "4", "--experts", "3"}, {"--top-k", "4", "--experts", "3", "uniform"}},
      {{"--top-k", "4", "--experts", "3", "--routing", "zipf:1"}, {"--top-k", "--experts", "zipf:1"}},
      {{"--dtype", "fp8"}, {"--dtype", "fp8", "bf16"}},
      {{"--dtype", ""}, {"--dtype", "empty"}},
      {{"--tokens", ""}, {"--tokens", "empty"}},
      {{"--json", ""}, {"--json", "empty"}},
      {{"--routing", "random"}, {"--routing", "random"}},
      {{"--routing", "zipf"}, {"--routing", "zipf"}},
      {{"--routing", "zipf:"}, {"--routing", "zipf:"}},
      {{"--routing", "zipf:steep"}, {"--routing", "zipf:steep"}},
      {{"--routing", "zipf:1.5x"}, {"--routing", "zipf:1.5x"}},
      {{"--routing", "zipf:-1"}, {"--routing", "zipf:-1"}},
      {{"--routing", "zipf:nan"}, {"--routing", "zipf:nan"}},
      {{"--routing", "zipf:inf"}, {"--routing", "zipf:inf"}},
      {{"--routing", "text:"}, {"--routing", "text:"}},
      {{"--alignment", "-2"}, {"--alignment", "-2"}},
      {{"--zone-stride", "-2"}, {"--zone-stride", "-2"}},
      {{"--zone-stride", "16", "--layout", "rank-major"}, {"--zone-stride is 16", "no zones"}},
      {{"--pads", "dirty"}, {"--pads", "dirty", "untouched"}},
      {{"--row-format", "fp8"}, {"--row-format", "fp8", "fp8-block128", "fp4-nv"}},
      {{"--wire-format", "fp4"}, {"--wire-format", "fp4", "none", "fp8-e5m2-mx"}},
      {{"--scale-layout", "swizzled"}, {"--scale-layout", "swizzled", "packed", "tiles"}},
      {{"--row-format", "fp8-mx", "--wire-format", "fp4-nv"}, {"--row-format", "fp8-mx", "--wire-format", "fp4-nv"}},
      {{"--quantised-input"}, {"--quantised-input", "--row-format is 'none'"}},
      {{"--quantised-input", "--wire-format", "fp8-mx"}, {"--quantised-input", "belongs to --row-format"}},
      {{"--scale-layout", "columns", "--wire-format", "fp8-mx"}, {"--scale-layout", "columns", "belongs to --row-format"}},
      {{"--sum-format", "fp8"}, {"--sum-format", "fp8", "none", "fp8-e5m2-mx"}},
      {{"--sum-format", "fp4-nv"}, {"--sum-format is 'fp4-nv'", "fp8-block128, fp8-mx or fp8-e5m2-mx"}},
      {{"--sum-format", "fp8-block128-pow2"}, {"--sum-format is 'fp8-block128-pow2'", "fp8-block128, fp8-mx or"}},
      {{"--sum-format", "fp8-mx", "--combine-precision", "exact"},
       {"--sum-format", "fp8-mx", "--combine-precision", "exact"}},
      {{"--sum-format", "fp8-mx", "--combine-precision", "node"},
       {"--sum-format", "fp8-mx", "--combine-precision", "node"}},
      {{"--sum-format", "fp8-mx", "--block", "--dtype", "fp32"}, {"--sum-format is 'fp8-mx'", "--block is given"}},
      {{"--row-format", "fp4-nv", "--hidden", "33"}, {"fp4-nv", "--hidden is 33", "even"}},
      {{"--row-format", "fp4-nv", "--scale-layout", "packed"}, {"fp4-nv", "packed", "E8M0"}},
      {{"--row-format", "fp8-block128", "--scale-layout", "packed"}, {"fp8-block128", "packed", "E8M0"}},
      {{"--row-format", "fp8-block128", "--scale-layout", "tiles", "--alignment", "128"}, {"tiles", "one byte"}},
      {{"--row-format", "fp8-mx", "--scale-layout", "tiles"}, {"tiles", "--alignment is 0", "128"}},
      {{"--row-format", "fp8-mx", "--scale-layout", "tiles", "--alignment", "64"}, {"tiles", "--alignment is 64", "128"}},
      {{"--row-format", "fp8-mx", "--scale-layout", "tiles", "--layout", "rank-major"}, {"tiles", "rank-major"}},
      {{"--layout", "flat"}, {"--layout", "flat", "rank-major"}},
      {{"--max-rows", "8"}, {"--max-rows", "8", "expert-major"}},
      {{"--layout", "rank-major-compact", "--alignment", "2"}, {"--alignment", "2", "rank-major-compact"}},
      {{"--layout", "rank-major", "--max-rows", "-1"}, {"--max-rows", "-1"}},
      {{"--layout", "rank-major", "--alignment", "2"}, {"--alignment", "2", "rank-major"}},
      {{"--layout", "rank-major", "--pads", "untouched"}, {"--pads", "untouched", "rank-major"}},
      {{"--layout", "rank-major", "--capacity", "9"}, {"--capacity", "9", "rank-major"}},
      {{"--layout", "rank-major", "--combine-precision", "exact"}, {"--combine-precision", "exact", "rank-major"}},
      {{"--capacity", "-1"}, {"--capacity", "-1"}},
      {{"--capacity", "3000000000"}, {"--capacity", "3000000000"}},
      {{"--iters", "0"}, {"--iters", "0"}},
      {{"--warmup", "-1"}, {"--warmup", "-1"}},
      {{"--input-sets", "0"}, {"--input-sets", "0"}},
      {{"--seed", "x"}, {"--seed", "x"}},
      {{"--seed", "-1"}, {"--seed", "-1"}},
      {{"--seed", "18446744073709551616"}, {"--seed", "18446744073709551616"}},
      {{"--timeout-ms", "-5"}, {"--timeout-ms", "-5"}},
      {{"--transport", "gpu"}, {"--transport", "gpu", "host", "nccl"}},
      {{"--graph"}, {"--graph", "host", "nccl"}},
      {{"--floor"}, {"--floor", "host", "nccl"}},
      {{"--native"}, {"--native", "host", "nccl"}},
      {{"--num-comm-sms", "-1"}, {"--num-comm-sms", "-1"}},
      {{"--routing", "hot:"}, {"--routing", "hot:"}},
      {{"--routing", "hot:1.5"}, {"--routing", "hot:1.5"}},
      {{"--routing", "hot:-0.1"}, {"--routing", "hot:-0.1"}},
      {{"--routing", "hot:nan"}, {"--routing", "hot:nan"}},
      {{"--routing", "hot:0.3", "--top-k", "4", "--experts", "4"}, {"--top-k", "--experts", "hot:0.3"}},
      {{"--combine-precision", "fast"}, {"--combine-precision", "fast", "exact", "node"}},
      {{"--frobnicate"}, {"--frobnicate"}},
      {{"stray"}, {"stray"}},
      {{"--bootstrap", "file:"}, {"--bootstrap", "file:"}},
      {{"--bootstrap", "tcp:1"}, {"--bootstrap", "tcp:1"}},
      {{"--bootstrap", "file:/tmp"}, {"--ranks is not given"}},
      {{"--bootstrap", "file:/tmp", "--ranks", "2"}, {"--rank is not given", "between 0 and 1"}},
      {{"--bootstrap", "file:/tmp", "--ranks", "-1"}, {"--ranks is -1", "at least 1"}},
      {{"--tokens", "3000000000"}, {"--tokens", "3000000000", "whole number of at most 2147483647"}},
      {{"--capacity", "9999999999999999999"}, {"--capacity", "whole number of at most 9223372036854775807"}},
      {{"--top-k", "two"}, {"--top-k", "two", "whole number"}},
      {{"--bootstrap", "file:/tmp", "--ranks", "2", "--rank", "2"}, {"--rank", "2"}},
      {{"--bootstrap", "file:/tmp", "--ranks", "0", "--rank", "0"}, {"--ranks", "0"}},
      {{"--bootstrap", "mpi", "--rank", "3"}, {"--bootstrap"}},
      {{"--job-id", "a b"}, {"--job-id", "a b", "[A-Za-z0-9._-]"}},
      {{"--job-id", "a/../b"}, {"--job-id", "a/../b"}},
      {{"--job-id", ""}, {"--job-id", "empty", "1 to 64"}},
      {{"--job-id", "12345678901234567890123456789012345678901234567890123456789012345"}, {"--job-id", "1 to 64"}},
      {{"--tokens", "4", "--tokens", "-1"}, {"--tokens", "-1"}},
  };
  for (const Case& c : cases) {
    std::vector<const char*> argv{"ep_bench"};
    argv.insert(argv.end(), c.arguments.begin(), c.arguments.end());
    const bool has_bootstrap = std::ranges::any_of(c.arguments, [](std::string_view a) { return a == "--bootstrap"; });
    if (!has_bootstrap) argv.insert(argv.begin() + 1, {"--bootstrap", "file:/tmp", "--rank", "0", "--ranks", "1"});
    const std::string sentence = refusal(argv);
    CHECK(sentence != "accepted");
    for (const char* part : c.words)
      CHECK_MESSAGE(contains(sentence, part), sentence, " | lacks ", part);
  }
}

// A PretendPeer answers for two ranks; its fields hold what the second one reports.
struct PretendPeer {
  int32_t exit_code = 0;
  const char* message = "";

  epx_bootstrap bootstrap(int rank) {
    epx_bootstrap result{};
    result.struct_size = sizeof(result);
    result.rank = rank;
    result.num_ranks = 2;
    result.context = this;
    result.all_gather = [](void* context, const void* send, void* recv, size_t bytes, int64_t, char*, size_t) {
      const auto* self = static_cast<const PretendPeer*>(context);
      auto* all = static_cast<char*>(recv);
      std::memcpy(all, send, bytes);
      std::memset(all + bytes, 0, bytes);
      if (bytes == sizeof(exit_code)) std::memcpy(all + bytes, &self->exit_code, bytes);
      if (bytes == EPX_MAX_MESSAGE_BYTES) std::memcpy(all + bytes, self->message, std::strlen(self->message));
      return EPX_SUCCESS;
    };
    return result;
  }
};

TEST_CASE("ep_bench peers fail together") {
  PretendPeer well, sick{kExitFailure, "no space"}, same{kExitUsage, "no words"};
  CHECK_NOTHROW(Peers(well.bootstrap(0), 1).together([] {}));
  const auto agreed = [](PretendPeer& peer, auto action) {
    try {
      Peers(peer.bootstrap(0), 1).together(action);
    } catch (const AgreedError& error) {
      return std::pair<int, std::string>(error.exit_code(), error.what());
    }
    return std::pair<int, std::string>(0, "");
  };
  CHECK(agreed(sick, [] {}) == std::pair<int, std::string>(1, "rank 1: no space"));
  CHECK(agreed(same, [] { throw UsageError("no words"); }) == std::pair<int, std::string>(2, "no words"));
  CHECK(agreed(well, [] { throw std::bad_alloc(); }) == std::pair<int, std::string>(1, "rank 0: out of memory"));
  CHECK(agreed(sick, [] { throw RuntimeError("no time"); }) ==
        std::pair<int, std::string>(1, "rank 0: no time\nrank 1: no space"));
}

} // namespace
} // namespace epx::bench
