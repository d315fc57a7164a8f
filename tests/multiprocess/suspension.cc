// SPDX-License-Identifier: Apache-2.0
// Jobs are suspended and resumed as a whole, as by Ctrl-Z or a scheduler, and their rendezvous and their groups continue.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <sys/types.h>
#include <unistd.h>

#include "tests/multiprocess/fault_rank.h"
#include "tests/multiprocess/shared_board.h"
#include "tests/support/check.h"
#include "tests/support/rng.h"
#include "tests/support/run_ranks.h"
#include "tests/support/system_state.h"

namespace epx::test {

namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr int kRanks = 3;
constexpr int kJobs = 8;        // at a time
constexpr int kSuspensions = 5; // per job
constexpr int64_t kTimeoutMs = 1'500;
constexpr auto kSuspended = 2'000ms; // longer than the timeout
constexpr int64_t kRendezvousMs = 60'000;
constexpr auto kTimeLimit = 120s;

// The processes of one job share these words.
struct Job {
  std::array<std::atomic<int32_t>, kRanks> pids;
  std::array<std::atomic<int32_t>, kRanks> rounds; // rounds that the rank has ended
  std::atomic<int32_t> last_round;                 // 0: not known yet
  std::atomic<bool> may_end;
  std::atomic<int32_t> steps; // steps of the rendezvous that the late rank may take
};
struct Jobs {
  std::array<Job, kJobs> jobs;
};

void sleep_up_to(Rng& rng, std::chrono::milliseconds longest) {
  std::this_thread::sleep_for(std::chrono::microseconds(rng.below(1000 * longest.count() + 1)));
}

// Runs layers one after the other until the controller ends the job.
void run_rank(const TempDirectory& directory, Job& job, const std::string& name, int number) {
  epx_bootstrap bootstrap = {};
  check_ok(epx_bootstrap_file(directory.path().c_str(), name.c_str(), number, kRanks, kRendezvousMs, &bootstrap),
           "epx_bootstrap_file");
  {
    const auto device = make_device("host", number, 1);
    FaultRank rank({number, kRanks, &bootstrap, device.get()}, kTimeoutMs);
    Rng rng(mix(11, static_cast<uint64_t>(number)));
    const auto index = static_cast<size_t>(number);
    for (int round = 1;; ++round) {
      // No rank is further than in round + 1 before this one has ended its round.
      if (number == 0 && job.may_end && job.last_round == 0) job.last_round = round + 2;
      for (const epx_operation operation : {EPX_OP_PREPARE, EPX_OP_DISPATCH, EPX_OP_COMBINE}) {
        if (rng.chance(30)) sleep_up_to(rng, 3ms);
        check_ok(rank.call(operation), operation_name(operation));
      }
      job.rounds[index] = round;
      if (round == 1) job.pids[index] = ::getpid();
      if (round == job.last_round) break;
    }
  }
  epx_bootstrap_free(&bootstrap);
}

// The ranks run the rendezvous and all-gathers after it. To each step one rank comes late, and the others wait for it.
constexpr int kGathers = 3;

void meet_and_gather(const TempDirectory& directory, Job& job, int job_number, int number) {
  const auto come_to = [&](int step) {
    job.rounds[static_cast<size_t>(number)] = step;
    while (number == (job_number + step) % kRanks && job.steps < step)
      std::this_thread::sleep_for(1ms);
  };
  job.pids[static_cast<size_t>(number)] = ::getpid();
  come_to(1);
  epx_bootstrap bootstrap = {};
  const std::string name = "rendezvous" + std::to_string(job_number);
  check_ok(epx_bootstrap_file(directory.path().c_str(), name.c_str(), number, kRanks, kTimeoutMs, &bootstrap),
           "epx_bootstrap_file");
  for (int step = 2; step < 2 + kGathers; ++step) {
    come_to(step);
    std::array<int32_t, kRanks> all{};
    std::array<char, 512> message{};
    const int32_t mine = 10 * step + number;
    const epx_status status = bootstrap.all_gather(bootstrap.context, &mine, all.data(), sizeof(mine), kTimeoutMs,
                                                   message.data(), message.size());
    check(status == EPX_SUCCESS, "all-gather {}: {}: {}", step - 1, epx_status_string(status), message.data());
    for (int rank = 0; rank < kRanks; ++rank)
      check_equal(all[static_cast<size_t>(rank)], 10 * step + rank, "what rank " + std::to_string(rank) + " sent");
  }
  epx_bootstrap_free(&bootstrap);
}

void wait_for_rounds(const Job& job, int rounds) {
  const auto deadline = Clock::now() + 30s;
  const auto behind = [&] { return std::ranges::any_of(job.rounds, [&](const auto& ended) { return ended < rounds; }); };
  while (behind()) {
    check(Clock::now() < deadline, "not all ranks have come to round {}", rounds);
    std::this_thread::sleep_for(2ms);
  }
}

// Signals all ranks, in a random order.
void signal_all(const Job& job, int signal, Rng& rng, std::chrono::milliseconds stagger) {
  std::array<size_t, kRanks> order;
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[static_cast<size_t>(rng.below(static_cast<int64_t>(i)))]);
  for (const size_t rank : order) {
    check(::kill(job.pids[rank], signal) == 0, "rank {} is gone", rank);
    sleep_up_to(rng, stagger);
  }
}

void suspend_and_resume(Job& job, uint64_t seed) {
  Rng rng(seed);
  wait_for_rounds(job, 1);
  while (std::ranges::any_of(job.pids, [](const auto& pid) { return pid == 0; }))
    std::this_thread::sleep_for(1ms);
  for (int i = 0; i < kSuspensions; ++i) {
    const bool together = i % 2 == 0;
    sleep_up_to(rng, 100ms);
    signal_all(job, SIGSTOP, rng, together ? 0ms : 50ms);
    std::this_thread::sleep_for(kSuspended);
    signal_all(job, SIGCONT, rng, together ? 0ms : 300ms);
    wait_for_rounds(job, *std::ranges::max_element(job.rounds, {}, [](const auto& ended) { return ended.load(); }) + 2);
  }
  job.may_end = true;
}

void suspend_each_step(Job& job, uint64_t seed) {
  Rng rng(seed);
  for (int step = 1; step < 2 + kGathers; ++step) {
    wait_for_rounds(job, step);
    std::this_thread::sleep_for(100ms);
    sleep_up_to(rng, 500ms);
    signal_all(job, SIGSTOP, rng, 50ms);
    std::this_thread::sleep_for(kSuspended);
    signal_all(job, SIGCONT, rng, 150ms);
    sleep_up_to(rng, 150ms);
    job.steps = step;
  }
}

// Runs jobs of kRanks ranks with a controller each; every process has to succeed.
void run_jobs(const std::string& what, const std::function<void(int number, int rank)>& run_rank_of,
              const std::function<void(int number)>& control) {
  constexpr int kProcesses = kRanks + 1; // ranks of a job and its controller
  const std::vector<ProcessResult> results = run_processes(kJobs * kProcesses, kTimeLimit, [&](int process) {
    const int number = process / kProcesses;
    if (process % kProcesses == kRanks)
      control(number);
    else
      run_rank_of(number, process % kProcesses);
  });
  int died = 0;
  for (const ProcessResult& result : results) {
    if (result.succeeded()) continue;
    ++died;
    MESSAGE(result.describe());
  }
  MESSAGE(kJobs << " jobs of " << kRanks << " ranks, " << what);
  CHECK(died == 0);
}

} // namespace

TEST_CASE("groups live on when their job is suspended for longer than timeout_ms and resumed") {
  const TempDirectory directory;
  const SharedBoard<Jobs> board;
  run_jobs(
      "5 suspensions each",
      [&](int number, int rank) {
        run_rank(directory, board->jobs[static_cast<size_t>(number)], "suspended" + std::to_string(number), rank);
      },
      [&](int number) {
        suspend_and_resume(board->jobs[static_cast<size_t>(number)], mix(12, static_cast<uint64_t>(number)));
      });
}

TEST_CASE("ranks that join through files and gather do not fail when their job is suspended for longer than timeout_ms") {
  const TempDirectory directory;
  const SharedBoard<Jobs> board;
  run_jobs(
      "each suspended in its rendezvous and in 3 all-gathers",
      [&](int number, int rank) { meet_and_gather(directory, board->jobs[static_cast<size_t>(number)], number, rank); },
      [&](int number) {
        suspend_each_step(board->jobs[static_cast<size_t>(number)], mix(13, static_cast<uint64_t>(number)));
      });
  CHECK(directory.entries().empty());
}

TEST_CASE("a rank that alone is stopped while it waits is named") {
  constexpr int kVictim = 1;
  const TempDirectory directory;
  const std::vector<ProcessResult> results = run_processes(kRanks, kTimeLimit, [&](int number) {
    epx_bootstrap bootstrap = {};
    check_ok(epx_bootstrap_file(directory.path().c_str(), "alone", number, kRanks, kRendezvousMs, &bootstrap),
             "epx_bootstrap_file");
    const auto device = make_device("host", number, 1);
    const RankContext context{number, kRanks, &bootstrap, device.get()};
    {
      FaultRank rank(context, kTimeoutMs);
      const auto victim = static_cast<pid_t>(context.gather(static_cast<uint64_t>(::getpid()))[kVictim]);
      if (number == 2) { // the others wait for this one
        std::this_thread::sleep_for(300ms);
        check(::kill(victim, SIGSTOP) == 0, "rank {} is gone", kVictim);
        std::this_thread::sleep_for(300ms);
      }
      const auto begin = Clock::now();
      const epx_status status = rank.call(EPX_OP_DISPATCH);
      if (number == 2) {
        check(Clock::now() - begin < 3 * std::chrono::milliseconds(kTimeoutMs),
              "the wait for a stopped rank was prolonged");
        std::this_thread::sleep_for(500ms); // until rank 0 has seen this rank's abort record, also on a busy machine
        ::kill(victim, SIGCONT);
      }
      if (number != kVictim) {
        check_failed(rank, status, {EPX_ERROR_TIMEOUT, EPX_OP_DISPATCH, kVictim, 2});
      } else { // its peers' data had arrived, so this call succeeds, and the next one fails
        if (status == EPX_SUCCESS) check_status(rank.call(EPX_OP_COMBINE), EPX_ERROR_TIMEOUT, "epx_combine");
        const epx_group_report report = GroupView(rank.group()).status();
        check(report.status == EPX_ERROR_TIMEOUT && report.culprit == kVictim, "\"{}\" does not name this rank",
              report.message);
      }
    }
    epx_bootstrap_free(&bootstrap);
  });
  check_all_succeeded(results);
  CHECK(results.size() == kRanks);
}

} // namespace epx::test
