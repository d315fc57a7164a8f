// SPDX-License-Identifier: Apache-2.0
// Ranks of groups of several nodes are killed, stopped, or late. The control connection tells every survivor who it was: much
// sooner than timeout_ms where a process has died, and else within timeout_ms and two seconds. EPX_TEST_TRANSPORT is "host" if
// it is not set. EPX_TEST_RANKS_PER_NODE is 2 if it is not set; on GPUs, ranks of different nodes may share one.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <sys/types.h>
#include <unistd.h>

#include "tests/multiprocess/fault_rank.h"
#include "tests/support/check.h"
#include "tests/support/run_ranks.h"
#include "tests/support/run_test_cases.h"
#include "tests/support/system_state.h"

namespace epx::test {

namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr int kRanks = 4;
constexpr int64_t kShortMs = 3'000;
constexpr int64_t kLongMs = 40'000; // a group that fails sooner has not waited for it
constexpr int64_t kRendezvousMs = 30'000;
constexpr auto kTimeLimit = 60s;
constexpr auto kSoon = 5s; // for a death, which is told after a second
constexpr auto kGrace = 2s;

const char* transport() {
  const char* const name = std::getenv("EPX_TEST_TRANSPORT");
  return name != nullptr ? name : "host";
}

int ranks_per_node() {
  const char* const launched = std::getenv("EPX_TEST_RANKS_PER_NODE");
  return launched != nullptr ? std::atoi(launched) : 2;
}

// The shortest timeout of a group. It bounds the creation as well, and there NCCL connects GPUs of different nodes by sockets.
std::chrono::milliseconds shortest_timeout() {
  return std::chrono::milliseconds(std::string(transport()) == "host" ? 1'500 : kShortMs);
}

class NodeRank {
public:
  NodeRank(const RankContext& context, int64_t timeout_ms, bool has_fixed_rail_tokens)
      : context_(context), rank_(context, timeout_ms, ranks_per_node(), has_fixed_rail_tokens), timeout_(timeout_ms) {
    for (const uint64_t pid : context.gather(static_cast<uint64_t>(::getpid())))
      pids_.push_back(static_cast<pid_t>(pid));
  }

  FaultRank& rank() { return rank_; }
  int number() const { return context_.rank; }
  pid_t pid_of(int rank) const { return pids_[static_cast<size_t>(rank)]; }

  // Makes the second call, which must fail within `limit` because of `culprit`, or of any rank. Returns the report.
  epx_group_report lose(std::optional<int> culprit, Clock::duration limit, epx_status expected_status = EPX_ERROR_TIMEOUT,
                        epx_operation operation = EPX_OP_DISPATCH) {
    const Clock::time_point begin = Clock::now();
    epx_status status = rank_.call(operation);
    const auto waited = Clock::now() - begin;
    // On a GPU the next call tells, and a rank that needs nothing from the culprit may have ended this one.
    const bool is_told_later = status == EPX_SUCCESS;
    if (is_told_later) status = rank_.call(operation);
    check(!is_told_later || std::string(transport()) != "host", "the call has succeeded");
    check(waited < limit, "the call of rank {} ended after {} ms, later than {} ms", context_.rank, waited / 1ms,
          limit / 1ms);
    ExpectedFailure expected{expected_status, operation, culprit, 2};
    if (is_told_later) expected.sequence.reset();
    const epx_group_report report = check_failed(rank_, status, expected);
    check(report.sequence == 2 || report.sequence == 3, "the failed call is {}", report.sequence);
    if (culprit == context_.rank || report.culprit < 0) return report;
    const std::string name = "rank " + std::to_string(report.culprit);
    check_says(report.message, name);
    rank_.destroy();
    return report;
  }
  void lose_in_time(int culprit) { lose(culprit, timeout_ + kGrace); }

  // Makes a call that has no kernel, to which `late` comes too late; `number` is that of the call.
  void lose_host_call(int late, epx_operation operation, uint64_t number) {
    void* memory = nullptr;
    if (operation == EPX_OP_MEM_FREE) check_ok(epx_mem_alloc(rank_.group(), 4096, &memory), "epx_mem_alloc");
    if (late == context_.rank) std::this_thread::sleep_for(timeout_ + kGrace);
    if (late == context_.rank && operation == EPX_OP_MEM_FREE)
      return; // which is no call any more where it knows of the failure
    const Clock::time_point begin = Clock::now();
    const epx_status status = operation == EPX_OP_MEM_FREE ? epx_mem_free(rank_.group(), memory) : rank_.call(operation);
    const auto waited = Clock::now() - begin;
    check(waited < timeout_ + kGrace, "the call of rank {} ended after {} ms", context_.rank, waited / 1ms);
    ExpectedFailure expected{EPX_ERROR_TIMEOUT, operation, late, number};
    const epx_group_report report = check_failed(rank_, status, expected);
    const std::string name = "rank " + std::to_string(late);
    if (late != context_.rank) check_says(report.message, name);
    rank_.destroy();
  }

  // Rank `different` frees other memory than all others.
  void free_different_memory(int different) {
    void* memory[2] = {};
    for (void*& piece : memory)
      check_ok(epx_mem_alloc(rank_.group(), 4096, &piece), "epx_mem_alloc");
    check_ok(rank_.call(EPX_OP_ALL_GATHER), "epx_group_all_gather");
    const bool is_different = context_.rank == different;
    const Clock::time_point begin = Clock::now();
    const epx_status status = epx_mem_free(rank_.group(), memory[is_different ? 1 : 0]);
    check_failed(rank_, status,
                 {EPX_ERROR_OUT_OF_SEQUENCE, EPX_OP_MEM_FREE, {}, 8}); // each of the three calls before counts as two
    check(Clock::now() - begin < kSoon, "the call waited for something");
    check_status(epx_mem_free(rank_.group(), memory[is_different ? 1 : 0]), EPX_ERROR_INVALID_ARGUMENT, "freed memory");
    context_.gather(0);
    rank_.destroy();
  }

private:
  RankContext context_;
  FaultRank rank_;
  std::chrono::milliseconds timeout_;
  std::vector<pid_t> pids_;
};

void as_rank(const TempDirectory& directory, int rank, const std::function<void(const RankContext&)>& fn) {
  ::setenv("EPX_TEST_RANKS_PER_NODE", std::to_string(ranks_per_node()).c_str(), 1);       // for the choice of devices
  ::setenv("NCCL_HOSTID", ("node" + std::to_string(rank / ranks_per_node())).c_str(), 1); // on GPUs
  epx_bootstrap bootstrap = {};
  check_ok(epx_bootstrap_file(directory.path().c_str(), "control", rank, kRanks, kRendezvousMs, &bootstrap),
           "epx_bootstrap_file");
  const auto device = make_device(transport(), rank, kRanks);
  fn({rank, kRanks, &bootstrap, device.get()});
  epx_bootstrap_free(&bootstrap);
}

epx_status status_of(FaultRank& rank) {
  const epx_group_report report = GroupView(rank.group()).status();
  return report.status;
}

// A test hook of one rank, where libepx has such: EPX_TEST_STALLS_IN or EPX_TEST_FAILS_TO_LAUNCH.
struct Hook {
  int rank;
  const char* variable;
  epx_operation operation = EPX_OP_DISPATCH;
};

// Runs the ranks as processes. Those of `victims` must end by SIGKILL, and the others succeed.
void run_nodes(const std::vector<int>& victims, int64_t timeout_ms, const std::function<void(NodeRank&)>& fn,
               std::optional<Hook> hook = {}, bool has_fixed_rail_tokens = false) {
  const TempDirectory directory;
  const SharedMemoryWatch shared_memory;
  const std::vector<ProcessResult> results = run_processes(kRanks, kTimeLimit, [&](int rank) {
    if (hook && rank == hook->rank) ::setenv(hook->variable, std::to_string(hook->operation).c_str(), 1);
    as_rank(directory, rank, [&](const RankContext& context) {
      NodeRank node_rank(context, timeout_ms, has_fixed_rail_tokens);
      fn(node_rank);
    });
  });
  CHECK(results.size() == kRanks);
  for (const ProcessResult& result : results) {
    CAPTURE(result.describe());
    if (std::ranges::find(victims, result.rank) != victims.end()) {
      CHECK(result.signal == SIGKILL);
      CHECK_FALSE(result.stopped);
    } else {
      CHECK(result.succeeded());
    }
  }
  CHECK(shared_memory.leftovers().empty());
}

// Sends the signal to this process from a thread, when it waits in a call.
void raise_later(int signal) {
  std::thread([signal] {
    std::this_thread::sleep_for(500ms);
    ::kill(::getpid(), signal);
  }).detach();
}

} // namespace

TEST_CASE("a rank that is killed between calls is named long before timeout_ms, rank 0 too") {
  for (const int victim : {0, 1, 3}) {
    CAPTURE(victim);
    run_nodes({victim}, kLongMs, [&](NodeRank& rank) {
      if (rank.number() == victim) std::raise(SIGKILL);
      rank.lose(victim, kSoon);
    });
  }
}

TEST_CASE("a rank that is killed while it waits in a call is named, and not the one that it waited for") {
  for (const int victim : {0, 2}) {
    CAPTURE(victim);
    run_nodes({victim}, kLongMs, [&](NodeRank& rank) {
      if (rank.number() == victim) raise_later(SIGKILL);
      if (rank.number() == 3) std::this_thread::sleep_for(2500ms); // the others wait for this one
      rank.lose(victim, kSoon);
    });
  }
}

TEST_CASE("a death is known between calls, and the next call fails at once") {
  run_nodes({1}, kLongMs, [](NodeRank& rank) {
    if (rank.number() == 1) std::raise(SIGKILL);
    std::this_thread::sleep_for(3s);
    rank.lose(1, kGrace);
  });
}

TEST_CASE("two ranks of a node that are killed: one of them is named everywhere") {
  run_nodes({2, 3}, kLongMs, [](NodeRank& rank) {
    if (rank.number() >= 2) std::raise(SIGKILL);
    const epx_group_report report = rank.lose({}, kSoon);
    check(report.culprit == 2 || report.culprit == 3, "rank {} is named", report.culprit);
  });
}

TEST_CASE("a rank that is stopped is named by every survivor within timeout_ms and two seconds, rank 0 too") {
  for (const int victim : {0, 1, 2}) {
    CAPTURE(victim);
    run_nodes({}, kShortMs, [&](NodeRank& rank) {
      if (rank.number() == victim) std::raise(SIGSTOP);
      rank.lose(victim, rank.number() == victim ? kSoon : kGrace + std::chrono::milliseconds(kShortMs));
      if (rank.number() != 3) return;
      std::this_thread::sleep_for(kGrace); // all others have learned of it
      ::kill(rank.pid_of(victim), SIGCONT);
    });
  }
}

TEST_CASE("a rank that is late is named by every rank within timeout_ms and two seconds, and learns it itself") {
  for (const int late : {0, 3}) {
    CAPTURE(late);
    run_nodes({}, kShortMs, [&](NodeRank& rank) {
      if (rank.number() == late) std::this_thread::sleep_for(std::chrono::milliseconds(kShortMs) + kGrace);
      rank.lose(late, rank.number() == late ? kSoon : kGrace + std::chrono::milliseconds(kShortMs));
    });
  }
}

TEST_CASE("a rank that comes late to a call that has no kernel is named by every rank of every node") {
  for (const int late : {0, 1, 3}) {
    CAPTURE(late);
    run_nodes({}, kShortMs, [&](NodeRank& rank) { rank.lose_host_call(late, EPX_OP_MEM_ALLOC, 2); });
  }
  run_nodes({}, kShortMs, [&](NodeRank& rank) { rank.lose_host_call(2, EPX_OP_MEM_FREE, 4); });
  run_nodes({}, kShortMs, [&](NodeRank& rank) { rank.lose_host_call(1, EPX_OP_ALL_GATHER, 2); });
}

TEST_CASE("ranks that free different memory are out of sequence on every rank of every node, and have freed it") {
  for (const int different : {1, 2}) {
    CAPTURE(different);
    run_nodes({}, kLongMs, [&](NodeRank& rank) { rank.free_different_memory(different); });
  }
}

TEST_CASE("a rank that aborts the group is named by every rank of every node, and by none as dead") {
  for (const int aborting : {0, 3}) {
    CAPTURE(aborting);
    run_nodes({}, kLongMs, [&](NodeRank& rank) {
      if (rank.number() != aborting) {
        rank.lose(aborting, kSoon, EPX_ERROR_ABORTED);
        return;
      }
      std::this_thread::sleep_for(500ms); // the others wait for this one
      check_ok(epx_group_abort(rank.rank().group()), "epx_group_abort");
      check(rank.rank().call(EPX_OP_DISPATCH) == EPX_ERROR_ABORTED, "a call after epx_group_abort does not fail with it");
      std::this_thread::sleep_for(1s); // the others do not see its end
    });
  }
}

// All rows are on rank 0. Rank 1 sums those of rank 3's tokens, and sends the sums to rank 3.
TEST_CASE("a relay whose call has failed sends no rows that its rail peer would take for good" *
          doctest::skip(std::string(transport()) == "host" || ranks_per_node() == 1)) {
  ::setenv("EPX_TEST_VERDICT_DELAY_MS", "500", 1); // so long the ranks that have a failed call do not know of it
  run_nodes(
      {}, kLongMs,
      [&](NodeRank& rank) {
        if (rank.number() != 0) {
          rank.rank().call(EPX_OP_COMBINE);
          check(status_of(rank.rank()) != EPX_SUCCESS, "the combine of rank {} has ended, and the group is healthy",
                rank.number());
          return;
        }
        std::jthread aborting([&] {
          std::this_thread::sleep_for(500ms); // the others wait for the rows of this rank
          check_ok(epx_group_abort(rank.rank().group()), "epx_group_abort");
        });
        rank.rank().call(EPX_OP_COMBINE);
        std::this_thread::sleep_for(kGrace); // the others do not see its end
      },
      Hook{0, "EPX_TEST_STALLS_IN", EPX_OP_COMBINE}, true);
  ::unsetenv("EPX_TEST_VERDICT_DELAY_MS");
}

TEST_CASE("a rank whose kernel hangs in a call is named, though all ranks have come to it" *
          doctest::skip(std::string(transport()) == "host")) {
  const auto timeout = shortest_timeout();
  // Kernels wait longer over nodes. A node of one rank has no peer whose kernel waits, and finds the hang by itself.
  const auto limit = 2 * timeout + kGrace;
  const auto limit_of_kernels = 3 * timeout + 10s + 2 * kGrace;
  // With fixed sizes the peers of a combine wait in the same call; else these have what they need, and wait in the next one.
  struct Hang {
    epx_operation operation;
    bool has_fixed_sizes;
  };
  for (const Hang& hang : {Hang{EPX_OP_DISPATCH, false}, Hang{EPX_OP_COMBINE, false}, Hang{EPX_OP_COMBINE, true}}) {
    CAPTURE(operation_name(hang.operation));
    CAPTURE(hang.has_fixed_sizes);
    run_nodes(
        {}, timeout.count(),
        [&](NodeRank& rank) {
          rank.lose(1, ranks_per_node() == 1 ? limit : limit_of_kernels, EPX_ERROR_TIMEOUT, hang.operation);
        },
        Hook{1, "EPX_TEST_STALLS_IN", hang.operation}, hang.has_fixed_sizes);
    if (ranks_per_node() > 1) break;
  }
}

TEST_CASE("a rank that cannot launch its kernel is named by every rank of every node" *
          doctest::skip(std::string(transport()) == "host")) {
  // A peer that has not begun its own call when the group ends finds the failure between two calls.
  for (const bool has_late_peer : {false, true}) {
    CAPTURE(has_late_peer);
    run_nodes(
        {}, kLongMs,
        [&](NodeRank& rank) {
          if (has_late_peer && rank.number() == 3) std::this_thread::sleep_for(kGrace);
          const epx_group_report report = rank.lose(2, kSoon, EPX_ERROR_SYSTEM);
          const std::string call = "dispatch (call " + std::to_string(report.sequence) + ")";
          check_says(report.message, call);
        },
        Hook{2, "EPX_TEST_FAILS_TO_LAUNCH"});
  }
}

// The emulated rails of rank 1 fail in the way that EPX_TEST_BREAKS_RAILS names (tests/emulation/rails.cc).
struct NetworkFault {
  const char* way;
  int64_t timeout_ms;
  Clock::duration limit;
  epx_status status;
  std::vector<std::string> words; // of the sentence on each rank
};

TEST_CASE("a network that fails while all ranks live is nobody's fault, and the report says between which ranks" *
          doctest::skip(std::getenv("EPX_TEST_RAILS_CAN_BREAK") == nullptr)) {
  const std::string peer = ranks_per_node() == kRanks / 2 ? "rank 3" : "a rank of another node";
  const std::string ends = "between rank 1 and ";
  std::vector<NetworkFault> faults{
      {"at_once", kLongMs, kSoon + kGrace, EPX_ERROR_SYSTEM, {ends + peer + " broke in dispatch (call 2)", "network"}},
      {"later", kLongMs, kSoon + kGrace, EPX_ERROR_SYSTEM, {ends + "a rank of another node broke", "network"}}};
  // Where a node has several ranks, its kernels name the one that waits for the network before anything else is known.
  if (ranks_per_node() == 1)
    faults.push_back({"unseen",
                      500,
                      std::chrono::milliseconds(3 * 500) + 10s + 2 * kGrace,
                      EPX_ERROR_TIMEOUT,
                      {"do not end in dispatch (call 2)", "network"}});
  for (const NetworkFault& fault : faults) {
    CAPTURE(fault.way);
    run_nodes({}, fault.timeout_ms, [&](NodeRank& rank) {
      if (rank.number() == 1) ::setenv("EPX_TEST_BREAKS_RAILS", fault.way, 1);
      const epx_group_report report = rank.lose(-1, fault.limit, fault.status);
      for (const std::string& word : fault.words)
        check_says(report.message, word);
      const bool has_reason = contains(report.message, "ncclGroupEnd");
      check(has_reason == (rank.number() == 1 && std::string(fault.way) == "at_once"), "\"{}\": the rails' own words",
            report.message);
    });
  }
}

TEST_CASE("a rank whose connection a forked child keeps open is named by its silence") {
  run_nodes({1}, kShortMs, [](NodeRank& rank) {
    if (rank.number() == 1) {
      if (::fork() == 0) { // as a worker that loads data; its own process group, so that it lives on after the rank
        ::setpgid(0, 0);
        std::this_thread::sleep_for(std::chrono::milliseconds(kShortMs) + 2 * kGrace);
        ::_exit(0);
      }
      std::raise(SIGKILL);
    }
    rank.lose_in_time(1);
  });
}

TEST_CASE("a job that is stopped and continued as a whole lives on") {
  const auto timeout = shortest_timeout();
  run_nodes({}, timeout.count(), [&](NodeRank& rank) {
    if (rank.number() == 0 && ::fork() == 0) {
      ::setpgid(0, 0);
      std::this_thread::sleep_for(2 * timeout + 500ms);
      for (int each = kRanks - 1; each >= 0; --each) {
        ::kill(rank.pid_of(each), SIGCONT);
        std::this_thread::sleep_for(100ms);
      }
      ::_exit(0);
    }
    std::raise(SIGSTOP);
    check_ok(rank.rank().call(EPX_OP_DISPATCH), "epx_dispatch");
    std::this_thread::sleep_for(timeout); // for a verdict that was on its way
    check_ok(rank.rank().call(EPX_OP_COMBINE), "epx_combine");
  });
}

TEST_CASE("ranks that exit without destroying their group after its last call harm nobody") {
  run_nodes({}, kLongMs, [](NodeRank& rank) {
    check_ok(rank.rank().call(EPX_OP_DISPATCH), "epx_dispatch");
    std::this_thread::sleep_for(500ms); // its peers have received what it has sent
    if (rank.number() % 2 == 1) ::_exit(0);
    check(rank.rank().group() != nullptr, "the group is gone");
    rank.rank().destroy();
  });
}

TEST_CASE("a rank that has destroyed its group before a call is named by every rank of every node, rank 0 too") {
  for (const int leaving : {0, 1, 3}) {
    CAPTURE(leaving);
    run_nodes({}, kShortMs, [&](NodeRank& rank) {
      if (rank.number() == leaving)
        rank.rank().destroy();
      else
        rank.lose_in_time(leaving);
    });
  }
}

TEST_CASE("a group whose ranks are in no call for longer than timeout_ms lives on") {
  const auto timeout = shortest_timeout();
  run_nodes({}, timeout.count(), [&](NodeRank& rank) {
    std::this_thread::sleep_for(timeout + 1500ms);
    check_ok(rank.rank().call(EPX_OP_DISPATCH), "epx_dispatch");
    check_ok(rank.rank().call(EPX_OP_COMBINE), "epx_combine");
  });
}

} // namespace epx::test

int main(int argc, char** argv) {
  using namespace epx::test;
  // A child looks for the devices, since CUDA serves no children of a process that has used it.
  const std::vector<ProcessResult> looked = spawn_processes(1, {}, [](int) {
    try {
      ::setenv("EPX_TEST_RANKS_PER_NODE", std::to_string(ranks_per_node()).c_str(), 1);
      make_device(transport(), 0, kRanks);
      return 0;
    } catch (const Skipped& skipped) {
      std::printf("skipped: %s\n", skipped.what());
      return kSkippedExitCode;
    }
  });
  if (!looked.front().succeeded()) {
    std::fputs(looked.front().output.c_str(), stderr);
    return looked.front().exit_code;
  }
  doctest::Context context(argc, argv);
  return run_test_cases(context, argc, argv);
}
