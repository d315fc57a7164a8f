// SPDX-License-Identifier: Apache-2.0
// These tests check the inputs of ep_bench: random numbers, routing, tensors, files, memory.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/ep_bench_support.h"
#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/json_file.h"
#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/memory_need.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/workload/random.h"
#include "tools/ep_bench/workload/routing.h"
#include "tools/ep_bench/workload/text_file.h"
#include "tools/ep_bench/workload/workload.h"

namespace epx::bench {
namespace {

TEST_CASE("ep_bench random numbers are SplitMix64's") {
  // The first outputs of the generator seeded with 0 (Steele et al., and java.util.SplittableRandom).
  CHECK(mix64(0x9e3779b97f4a7c15u) == 0xe220a8397b1dcdafu);
  CHECK(mix64(2 * 0x9e3779b97f4a7c15u) == 0x6e789e6aa1b965f4u);
  const RandomStream stream{1, 2};
  CHECK(stream.at(5) == RandomStream{1, 2}.at(5));
  CHECK(stream.at(5) != stream.at(6));
  CHECK(stream.at(5) != RandomStream{2, 1}.at(5));
  for (uint64_t i = 0; i < 1000; ++i) {
    CHECK(stream.below(i, 7) < 7);
    CHECK(stream.below(i, 1) == 0);
    CHECK(stream.unit(i) >= 0);
    CHECK(stream.unit(i) < 1);
  }
}

bool rows_are_distinct(const std::vector<int64_t>& topk_idx, int top_k, int experts) {
  for (auto row = topk_idx.begin(); row != topk_idx.end(); row += top_k) {
    const std::set<int64_t> distinct(row, row + top_k);
    if (static_cast<int>(distinct.size()) != top_k || *distinct.begin() < 0 || *distinct.rbegin() >= experts) return false;
  }
  return true;
}

TEST_CASE("ep_bench uniform routing: distinct experts, each as likely in every place") {
  const RoutingShape shape{.tokens = 20000, .experts = 8, .top_k = 3, .seed = 7};
  const std::vector<int64_t> topk_idx = uniform_routing(shape, 1, 2);
  REQUIRE(topk_idx.size() == 60000);
  CHECK(rows_are_distinct(topk_idx, 3, 8));
  std::array<std::array<int, 8>, 3> counts{};
  for (size_t i = 0; i < topk_idx.size(); ++i)
    ++counts[i % 3][topk_idx[i]];
  for (const auto& place : counts)
    for (int count : place)
      CHECK(std::abs(count - 2500) < 250); // five standard deviations of a binomial are 234

  CHECK(topk_idx == uniform_routing(shape, 1, 2));
  CHECK(topk_idx != uniform_routing(shape, 1, 3));
  CHECK(topk_idx != uniform_routing(shape, 2, 2));
  RoutingShape other = shape;
  other.seed = 8;
  CHECK(topk_idx != uniform_routing(other, 1, 2));
  CHECK(rows_are_distinct(uniform_routing({.tokens = 50, .experts = 64, .top_k = 64, .seed = 1}, 0, 0), 64, 64));
  CHECK(uniform_routing({.tokens = 0, .experts = 4, .top_k = 2, .seed = 1}, 0, 0).empty());
}

TEST_CASE("ep_bench zipf routing: first draws by weight, no expert twice") {
  const RoutingShape shape{.tokens = 40000, .experts = 10, .top_k = 4, .seed = 3};
  const std::vector<int32_t> order = zipf_order(shape.seed, shape.experts);
  CHECK(std::set<int32_t>(order.begin(), order.end()).size() == 10);
  for (double exponent : {0.0, 1.0, 2.5}) {
    const std::vector<int64_t> topk_idx = zipf_routing(shape, exponent, 0, 1);
    CHECK(rows_are_distinct(topk_idx, 4, 10));
    double total = 0;
    for (int n = 1; n <= 10; ++n)
      total += std::pow(n, -exponent);
    std::array<int, 10> first_draws{};
    for (size_t i = 0; i < topk_idx.size(); i += 4)
      ++first_draws[topk_idx[i]];
    for (int n = 0; n < 10; ++n) {
      const double expected = 40000 * std::pow(n + 1, -exponent) / total;
      CHECK(std::abs(first_draws[order[n]] - expected) < 5 * std::sqrt(expected) + 5);
    }
    CHECK(topk_idx == zipf_routing(shape, exponent, 0, 1));
    CHECK(topk_idx != zipf_routing(shape, exponent, 0, 0));
  }
  // The distribution is so steep that nearly all weights vanish in double precision.
  CHECK(rows_are_distinct(zipf_routing({.tokens = 20, .experts = 300, .top_k = 64, .seed = 1}, 900, 0, 0), 64, 300));
  CHECK(zipf_order(1, 100) != zipf_order(2, 100));
}

TEST_CASE("ep_bench hot routing: one expert on a fraction of the tokens, the others uniform and distinct") {
  const RoutingShape shape{.tokens = 20000, .experts = 8, .top_k = 3, .seed = 7};
  const int32_t hot = hot_expert(shape.seed, shape.experts);
  for (double fraction : {0.0, 0.3, 1.0}) {
    const std::vector<int64_t> topk_idx = hot_routing(shape, fraction, 1, 2);
    REQUIRE(topk_idx.size() == 60000);
    CHECK(rows_are_distinct(topk_idx, 3, 8));
    std::array<int, 8> counts{};
    for (int64_t expert : topk_idx)
      ++counts[expert];
    CHECK(std::abs(counts[hot] - 20000 * fraction) <= (fraction == 0.3 ? 325 : 0)); // five standard deviations
    for (int expert = 0; expert < 8; ++expert)
      if (expert != hot) CHECK(std::abs(counts[expert] - (60000 - 20000 * fraction) / 7) < 400);
    CHECK(topk_idx == hot_routing(shape, fraction, 1, 2));
    CHECK(topk_idx != hot_routing(shape, fraction, 1, 3));
  }
  CHECK(rows_are_distinct(hot_routing({.tokens = 50, .experts = 3, .top_k = 2, .seed = 1}, 0.5, 0, 0), 2, 3));
  CHECK(hot_routing({.tokens = 4, .experts = 2, .top_k = 1, .seed = 1}, 1, 0, 0) ==
        std::vector<int64_t>(4, hot_expert(1, 2)));
}

TEST_CASE("ep_bench text routing: a word's experts are hashes of the word") {
  const std::vector<std::string> words{"the", "quick", "brown", "the"};
  const RoutingShape shape{.tokens = 3, .experts = 16, .top_k = 2, .seed = 9};
  const std::vector<int64_t> first = text_routing(shape, words, 0, 0, 2);  // the quick brown
  const std::vector<int64_t> second = text_routing(shape, words, 0, 1, 2); // the the quick
  const std::vector<int64_t> later = text_routing(shape, words, 1, 0, 2);  // brown the the
  for (int k = 0; k < 2; ++k) {
    CHECK(first[0 + k] == hash_expert("the", 9, k, 16));
    CHECK(first[2 + k] == hash_expert("quick", 9, k, 16));
    CHECK(first[4 + k] == hash_expert("brown", 9, k, 16));
    CHECK(second[0 + k] == hash_expert("the", 9, k, 16));
    CHECK(second[2 + k] == hash_expert("the", 9, k, 16));
    CHECK(second[4 + k] == hash_expert("quick", 9, k, 16));
    CHECK(later[0 + k] == hash_expert("brown", 9, k, 16));
    CHECK(later[2 + k] == hash_expert("the", 9, k, 16));
  }

  // Hashes of different k, words and seeds behave as independent ones: two agree once in 16 times.
  int same_k = 0, same_seed = 0, same_word = 0, expert_of[16] = {};
  for (int i = 0; i < 16000; ++i) {
    const std::string word = "word" + std::to_string(i);
    const int32_t expert = hash_expert(word, 1, 0, 16);
    same_k += expert == hash_expert(word, 1, 1, 16);
    same_seed += expert == hash_expert(word, 2, 0, 16);
    same_word += expert == hash_expert(word + "s", 1, 0, 16);
    ++expert_of[expert];
  }
  for (int same : {same_k, same_seed, same_word})
    CHECK(std::abs(same - 1000) < 160);
  for (int count : expert_of)
    CHECK(std::abs(count - 1000) < 160);
}

TEST_CASE("ep_bench text files") {
  const TemporaryFile text("  the quick\n\tbrown\r\nfox  \n");
  CHECK(read_words(text.name()) == std::vector<std::string>{"the", "quick", "brown", "fox"});
  for (const char* empty : {"", " \n\t "}) {
    const TemporaryFile file(empty);
    CHECK_THROWS_AS(read_words(file.name()), UsageError);
  }
  CHECK_THROWS_AS(read_words("/tmp"), UsageError);
  try {
    read_words("/nonexistent/words");
    FAIL("a file that does not exist was read");
  } catch (const UsageError& error) {
    CHECK(contains(error.what(), "/nonexistent/words"));
    CHECK(contains(error.what(), "No such file"));
  }
}

TEST_CASE("ep_bench text files: a file that is not regular or is too large is refused without waiting") {
  CHECK(contains(refusal_of([] { read_words("/dev/zero"); }), "'/dev/zero' of --routing text: it is a device"));
  const TemporaryFile file("");
  CHECK(::truncate(file.name(), kMaxTextBytes + 1) == 0);
  CHECK(contains(refusal_of([&] { read_words(file.name()); }),
                 "it has 67108865 bytes or more; at most 67108864 are allowed"));
  CHECK(::truncate(file.name(), kMaxTextBytes) == 0);
  CHECK(read_words(file.name()).size() == 1); // zeros are no space
  CHECK(std::remove(file.name()) == 0);
  CHECK(::mkfifo(file.name(), 0600) == 0);
  CHECK(contains(refusal_of([&] { read_words(file.name()); }), "fifo"));
  CHECK(read_words("/proc/self/status")[0] == "Name:"); // its size is 0
}

TEST_CASE("ep_bench memory: what a shape needs is reported before it is allocated") {
  // 3 sets of 10 tokens, and 100 receive rows of 64 bytes.
  const Options options =
      options_of({"--tokens", "10", "--hidden", "32", "--input-sets", "3", "--top-k", "2", "--capacity", "50"});
  epx_memory_plan plan{};
  plan.struct_size = sizeof(plan);
  const epx_group_config config = group_config(options);
  REQUIRE(epx_group_memory_plan(&config, 2, &plan) == EPX_SUCCESS);
  const MemoryNeed need = memory_need(options, 2, 100);
  CHECK(need.inputs == 3 * 10 * (2 * 64 + 2 * 12) + 3 * 100 * (2 * 64 + 4));
  CHECK(need.tensors == 10 * (2 * 64 + 2 * 8) + 100 * (4 * 64 + 12) + 50 * 12);
  CHECK(need.group == static_cast<double>(plan.window_bytes + plan.scratch_bytes + plan.handle_mem_bytes));
  CHECK_NOTHROW(require_memory(options, 2, 100, need.all()));
  const std::string sentence = refusal_of([&] { require_memory(options, 2, 100, need.all() - 1); });
  for (const char* part : {"--tokens 10", "--hidden 32", "--dtype bf16", "--top-k 2", "--experts 32", "--capacity 50",
                           "--input-sets 3", "bytes of memory per rank", "each of 2 ranks"})
    CHECK_MESSAGE(contains(sentence, part), sentence, " | lacks ", part);

  Options quantised = options; // rows of 32 + 4 bytes arrive
  quantised.row_format = NamedFormat::Fp8Block128;
  CHECK(memory_need(quantised, 2, 100).inputs == need.inputs);
  CHECK(memory_need(quantised, 2, 100).tensors == need.tensors - 100 * (64 - 36));
  quantised.has_quantised_input = true;
  CHECK(memory_need(quantised, 2, 100).inputs == need.inputs - 3 * 10 * (64 - 36));

  CHECK(contains(refusal_of([] {
                   require_memory(options_of({"--hidden", "2147483647"}), 4, 0, available_memory(4));
                 }),
                 "--hidden 2147483647"));
  CHECK(contains(refusal_of([] { memory_need(options_of({"--tokens", "2147483647"}), 4, 0); }), "2147483647"));
  CHECK(available_memory(2) <= available_memory(1));
}

TEST_CASE("ep_bench --json: found writable before, written after") {
  CHECK(contains(refusal_of([] { const JsonFile json("/nonexistent/out.json"); }),
                 "'/nonexistent/out.json' of --json: No such file"));
  CHECK(contains(refusal_of([] { const JsonFile json("/tmp"); }), "/tmp"));
  const auto content_of = [](const char* name) {
    std::ifstream in(name);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const TemporaryFile file("of an earlier run, and longer");
  { const JsonFile unwritten(file.name()); }
  CHECK(content_of(file.name()) == "of an earlier run, and longer");
  JsonFile(file.name()).write({{"a", 1}});
  CHECK(content_of(file.name()) == "{\n  \"a\": 1\n}\n");
  CHECK_NOTHROW(JsonFile("/dev/null").write({{"a", 1}}));
  CHECK_THROWS_AS(JsonFile("/dev/full").write({{"a", 1}}), RuntimeError);

  CHECK(std::remove(file.name()) == 0);
  { const JsonFile unwritten(file.name()); }
  CHECK(::access(file.name(), F_OK) != 0); // it was not there before
  JsonFile(file.name()).write(7);
  CHECK(content_of(file.name()) == "7\n");
  CHECK(std::remove(file.name()) == 0);
  CHECK(::mkfifo(file.name(), 0600) == 0);
  CHECK(contains(refusal_of([&] { const JsonFile json(file.name()); }), "of --json")); // no process reads the fifo
}

// Values of a row-major tensor whose magnitudes must be in [1/8, 2).
template <typename Bits>
bool tame(const std::vector<std::byte>& bytes, Bits magnitude_mask, Bits eighth, Bits two) {
  for (size_t i = 0; i < bytes.size(); i += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, bytes.data() + i, sizeof(bits));
    const Bits magnitude = bits & magnitude_mask;
    if (magnitude < eighth || magnitude >= two) return false;
  }
  return true;
}

TEST_CASE("ep_bench workload: a function of seed, set and rank") {
  const Options options = options_of({"--tokens", "40", "--hidden", "33"});
  const Workload workload(options, 4);
  const TokenInputs inputs = workload.token_inputs(1, 2);
  CHECK(inputs.tokens.size() == 40 * 66);
  CHECK(inputs.grad_out.size() == 40 * 66);
  CHECK(inputs.topk_idx.size() == 160);
  CHECK(inputs.topk_weights.size() == 160);
  CHECK(inputs.tokens != inputs.grad_out);
  CHECK(inputs.tokens == Workload(options, 4).token_inputs(1, 2).tokens);
  CHECK(inputs.tokens != workload.token_inputs(1, 3).tokens);
  CHECK(inputs.tokens != workload.token_inputs(0, 2).tokens);
  CHECK(inputs.topk_weights != workload.token_inputs(0, 2).topk_weights);
  for (float weight : inputs.topk_weights) {
    CHECK(weight >= 0);
    CHECK(weight < 1);
  }
  CHECK(tame<uint16_t>(inputs.tokens, 0x7fff, 0x3e00, 0x4000));

  const RowInputs rows = workload.row_inputs(0, 1, 20), more = workload.row_inputs(0, 1, 25);
  CHECK(rows.expert_out != rows.grad_recv);
  CHECK(std::equal(rows.expert_out.begin(), rows.expert_out.end(), more.expert_out.begin()));
  CHECK(more.grad_recv_weights.size() == 25);

  const TokenInputs fp32 = Workload(options_of({"--dtype", "fp32"}), 1).token_inputs(0, 0);
  CHECK(fp32.tokens.size() == 512 * 1024 * 4);
  CHECK(tame<uint32_t>(fp32.tokens, 0x7fffffff, 0x3e000000, 0x40000000));
  const TokenInputs fp16 = Workload(options_of({"--dtype", "fp16"}), 1).token_inputs(0, 0);
  CHECK(tame<uint16_t>(fp16.tokens, 0x7fff, 0x3000, 0x4000));
}

TEST_CASE("ep_bench workload: rows that come quantised have bytes and scales") {
  const Options options = options_of({"--tokens", "40", "--hidden", "34", "--row-format", "fp4-nv", "--quantised-input"});
  const TokenInputs inputs = Workload(options, 4).token_inputs(1, 2);
  CHECK(inputs.tokens.size() == 40 * 17);
  CHECK(inputs.scales.size() == 40 * 3);
  CHECK(inputs.row_scales.size() == 40);
  CHECK(inputs.grad_out.size() == 40 * 68);
  CHECK(inputs.tokens != Workload(options, 4).token_inputs(1, 3).tokens);
  CHECK(inputs.scales != Workload(options, 4).token_inputs(1, 3).scales);
  CHECK(inputs.scales == Workload(options, 4).token_inputs(1, 2).scales);
  const TokenInputs fp8 =
      Workload(options_of({"--tokens", "3", "--hidden", "130", "--row-format", "fp8-block128", "--quantised-input"}), 1)
          .token_inputs(0, 0);
  CHECK(fp8.tokens.size() == 3 * 130);
  CHECK(fp8.scales.size() == 3 * 2 * 4);
  CHECK(fp8.row_scales.empty());
  // Rows that the call quantises are those of the same seed without a format.
  CHECK(Workload(options_of({"--row-format", "fp8-mx"}), 1).token_inputs(0, 0).tokens ==
        Workload(options_of({}), 1).token_inputs(0, 0).tokens);
}

TEST_CASE("ep_bench workload: the routing that the options name") {
  const TemporaryFile text("a b c d e");
  const std::string routing = std::string("text:") + text.name();
  const Options options = options_of({"--tokens", "2", "--top-k", "1", "--routing", routing.c_str()});
  CHECK(Workload(options, 2).topk_idx(1, 0) ==
        std::vector<int64_t>{hash_expert("e", 1, 0, 32), hash_expert("a", 1, 0, 32)}); // words 4 and 5
  const RoutingShape shape{.tokens = 512, .experts = 32, .top_k = 4, .seed = 1};
  CHECK(Workload(options_of({"--routing", "zipf:1.1"}), 2).topk_idx(0, 1) == zipf_routing(shape, 1.1, 0, 1));
  CHECK(Workload(options_of({"--routing", "hot:0.4"}), 2).topk_idx(0, 1) == hot_routing(shape, 0.4, 0, 1));
  CHECK(Workload(options_of({}), 2).topk_idx(0, 1) == uniform_routing(shape, 0, 1));
  CHECK_THROWS_AS(Workload(options_of({"--routing", "text:/nonexistent"}), 1), UsageError);
}

} // namespace
} // namespace epx::bench
