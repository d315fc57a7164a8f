// SPDX-License-Identifier: Apache-2.0
// The tests' own tools must detect what they check for, and never hang.
#include <doctest/doctest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

#include <unistd.h>

#include "epx/epx.hpp"
#include "tests/support/call_buffers.h"
#include "tests/support/case.h"
#include "tests/support/check.h"
#include "tests/support/compare.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"
#include "tests/support/system_state.h"
#include "tests/support/values.h"
#include "tests/support/workload.h"

namespace epx::test {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

template <typename Fn>
std::string failure_of(Fn&& fn) {
  try {
    fn();
  } catch (const CheckFailure& failure) {
    return failure.what();
  }
  return "";
}

} // namespace

TEST_CASE("check throws with its message, and counts") {
  const int64_t before = num_checks();
  CHECK(failure_of([] { check(true, "no"); }).empty());
  CHECK(failure_of([] { check(1 > 2, "{} is not more than {}", 1, 2); }) == "1 is not more than 2");
  CHECK(num_checks() == before + 2);
}

TEST_CASE("a call of epx that fails is described by its name, its status and its sentence") {
  std::string failure;
  try {
    run_threads(2, [](int rank) {
      if (rank == 1) GroupView().prepare({});
    });
  } catch (const CheckFailure& threads) {
    failure = threads.what();
  }
  CHECK(failure == "rank 1: epx_prepare returned EPX_ERROR_INVALID_ARGUMENT: epx_prepare: group is NULL");
}

TEST_CASE("rows are compared bit for bit, or with all NaNs alike") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  reference::Matrix rows{EPX_FLOAT32, 1, 3, std::vector<std::byte>(12)};
  const float values[] = {0.0F, nan, 1.0F};
  std::memcpy(rows.bytes.data(), values, sizeof(values));
  std::vector<std::byte> actual = rows.bytes;
  CHECK(failure_of([&] { check_rows("rows", rows, actual, NanRule::bits); }).empty());
  actual[4] ^= std::byte{1}; // another payload
  CHECK(failure_of([&] { check_rows("rows", rows, actual, NanRule::any_nan); }).empty());
  CHECK(contains(failure_of([&] { check_rows("rows", rows, actual, NanRule::bits); }), "rows[0, 1]"));
  actual[3] ^= std::byte{0x80}; // -0
  CHECK(contains(failure_of([&] { check_rows("rows", rows, actual, NanRule::any_nan); }), "(1 of 3 elements are wrong)"));
  actual.pop_back();
  CHECK_FALSE(failure_of([&] { check_rows("rows", rows, actual, NanRule::any_nan); }).empty());
}

TEST_CASE("integers are compared in both widths") {
  const std::vector<int64_t> expected = {-1, 5};
  const int32_t narrow[] = {-1, 5};
  const int64_t wide[] = {-1, 5 + (int64_t{1} << 32)};
  CHECK(failure_of([&] { check_integers("x", expected, std::as_bytes(std::span(narrow)), EPX_INT32); }).empty());
  CHECK(contains(failure_of([&] { check_integers("x", expected, std::as_bytes(std::span(wide)), EPX_INT64); }), "x[1]"));
}

TEST_CASE("a write outside of an output, or into an input, is noticed") {
  const auto device = make_device("host", 0, 1);
  std::vector<std::byte> arena_memory(1 << 12);
  std::vector<Arena> arenas = {{arena_memory.data(), arena_memory.size(), 0}};
  Rng rng(1);
  for (const auto placement : {Placement::plain, Placement::in_place}) {
    CallBuffers buffers(*device, arenas, placement, rng);
    const std::vector<std::byte> contents(24, std::byte{1});
    auto* input = static_cast<std::byte*>(buffers.input("in", contents, 4));
    auto* output = static_cast<std::byte*>(buffers.output("out", 24, 4));
    const bool in_arena = input >= arena_memory.data() && input < arena_memory.data() + arena_memory.size();
    CHECK(in_arena == (placement == Placement::in_place));
    CHECK(buffers.read_output(0) == std::vector<std::byte>(24, kScribble));
    std::memset(output, 0, 24);
    CHECK(failure_of([&] { buffers.check_surroundings(); }).empty());
    for (std::byte* target : {output - 1, output + 24, input, input + 23}) {
      *target ^= std::byte{1};
      CHECK_FALSE(failure_of([&] { buffers.check_surroundings(); }).empty());
      *target ^= std::byte{1};
    }
  }
}

TEST_CASE("a seed makes the same case and the same data again") {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const Case c = random_case(seed);
    REQUIRE(describe(c) == describe(random_case(seed)));
    const Workload first = make_workload(c.group, c.layer, seed);
    const Workload second = make_workload(c.group, c.layer, seed);
    REQUIRE(first.dispatch.recv_tokens.size() == static_cast<size_t>(c.group.num_ranks));
    for (size_t rank = 0; rank < first.dispatch.recv_tokens.size(); ++rank) {
      REQUIRE(first.dispatch.recv_tokens[rank].bytes == second.dispatch.recv_tokens[rank].bytes);
      REQUIRE(first.combine.out[rank].bytes == second.combine.out[rank].bytes);
    }
  }
  CHECK(describe(random_case(1)) != describe(random_case(2)));
}

TEST_CASE("threads: all run, and each failure is reported with its rank") {
  std::vector<int> seen(5);
  run_threads(5, [&](int rank) { seen[static_cast<size_t>(rank)] = rank + 1; });
  CHECK(seen == std::vector<int>{1, 2, 3, 4, 5});
  const std::string message = failure_of([] {
    run_threads(3, [](int rank) {
      if (rank > 0) throw std::runtime_error("broke");
    });
  });
  CHECK(contains(message, "rank 1: broke"));
  CHECK(contains(message, "rank 2: broke"));
  CHECK_FALSE(contains(message, "rank 0"));
}

TEST_CASE("processes: exits, signals, failures and output are reported, and the time limit holds") {
  const auto begin = Clock::now();
  const std::vector<ProcessResult> results = run_processes(4, 2s, [](int rank) {
    std::fprintf(stderr, "here is %d\n", rank);
    if (rank == 1) throw std::runtime_error("broke");
    if (rank == 2) std::raise(SIGKILL);
    if (rank == 3) std::this_thread::sleep_for(60s);
  });
  CHECK(Clock::now() - begin < 20s);
  REQUIRE(results.size() == 4);
  CHECK(results[0].succeeded());
  CHECK(contains(results[0].output, "here is 0"));
  CHECK(results[1].exit_code == 1);
  CHECK(contains(results[1].output, "broke"));
  CHECK(results[2].signal == SIGKILL);
  CHECK_FALSE(results[2].stopped);
  CHECK(results[3].stopped);
  CHECK_FALSE(failure_of([&] { check_all_succeeded(results); }).empty());
}

TEST_CASE("processes that ignore SIGTERM are ended too") {
  const auto begin = Clock::now();
  const std::vector<ProcessResult> results = run_processes(1, 200ms, [](int) {
    std::signal(SIGTERM, SIG_IGN);
    std::this_thread::sleep_for(60s);
  });
  CHECK(Clock::now() - begin < 20s);
  CHECK(results.at(0).signal == SIGKILL);
}

TEST_CASE("a local rendezvous gathers in rank order and names missing ranks") {
  LocalRendezvous rendezvous(3);
  run_threads(3, [&](int rank) {
    const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
    for (int round = 0; round < 5; ++round) {
      const int mine = 10 * round + rank;
      int all[3] = {};
      char message[64] = "";
      check_ok(bootstrap.all_gather(bootstrap.context, &mine, all, sizeof(mine), 10'000, message, sizeof(message)),
               "gather");
      for (int peer = 0; peer < 3; ++peer)
        check_equal(all[peer], 10 * round + peer, "gathered value");
    }
  });
  const epx_bootstrap alone = rendezvous.bootstrap(1);
  int mine = 0;
  int all[3] = {};
  char message[64] = "";
  CHECK(alone.all_gather(alone.context, &mine, all, sizeof(mine), 50, message, sizeof(message)) == EPX_ERROR_TIMEOUT);
  CHECK(std::string(message) == "missing ranks: 0 2");
}

TEST_CASE("leftovers in /dev/shm are seen") {
  const SharedMemoryWatch watch;
  const std::string name = "epx-support-test-" + std::to_string(::getpid());
  const std::string path = "/dev/shm/" + name;
  std::FILE* file = std::fopen(path.c_str(), "w");
  REQUIRE(file != nullptr);
  std::fclose(file);
  CHECK(watch.leftovers(100ms).contains(name));
  ::unlink(path.c_str());
  CHECK_FALSE(watch.leftovers(100ms).contains(name));
}

TEST_CASE("a failure has the text of a const char *, and not its address") {
  const char* text = "the other rank never came";
  CHECK(doctest::toString(text) == text);
  text = nullptr;
  CHECK(doctest::toString(text) == "NULL");
}

} // namespace epx::test
