// SPDX-License-Identifier: Apache-2.0
// Whole processes fail here: they are killed or stopped, and the tests check what they leave behind.
#include <doctest/doctest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <sys/types.h>
#include <unistd.h>

#include "tests/multiprocess/fault_rank.h"
#include "tests/multiprocess/sentences.h"
#include "tests/support/check.h"
#include "tests/support/run_ranks.h"
#include "tests/support/system_state.h"

namespace epx::test {

namespace {

using namespace std::chrono_literals;

constexpr int64_t kTimeoutMs = 2'000;
constexpr int64_t kRendezvousMs = 30'000;
constexpr auto kTimeLimit = 60s;
constexpr int kVictim = 1;

// Calls fn in one of num_ranks processes that have joined through files in `directory`.
void as_rank(const TempDirectory& directory, const char* job, int rank, int num_ranks,
             const std::function<void(const RankContext&)>& fn) {
  epx_bootstrap bootstrap = {};
  check_ok(epx_bootstrap_file(directory.path().c_str(), job, rank, num_ranks, kRendezvousMs, &bootstrap),
           "epx_bootstrap_file");
  const auto device = make_device("host", rank, 1);
  fn({rank, num_ranks, &bootstrap, device.get()});
  epx_bootstrap_free(&bootstrap);
}

// Runs three ranks. The victim kills itself or is killed by a peer; the others must succeed, and nothing may be left in
// /dev/shm.
void lose_the_victim(const std::function<void(const TempDirectory&, const RankContext&)>& fn) {
  const TempDirectory directory;
  const SharedMemoryWatch shared_memory;
  const std::vector<ProcessResult> results = run_processes(3, kTimeLimit, [&](int rank) {
    as_rank(directory, "faults", rank, 3, [&](const RankContext& context) { fn(directory, context); });
  });
  for (const ProcessResult& result : results) {
    CAPTURE(result.describe());
    if (result.rank == kVictim) {
      CHECK(result.signal == SIGKILL);
      CHECK_FALSE(result.stopped);
    } else {
      CHECK(result.succeeded());
    }
  }
  const std::set<std::string> leftovers = shared_memory.leftovers();
  CAPTURE(leftovers.empty() ? std::string() : *leftovers.begin());
  CHECK(leftovers.empty());
}

pid_t pid_of(const std::vector<uint64_t>& pids, int rank) {
  return static_cast<pid_t>(pids[static_cast<size_t>(rank)]);
}

} // namespace

TEST_CASE("a rank that is killed before a call is named, and the survivors join again") {
  lose_the_victim([](const TempDirectory& directory, const RankContext& context) {
    FaultRank rank(context, kTimeoutMs);
    if (context.rank == kVictim) std::raise(SIGKILL);
    const epx_status status = rank.call(EPX_OP_DISPATCH);
    check_failed(rank, status, {EPX_ERROR_TIMEOUT, EPX_OP_DISPATCH, kVictim, 2});
    rank.destroy();

    as_rank(directory, "survivors", context.rank / 2, 2, [](const RankContext& survivor) {
      FaultRank again(survivor, kRendezvousMs);
      check_ok(again.call(EPX_OP_DISPATCH), "epx_dispatch among the survivors");
      check_ok(again.call(EPX_OP_COMBINE), "epx_combine among the survivors");
    });
  });
}

TEST_CASE("a rank that is killed while it waits in a call is named") {
  lose_the_victim([](const TempDirectory& /*directory*/, const RankContext& context) {
    FaultRank rank(context, kTimeoutMs);
    const std::vector<uint64_t> pids = context.gather(static_cast<uint64_t>(::getpid()));
    std::thread killer;
    if (context.rank == 0) {
      killer = std::thread([&] {
        std::this_thread::sleep_for(300ms);
        ::kill(pid_of(pids, kVictim), SIGKILL);
      });
    }
    if (context.rank == 2) std::this_thread::sleep_for(800ms); // ranks 0 and 1 wait for this one
    const epx_status status = rank.call(EPX_OP_DISPATCH);
    if (killer.joinable()) killer.join();
    check_failed(rank, status, {EPX_ERROR_TIMEOUT, EPX_OP_DISPATCH, kVictim, 2});
  });
}

TEST_CASE("a rank that is killed while a group is created is named") {
  lose_the_victim([](const TempDirectory& /*directory*/, const RankContext& context) {
    if (context.rank == kVictim) std::raise(SIGKILL);
    GroupCase shape;
    shape.num_ranks = context.num_ranks;
    shape.timeout_ms = kTimeoutMs;
    const epx_group_config config = make_config(shape);
    epx_group group = nullptr;
    check_status(epx_group_create(context.bootstrap, &config, &group), EPX_ERROR_TIMEOUT, "epx_group_create");
    const std::string message = epx_last_error();
    check(contains(message, "rank 1") || contains(message, "ranks 1"), "\"{}\" does not name rank 1", message);
    check(group == nullptr, "a group came out of a failed creation");
  });
}

TEST_CASE("a rank that is stopped is named, and its call fails when it continues") {
  const TempDirectory directory;
  const std::vector<ProcessResult> results = run_processes(3, kTimeLimit, [&](int number) {
    as_rank(directory, "stopped", number, 3, [&](const RankContext& context) {
      FaultRank rank(context, kTimeoutMs);
      const std::vector<uint64_t> pids = context.gather(static_cast<uint64_t>(::getpid()));
      if (context.rank == kVictim) std::raise(SIGSTOP);
      const epx_status status = rank.call(EPX_OP_DISPATCH);
      if (context.rank != kVictim) ::kill(pid_of(pids, kVictim), SIGCONT);
      check_failed(rank, status, {EPX_ERROR_TIMEOUT, EPX_OP_DISPATCH, kVictim, 2});
    });
  });
  check_all_succeeded(results);
  CHECK(results.size() == 3);
}

TEST_CASE("a process whose main thread returns while another one is in a call exits with its own code") {
  const TempDirectory directory;
  const std::vector<ProcessResult> results = run_processes(2, kTimeLimit, [&](int rank) {
    auto* const bootstrap = new epx_bootstrap{}; // nothing here is freed, as in a program that just returns
    check_ok(epx_bootstrap_file(directory.path().c_str(), "job", rank, 2, kRendezvousMs, bootstrap), "epx_bootstrap_file");
    const RankContext context{rank, 2, bootstrap, make_device("host", rank, 1).release()};
    auto* const peer = new FaultRank(context, kTimeoutMs);
    if (rank == 0) std::thread([peer] { peer->call(EPX_OP_PREPARE); }).detach();
    std::this_thread::sleep_for(300ms);
    std::exit(7);
  });
  for (const ProcessResult& result : results)
    CHECK_MESSAGE(result.exit_code == 7, result.describe());
}

TEST_CASE("a signal handler ends a rendezvous whose peers do not come") {
  for (const int rank : {0, 1}) {
    const TempDirectory directory;
    const std::vector<ProcessResult> results = run_processes(1, kTimeLimit, [&](int) {
      std::signal(SIGALRM, [](int) { epx_interrupt(); });
      ::ualarm(200'000, 0);
      epx_bootstrap bootstrap{};
      const auto begin = std::chrono::steady_clock::now();
      check_status(epx_bootstrap_file(directory.path().c_str(), "job", rank, 2, kRendezvousMs, &bootstrap),
                   EPX_ERROR_ABORTED, "epx_bootstrap_file");
      check(std::chrono::steady_clock::now() - begin < 10s, "epx_bootstrap_file went on after the signal");
      check_tells(epx_last_error(), {"job 'job'", fmt::format("rank {} was interrupted", rank)}, "epx_bootstrap_file");
    });
    CHECK_MESSAGE(results.front().succeeded(), results.front().describe());
    CHECK(directory.entries().empty());
  }
}

} // namespace epx::test
