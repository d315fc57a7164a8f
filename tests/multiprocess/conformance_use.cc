// SPDX-License-Identifier: Apache-2.0
// In these scenarios other processes and threads use a group, which only the process that created it may, one thread at a time.
#include <doctest/doctest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/multiprocess/conformance.h"
#include "tests/support/check.h"

namespace epx::test {

namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

struct Entry {
  const char* name;
  std::function<epx_status(epx_group group)> call;
};

// Only one thread at a time may be in these calls. They get no arguments, so that a call that is not refused for its thread
// is refused for those.
const std::vector<Entry>& calls_of_one_thread() {
  static const std::vector<Entry> kEntries = {
      {"epx_prepare", [](epx_group group) { return epx_prepare(group, nullptr); }},
      {"epx_dispatch", [](epx_group group) { return epx_dispatch(group, nullptr); }},
      {"epx_prepare_dispatch", [](epx_group group) { return epx_prepare_dispatch(group, nullptr); }},
      {"epx_combine", [](epx_group group) { return epx_combine(group, nullptr); }},
      {"epx_combine_bwd", [](epx_group group) { return epx_combine_bwd(group, nullptr); }},
      {"epx_dispatch_bwd", [](epx_group group) { return epx_dispatch_bwd(group, nullptr); }},
      {"epx_dispatch_rank_major", [](epx_group group) { return epx_dispatch_rank_major(group, nullptr); }},
      {"epx_combine_rank_major", [](epx_group group) { return epx_combine_rank_major(group, nullptr); }},
      {"epx_combine_rank_major_bwd", [](epx_group group) { return epx_combine_rank_major_bwd(group, nullptr); }},
      {"epx_dispatch_rank_major_bwd", [](epx_group group) { return epx_dispatch_rank_major_bwd(group, nullptr); }},
      {"epx_ragged_all_to_all", [](epx_group group) { return epx_ragged_all_to_all(group, nullptr); }},
      {"epx_mem_alloc", [](epx_group group) { return epx_mem_alloc(group, 4096, nullptr); }},
      {"epx_mem_register", [](epx_group group) { return epx_mem_register(group, nullptr, 0); }},
      {"epx_mem_free", [](epx_group group) { return epx_mem_free(group, nullptr); }},
      {"epx_group_all_gather", [](epx_group group) { return epx_group_all_gather(group, nullptr, nullptr, 0); }},
  };
  return kEntries;
}

const std::vector<Entry>& calls_of_any_thread() {
  static const std::vector<Entry> kEntries = {
      {"epx_group_query",
       [](epx_group group) {
         epx_group_info info = {};
         info.struct_size = sizeof(info);
         return epx_group_query(group, &info);
       }},
      {"epx_group_status",
       [](epx_group group) {
         epx_group_report report = {};
         report.struct_size = sizeof(report);
         return epx_group_status(group, &report);
       }},
      {"epx_handle_mem_size",
       [](epx_group group) {
         const epx_layer layer = {1, 1};
         size_t bytes = 0;
         return epx_handle_mem_size(group, &layer, &bytes);
       }},
  };
  return kEntries;
}

// Checks in the child that each function that takes the group is refused with both processes' numbers. Returns the exit code:
// 0, or the number of the function that was not refused.
int use_parents_group(epx_group group) {
  ::alarm(30); // in case one of them waits
  std::vector<Entry> entries = calls_of_one_thread();
  entries.insert(entries.end(), calls_of_any_thread().begin(), calls_of_any_thread().end());
  entries.push_back({"epx_group_abort", [](epx_group parents) { return epx_group_abort(parents); }});
  int number = 0;
  for (const Entry& entry : entries) {
    ++number;
    if (entry.call(group) != EPX_ERROR_INVALID_ARGUMENT) return number;
    const std::string sentence = epx_last_error();
    for (const std::string& word : {std::string(entry.name), std::to_string(::getpid()), std::to_string(::getppid())})
      if (!contains(sentence, word)) return number;
  }
  epx_group_destroy(group); // is allowed, and does nothing
  return 0;
}

} // namespace

TEST_CASE("a forked child is refused, and the parent's group works on") {
  Case c = base_case();
  const Workload work = make_workload(c.group, c.layer, 80);
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    group.add_arena(1 << 16);
    LayerRun layer(group, c.layer, Placement::random, 81);
    layer.prepare(work);
    layer.dispatch(work);
    context.device->finish();
    for (int turn = 0; turn < context.num_ranks; ++turn) { // one at a time: other threads of this process stand still
      context.gather(0);
      if (turn != context.rank) continue;
      const pid_t child = ::fork();
      if (child == 0) ::_exit(use_parents_group(group.handle()));
      check(child > 0, "fork failed");
      int status = 0;
      check(::waitpid(child, &status, 0) == child, "waitpid failed");
      check(WIFEXITED(status), "the child was ended by signal {}", WTERMSIG(status));
      check(WEXITSTATUS(status) == 0, "entry {} was not refused in the child as it should be", WEXITSTATUS(status));
    }
    context.gather(0);
    layer.combine(work);
    group.check_status();
    run_iteration(group, layer, work);
  });
}

TEST_CASE("when two threads are in one group at once, the second is refused") {
  if (launcher().num_ranks() == 1) return; // no thread waits in a call
  Case c = base_case();
  const Workload work = make_workload(c.group, c.layer, 82);
  on_every_rank([&](const RankContext& context) {
    constexpr size_t kBytes = 1 << 14;
    GroupRun group(context, c.group);
    LayerRun layer(group, c.layer, Placement::random, 83);
    run_iteration(group, layer, work);
    context.device->finish();
    void* memory = nullptr;
    if (context.rank == 0) {
      epx_status allocated = EPX_ERROR_INTERNAL;
      std::string failure;
      std::thread first([&] { // waits for the other ranks
        do {                  // until it is not this thread that is refused
          allocated = epx_mem_alloc(group.handle(), kBytes, &memory);
          failure = epx_last_error();
        } while (allocated == EPX_ERROR_INVALID_ARGUMENT && contains(failure, "another thread is in epx_prepare"));
      });
      try {
        const auto begin = Clock::now();
        do {
          check(Clock::now() - begin < 30s, "epx_mem_alloc does not begin");
          check_status(epx_prepare(group.handle(), nullptr), EPX_ERROR_INVALID_ARGUMENT, "epx_prepare");
        } while (!contains(epx_last_error(), "another thread is in epx_mem_alloc"));
        for (const Entry& entry : calls_of_one_thread()) {
          check_status(entry.call(group.handle()), EPX_ERROR_INVALID_ARGUMENT, entry.name);
          const std::string sentence = epx_last_error();
          check(contains(sentence, entry.name) && contains(sentence, "another thread is in epx_mem_alloc"),
                "{} says \"{}\"", entry.name, sentence);
        }
        for (const Entry& entry : calls_of_any_thread())
          check_ok(entry.call(group.handle()), entry.name);
      } catch (...) {
        epx_group_abort(group.handle());
        first.join();
        throw;
      }
      context.gather(0);
      first.join();
      check(allocated == EPX_SUCCESS, "epx_mem_alloc failed: {}", failure);
    } else {
      context.gather(0);
      check_ok(epx_mem_alloc(group.handle(), kBytes, &memory), "epx_mem_alloc");
    }
    group.count_call();
    group.count_call();
    run_iteration(group, layer, work); // the refused calls took no sequence number
    check_ok(epx_mem_free(group.handle(), memory), "epx_mem_free");
    group.count_call();
    run_iteration(group, layer, work);
  });
}

} // namespace epx::test
