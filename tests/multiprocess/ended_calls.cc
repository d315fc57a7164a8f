// SPDX-License-Identifier: Apache-2.0
// Calls that wait are ended by their own process: another thread destroys the group, epx_interrupt() is called, or the thread's
// check function says so. The call returns ABORTED soon, and peers learn of it.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "epx/epx.h"
#include "tests/multiprocess/fault_rank.h"
#include "tests/multiprocess/sentences.h"
#include "tests/support/case.h"
#include "tests/support/check.h"
#include "tests/support/run_ranks.h"
#include "tests/support/system_state.h"

namespace epx::test {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr int64_t kLongMs = 60'000; // no rank may wait for so long
constexpr auto kSoon = 10s;

constexpr epx_operation kOperations[] = {EPX_OP_PREPARE,          EPX_OP_DISPATCH,          EPX_OP_COMBINE,
                                         EPX_OP_COMBINE_BWD,      EPX_OP_DISPATCH_BWD,      EPX_OP_DISPATCH_RANK_MAJOR,
                                         EPX_OP_PREPARE_DISPATCH, EPX_OP_RAGGED_ALL_TO_ALL, EPX_OP_MEM_ALLOC,
                                         EPX_OP_ALL_GATHER};

template <typename Body>
void check_soon(const char* what, Body&& body) {
  const auto begin = Clock::now();
  body();
  check(Clock::now() - begin < kSoon, "{} took {} ms", what, (Clock::now() - begin) / 1ms);
}

// Each function that takes a group refuses one that has been destroyed.
void check_all_refuse(epx_group group) {
  epx_group_info info{};
  info.struct_size = sizeof(info);
  epx_group_report report{};
  report.struct_size = sizeof(report);
  const epx_layer layer = {2, 4};
  size_t bytes = 0;
  void* memory = &bytes;
  const auto refused = [](epx_status status, const std::string& function) {
    check_status(status, EPX_ERROR_ABORTED, function);
    check_tells(epx_last_error(), {function, "has been destroyed"}, function);
  };
  refused(epx_group_query(group, &info), "epx_group_query");
  refused(epx_group_status(group, &report), "epx_group_status");
  refused(epx_group_abort(group), "epx_group_abort");
  refused(epx_handle_mem_size(group, &layer, &bytes), "epx_handle_mem_size");
  refused(epx_mem_alloc(group, 16, &memory), "epx_mem_alloc");
  refused(epx_mem_free(group, memory), "epx_mem_free");
  refused(epx_group_all_gather(group, &bytes, &bytes, sizeof(bytes)), "epx_group_all_gather");
  refused(epx_prepare(group, nullptr), "epx_prepare");
}

std::atomic<bool> ends_this_thread{false};
int32_t thread_is_to_end() {
  return ends_this_thread ? 1 : 0;
}

} // namespace

TEST_CASE("epx_group_destroy ends the call that another thread is in, and peers learn of it") {
  for (const epx_operation operation : kOperations) {
    for (const bool aborts_first : {false, true}) {
      CAPTURE(std::string(operation_name(operation)));
      CAPTURE(aborts_first);
      std::atomic<bool> is_destroyed{false};
      with_ranks(2, [&](const RankContext& context) {
        FaultRank rank(context, kLongMs);
        if (context.rank == 1) {
          wait_until([&] { return is_destroyed.load(); });
          check_failed(rank, rank.call(operation), {EPX_ERROR_ABORTED, operation, 0, 2});
          return;
        }
        std::thread destroyer([&] {
          std::this_thread::sleep_for(50ms); // the call is then most likely in progress; else it is refused
          if (aborts_first) check_ok(epx_group_abort(rank.group()), "epx_group_abort");
          check_soon("epx_group_destroy", [&] { epx_group_destroy(rank.group()); });
          is_destroyed = true;
        });
        check_soon("the call", [&] { check_status(rank.call(operation), EPX_ERROR_ABORTED, operation_name(operation)); });
        destroyer.join();
        check_all_refuse(rank.group());
        epx_group_destroy(rank.group()); // a second time it does nothing
      });
    }
  }
}

TEST_CASE("threads that read the status, abort and destroy a group at the same time disturb nobody") {
  for (int round = 0; round < 20; ++round) {
    with_ranks(2, [&](const RankContext& context) {
      FaultRank rank(context, kLongMs);
      const epx_group group = rank.group();
      std::vector<std::thread> threads;
      for (int i = 0; i < 2; ++i)
        threads.emplace_back([group] {
          epx_group_report report{};
          report.struct_size = sizeof(report);
          while (epx_group_status(group, &report) == EPX_SUCCESS) {
          }
        });
      threads.emplace_back([group] { epx_group_abort(group); });
      for (int i = 0; i < 2; ++i)
        threads.emplace_back([group] { epx_group_destroy(group); });
      epx_status status = EPX_SUCCESS;
      while (status == EPX_SUCCESS)
        status = rank.call(EPX_OP_COMBINE);
      check_status(status, EPX_ERROR_ABORTED, "epx_combine");
      for (std::thread& thread : threads)
        thread.join();
    });
  }
}

TEST_CASE("a thread's check function ends its call, and peers are told which rank was interrupted") {
  for (const epx_operation operation : kOperations) {
    CAPTURE(std::string(operation_name(operation)));
    std::atomic<bool> has_ended{false};
    std::atomic<int> num_prepared{0};
    with_ranks(3, [&](const RankContext& context) {
      FaultRank rank(context, kLongMs);
      ++num_prepared;
      wait_until([&] { return num_prepared == 3; }); // who is still in prepare would hear of the interrupt there
      if (context.rank == 2) wait_until([&] { return has_ended.load(); });
      epx_group_report report{};
      if (context.rank == 0) epx_set_interrupt_check([] { return int32_t{1}; });
      check_soon("the call", [&] {
        report = check_failed(rank, rank.call(operation), {EPX_ERROR_ABORTED, operation, 0, 2});
      });
      epx_set_interrupt_check(nullptr);
      check_equal(epx_interrupted(), int32_t{0}, "what is left of the interrupt");
      if (context.rank == 0) {
        check_tells(report.message, {"this rank was interrupted"}, "rank 0");
        has_ended = true;
      } else {
        check_tells(report.message, {"rank 0 was interrupted in", operation_name(operation)}, "a peer");
      }
      rank.destroy();
    });
  }
}

TEST_CASE("a check function may destroy the group in whose call its thread is") {
  static thread_local epx_group destroyed_by_check = nullptr;
  std::atomic<bool> has_ended{false};
  with_ranks(2, [&](const RankContext& context) {
    FaultRank rank(context, kLongMs);
    if (context.rank == 1) {
      wait_until([&] { return has_ended.load(); });
      check_failed(rank, rank.call(EPX_OP_DISPATCH), {EPX_ERROR_ABORTED, EPX_OP_DISPATCH, 0, 2});
      return;
    }
    destroyed_by_check = rank.group();
    epx_set_interrupt_check([] {
      epx_group_destroy(destroyed_by_check);
      return int32_t{0};
    });
    check_soon("the call", [&] { check_status(rank.call(EPX_OP_DISPATCH), EPX_ERROR_ABORTED, "epx_dispatch"); });
    epx_set_interrupt_check(nullptr);
    check_all_refuse(rank.group());
    has_ended = true;
  });
}

TEST_CASE("epx_interrupt ends one call of each thread, the one in progress or the next that waits") {
  std::atomic<int> num_ended{0};
  with_ranks(3, [&](const RankContext& context) {
    epx_interrupted();
    {
      FaultRank rank(context, kLongMs);
      if (context.rank == 2) {
        std::this_thread::sleep_for(50ms);
        epx_interrupt();
        wait_until([&] { return num_ended == 2; });
      }
      check_soon("the call", [&] { check_status(rank.call(EPX_OP_DISPATCH), EPX_ERROR_ABORTED, "epx_dispatch"); });
      ++num_ended;
    }
    context.gather(0);
    epx_interrupted(); // that of rank 2, whose call found the group ended, and did not wait
    check_equal(epx_interrupted(), int32_t{0}, "what is left of the interrupt");
    FaultRank rank(context, kLongMs);
    context.gather(0);
    if (context.rank == 0) epx_interrupt();
    context.gather(0);
    check_equal(epx_interrupted(), int32_t{1}, "an interrupt between two calls");
    check_ok(rank.call(EPX_OP_DISPATCH), "epx_dispatch after the interrupt has been taken");
  });
}

// One of three ranks is interrupted in a step of a file rendezvous while the others have come or come later.
TEST_CASE("peers learn that a rank was interrupted while a group was created") {
  for (const int interrupted : {0, 1, 2}) {
    for (const bool others_are_late : {false, true}) {
      CAPTURE(interrupted);
      CAPTURE(others_are_late);
      const TempDirectory directory;
      std::atomic<bool> has_ended{false};
      run_threads(3, [&](int rank) {
        epx_bootstrap bootstrap{};
        check_ok(epx_bootstrap_file(directory.path().c_str(), "job", rank, 3, kLongMs, &bootstrap), "epx_bootstrap_file");
        GroupCase shape;
        shape.num_ranks = 3;
        shape.timeout_ms = kLongMs;
        const epx_group_config config = make_config(shape);
        epx_group group = nullptr;
        const bool is_interrupted = rank == interrupted;
        if (is_interrupted) {
          epx_interrupted();
          epx_set_interrupt_check([] { return int32_t{1}; });
        } else if (others_are_late) {
          wait_until([&] { return has_ended.load(); });
        }
        check_soon("epx_group_create", [&] {
          check_status(epx_group_create(&bootstrap, &config, &group), EPX_ERROR_ABORTED, "epx_group_create");
        });
        const std::string sentence = epx_last_error();
        if (is_interrupted) {
          check_tells(sentence, {"interrupted"}, "the rank that was interrupted");
          epx_set_interrupt_check(nullptr);
        } else {
          check_tells(sentence, {fmt::format("rank {}", interrupted), "interrupted"}, "a peer");
        }
        epx_bootstrap_free(&bootstrap); // before late ones have read what the rank left for them
        if (is_interrupted) has_ended = true;
      });
      CHECK(directory.entries().empty());
    }
  }
}

TEST_CASE("an all-gather of the caller's own asks epx_interrupted()") {
  epx_bootstrap bootstrap{};
  bootstrap.struct_size = sizeof(bootstrap);
  bootstrap.num_ranks = 2;
  bootstrap.all_gather = [](void*, const void*, void*, size_t, int64_t, char* message, size_t message_bytes) {
    const auto deadline = Clock::now() + 30s;
    while (epx_interrupted() == 0 && Clock::now() < deadline)
      std::this_thread::sleep_for(1ms);
    std::strncpy(message, "the caller's own sentence", message_bytes - 1);
    return EPX_ERROR_ABORTED;
  };
  GroupCase shape;
  shape.num_ranks = 2;
  const epx_group_config config = make_config(shape);
  epx_group group = nullptr;
  epx_set_interrupt_check(thread_is_to_end);
  std::thread handler([] {
    std::this_thread::sleep_for(50ms);
    ends_this_thread = true;
  });
  const auto begin = Clock::now();
  CHECK(epx_group_create(&bootstrap, &config, &group) == EPX_ERROR_ABORTED);
  CHECK(contains(epx_last_error(), "the caller's own sentence"));
  CHECK(Clock::now() - begin < kSoon);
  handler.join();
  ends_this_thread = false;
  epx_set_interrupt_check(nullptr);
}

} // namespace epx::test
