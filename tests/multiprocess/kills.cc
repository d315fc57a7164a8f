// SPDX-License-Identifier: Apache-2.0
// Ranks are killed, or interrupted by Ctrl-C, while a group is created, and nothing of it may stay in /dev/shm. Each test runs
// twice, with windows in nameless memory, and where ranks cannot share that and use named memory.
#include <doctest/doctest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <fmt/ranges.h>
#include <sys/wait.h>
#include <unistd.h>

#include "epx/epx.h"
#include "tests/support/case.h"
#include "tests/support/check.h"
#include "tests/support/run_ranks.h"
#include "tests/support/system_state.h"

namespace epx::test {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kRendezvousMs = 30'000;
constexpr auto kTimeLimit = 60s;

enum class Memory { nameless, named };

// With Memory::named this process cannot share nameless memory from then on.
void choose(Memory memory) {
  if (memory == Memory::named) hide_from_proc();
}

epx_group_config config_of(int num_ranks, int64_t timeout_ms, int max_tokens) {
  GroupCase shape;
  shape.num_ranks = num_ranks;
  shape.max_tokens = max_tokens;
  shape.hidden_dim = 256;
  shape.timeout_ms = timeout_ms;
  return make_config(shape);
}

void check_nothing_left(const SharedMemoryWatch& watch) {
  const std::set<std::string> left = watch.leftovers();
  check(left.empty(), "left in /dev/shm: {}", fmt::join(left, ", "));
}

// Runs another job of this user, which removes what dead ones have left.
void run_good_job(Memory memory) {
  const TempDirectory directory;
  check_all_succeeded(run_processes(2, kTimeLimit, [&](int rank) {
    choose(memory);
    epx_bootstrap bootstrap{};
    check_ok(epx_bootstrap_file(directory.path().c_str(), "good", rank, 2, kRendezvousMs, &bootstrap),
             "epx_bootstrap_file");
    const epx_group_config config = config_of(2, kRendezvousMs, 4);
    epx_group group = nullptr;
    check_ok(epx_group_create(&bootstrap, &config, &group), "epx_group_create");
    epx_group_destroy(group);
    epx_bootstrap_free(&bootstrap);
  }));
}

// ---- Aimed kills ----

// A bootstrap that kills its process at one of its all-gathers, before or after it.
struct AimedBootstrap {
  epx_bootstrap inner{};
  int fatal_gather = 0; // counts from 1
  bool before = false;
  int num_gathers = 0;

  epx_bootstrap outer() {
    epx_bootstrap bootstrap = inner;
    bootstrap.context = this;
    bootstrap.all_gather = [](void* context, const void* send, void* recv, size_t bytes, int64_t timeout_ms, char* message,
                              size_t message_bytes) {
      AimedBootstrap& self = *static_cast<AimedBootstrap*>(context);
      ++self.num_gathers;
      const bool fatal = self.num_gathers == self.fatal_gather;
      if (fatal && self.before) std::raise(SIGKILL);
      const epx_status status =
          self.inner.all_gather(self.inner.context, send, recv, bytes, timeout_ms, message, message_bytes);
      if (fatal) std::raise(SIGKILL);
      return status;
    };
    return bootstrap;
  }
};

struct Aim {
  int gather;
  bool before;
  bool all; // true: kills the whole job; false: one rank
};

// The surviving ranks must exit normally, whether their group was created or not.
void run_aimed(Memory memory, const Aim& aim) {
  constexpr int kRanks = 3;
  constexpr int kVictim = 1;
  const TempDirectory directory;
  const std::vector<ProcessResult> results = run_processes(kRanks, kTimeLimit, [&](int rank) {
    choose(memory);
    AimedBootstrap aimed;
    check_ok(epx_bootstrap_file(directory.path().c_str(), "aimed", rank, kRanks, kRendezvousMs, &aimed.inner),
             "rendezvous");
    if (aim.all || rank == kVictim) {
      aimed.fatal_gather = aim.gather;
      aimed.before = aim.before;
    }
    const epx_bootstrap bootstrap = aimed.outer();
    const epx_group_config config = config_of(kRanks, 3000, 16);
    epx_group group = nullptr;
    epx_group_create(&bootstrap, &config, &group);
    epx_group_destroy(group);
    epx_bootstrap_free(&aimed.inner);
  });
  for (const ProcessResult& result : results) {
    const bool killed = aim.all || result.rank == kVictim;
    check(killed ? result.signal == SIGKILL && !result.stopped : result.succeeded(), "{}", result.describe());
  }
}

// Returns how many all-gathers the creation of a group takes.
int gathers_of(Memory memory) {
  return memory == Memory::nameless ? 5 : 7;
}

void check_aimed_kills(Memory memory) {
  for (int gather = 1; gather <= gathers_of(memory); ++gather) {
    for (const bool before : {true, false}) {
      for (const bool all : {true, false}) {
        const SharedMemoryWatch watch;
        run_aimed(memory, {gather, before, all});
        // Only the next job removes the names of a job all of whose ranks are dead.
        if (memory == Memory::named && all) run_good_job(memory);
        try {
          check_nothing_left(watch);
        } catch (const CheckFailure& failure) {
          fail_check("{} killed {} all-gather {}: {}", all ? "all ranks" : "a rank", before ? "before" : "after", gather,
                     failure.what());
        }
      }
    }
  }
}

TEST_CASE("kills aimed at each step of creating a group leave nothing, in nameless memory") {
  CHECK_NOTHROW(check_aimed_kills(Memory::nameless));
}

TEST_CASE("kills aimed at each step of creating a group leave nothing after the next start, with names") {
  CHECK_NOTHROW(check_aimed_kills(Memory::named));
}

// ---- Random kills ----

pid_t start_creating(const std::string& directory, const std::string& job, int rank, int num_ranks, Memory memory) {
  std::fflush(nullptr);
  sigset_t interrupt, before; // a child has doctest's handler until it resets it
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  sigprocmask(SIG_BLOCK, &interrupt, &before);
  const pid_t child = ::fork();
  if (child == 0) std::signal(SIGINT, SIG_DFL);
  sigprocmask(SIG_SETMASK, &before, nullptr);
  if (child != 0) return child;
  if (std::freopen("/dev/null", "w", stderr) == nullptr) ::_exit(1); // the library reports there that peers have died
  choose(memory);
  while (true) { // creates groups of some megabytes, one after the other
    epx_bootstrap bootstrap{};
    if (epx_bootstrap_file(directory.c_str(), job.c_str(), rank, num_ranks, kRendezvousMs, &bootstrap) != EPX_SUCCESS)
      ::_exit(1);
    const epx_group_config config = config_of(num_ranks, kRendezvousMs, 256);
    epx_group group = nullptr;
    if (epx_group_create(&bootstrap, &config, &group) != EPX_SUCCESS) ::_exit(1);
    epx_group_destroy(group);
    epx_bootstrap_free(&bootstrap);
  }
}

struct RandomKills {
  Memory memory;
  int signal;
  bool together; // true: kills all ranks at the same time; false: each rank at a time of its own
  int count;
  std::chrono::microseconds span; // a kill comes within this time after the start
};

void run_random_kills(const RandomKills& kills) {
  const TempDirectory directory;
  std::mt19937_64 random(20'240'607);
  for (int i = 0; i < kills.count; ++i) {
    const int num_ranks = i % 2 == 0 ? 2 : 4;
    const std::string job = "random-" + std::to_string(i);
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < num_ranks; ++rank)
      ranks.push_back(start_creating(directory.path(), job, rank, num_ranks, kills.memory));
    std::uniform_int_distribution<int64_t> moment(0, kills.span.count());
    std::this_thread::sleep_for(std::chrono::microseconds(moment(random)));
    for (const pid_t rank : ranks) {
      if (!kills.together) std::this_thread::sleep_for(std::chrono::microseconds(moment(random) / 16));
      ::kill(rank, kills.signal);
    }
    for (const pid_t rank : ranks) {
      int status = 0;
      check(::waitpid(rank, &status, 0) == rank, "waitpid failed");
      check(WIFSIGNALED(status) && WTERMSIG(status) == kills.signal, "a rank ended with {} before its kill", status);
    }
  }
}

TEST_CASE("random kills while groups are created leave nothing, in nameless memory") {
  const SharedMemoryWatch watch;
  SUBCASE("ranks of a job killed one after the other") {
    CHECK_NOTHROW(run_random_kills({Memory::nameless, SIGKILL, false, 60, 60ms}));
  }
  SUBCASE("jobs killed as a whole") {
    CHECK_NOTHROW(run_random_kills({Memory::nameless, SIGKILL, true, 60, 60ms}));
  }
  SUBCASE("Ctrl-C at the start") {
    CHECK_NOTHROW(run_random_kills({Memory::nameless, SIGINT, true, 60, 20ms}));
  }
  CHECK_NOTHROW(check_nothing_left(watch));
}

TEST_CASE("random kills while groups are created leave nothing after the next start, with names") {
  const SharedMemoryWatch watch;
  CHECK_NOTHROW(run_random_kills({Memory::named, SIGKILL, false, 60, 60ms}));
  CHECK_NOTHROW(run_random_kills({Memory::named, SIGINT, true, 60, 60ms}));
  CHECK_NOTHROW(run_good_job(Memory::named));
  CHECK_NOTHROW(check_nothing_left(watch));
}

} // namespace
} // namespace epx::test
