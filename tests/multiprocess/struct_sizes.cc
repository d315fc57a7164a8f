// SPDX-License-Identifier: Apache-2.0
// These tests call as newer callers do, whose structs are larger than this library's, and as older ones do, whose outputs are
// smaller.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "epx/epx.h"
#include "tests/multiprocess/bytes_0_1.h"
#include "tests/multiprocess/layer_round.h"
#include "tests/multiprocess/sentences.h"
#include "tests/multiprocess/with_group.h"
#include "tests/support/check.h"
#include "tests/support/meeting.h"

namespace epx::test {
namespace {

// A caller's struct of `bytes` bytes consists of what this version knows and of bytes beyond that.
template <typename Struct>
struct alignas(Struct) CallersStruct {
  unsigned char storage[kMaxStructBytes + 64] = {};

  Struct& known() { return *reinterpret_cast<Struct*>(storage); }
};

template <typename Args>
struct Operation {
  Op op;
  const char* struct_name;
  epx_status (*function)(epx_group, const Args*);
  Args Calls::*args;
};

// Calls `check_one` with each of the operations. Those of the rank-major layout come first, because outputs of the others are
// theirs too.
template <typename CheckOne>
void for_each_operation(CheckOne&& check_one) {
  check_one(Operation<epx_ragged_all_to_all_args>{Op::ragged_all_to_all, "epx_ragged_all_to_all_args",
                                                  epx_ragged_all_to_all, &Calls::ragged_all_to_all});
  check_one(Operation<epx_dispatch_rank_major_args>{Op::dispatch_rank_major, "epx_dispatch_rank_major_args",
                                                    epx_dispatch_rank_major, &Calls::dispatch_rank_major});
  check_one(Operation<epx_combine_rank_major_args>{Op::combine_rank_major, "epx_combine_rank_major_args",
                                                   epx_combine_rank_major, &Calls::combine_rank_major});
  check_one(Operation<epx_combine_rank_major_bwd_args>{Op::combine_rank_major_bwd, "epx_combine_rank_major_bwd_args",
                                                       epx_combine_rank_major_bwd, &Calls::combine_rank_major_bwd});
  check_one(Operation<epx_dispatch_rank_major_bwd_args>{Op::dispatch_rank_major_bwd, "epx_dispatch_rank_major_bwd_args",
                                                        epx_dispatch_rank_major_bwd, &Calls::dispatch_rank_major_bwd});
  check_one(Operation<epx_prepare_args>{Op::prepare, "epx_prepare_args", epx_prepare, &Calls::prepare});
  check_one(Operation<epx_dispatch_args>{Op::dispatch, "epx_dispatch_args", epx_dispatch, &Calls::dispatch});
  check_one(Operation<epx_prepare_dispatch_args>{Op::prepare_dispatch, "epx_prepare_dispatch_args", epx_prepare_dispatch,
                                                 &Calls::prepare_dispatch});
  check_one(Operation<epx_combine_args>{Op::combine, "epx_combine_args", epx_combine, &Calls::combine});
  check_one(Operation<epx_combine_bwd_args>{Op::combine_bwd, "epx_combine_bwd_args", epx_combine_bwd, &Calls::combine_bwd});
  check_one(
      Operation<epx_dispatch_bwd_args>{Op::dispatch_bwd, "epx_dispatch_bwd_args", epx_dispatch_bwd, &Calls::dispatch_bwd});
}

TEST_CASE("larger args with zeros beyond what this library knows are taken") {
  with_group(round_config(), [](epx_group group, int rank) {
    LayerRound round(group, rank);
    for (const size_t more : {size_t{8}, size_t{64}, kMaxStructBytes}) {
      round.scribble_outputs();
      for_each_operation([&]<typename Args>(const Operation<Args>& operation) {
        const auto calls = round.calls();
        CallersStruct<Args> callers;
        callers.known() = (*calls).*operation.args;
        const size_t bytes = std::min(sizeof(Args) + more, kMaxStructBytes);
        callers.known().struct_size = bytes;
        callers.storage[bytes] = 1; // this byte is not part of the struct
        check_ok(operation.function(group, &callers.known()), operation.struct_name);
      });
      round.check_results();
    }
    round.run_all();
  });
}

TEST_CASE("args of the size that their struct had at first are taken") {
  with_group(round_config(), [](epx_group group, int rank) {
    LayerRound round(group, rank);
    round.scribble_outputs();
    for_each_operation([&]<typename Args>(const Operation<Args>& operation) {
      const auto calls = round.calls();
      CallersStruct<Args> callers;
      callers.known() = (*calls).*operation.args;
      callers.known().struct_size = kBytes01<Args>;
      std::memset(callers.storage + kBytes01<Args>, 0xa5, sizeof(callers.storage) - kBytes01<Args>);
      check_ok(operation.function(group, &callers.known()), operation.struct_name);
    });
    round.check_results();
  });
}

TEST_CASE("larger args whose bytes beyond what this library knows are not zero are refused") {
  with_group(round_config(), [](epx_group group, int rank) {
    LayerRound round(group, rank);
    round.run_all();
    for (const size_t behind : {size_t{0}, size_t{7}, size_t{100}}) {
      for_each_operation([&]<typename Args>(const Operation<Args>& operation) {
        // Both ranks walk the same table, and take turns in spoiling their call.
        if ((static_cast<int>(operation.op) + static_cast<int>(behind)) % kRanks == rank) {
          const auto calls = round.calls();
          CallersStruct<Args> callers;
          callers.known() = (*calls).*operation.args;
          const size_t bytes = sizeof(Args) + 104;
          callers.known().struct_size = bytes;
          callers.storage[sizeof(Args) + behind] = 0x80;
          callers.storage[bytes - 1] = 1; // not the first
          round.scribble_outputs();
          const std::vector<std::byte> before = round.memory();
          check_status(operation.function(group, &callers.known()), EPX_ERROR_INVALID_ARGUMENT, operation.struct_name);
          check_tells(epx_last_error(),
                      {std::string(operation.struct_name) + ".struct_size is " + std::to_string(bytes),
                       "knows " + std::to_string(sizeof(Args)) + " bytes",
                       "byte " + std::to_string(sizeof(Args) + behind) + " is not 0"},
                      operation.struct_name);
          check(round.memory() == before, "{}: memory has changed", operation.struct_name);
        }
        round.run_all();
      });
    }
  });
}

// It never grows, and its sentence is that of other structs, without the function.
TEST_CASE("a row format of another size is refused") {
  with_group(round_config(), [](epx_group group, int rank) {
    LayerRound round(group, rank);
    round.run_all();
    for (const Op op : {Op::dispatch, Op::prepare_dispatch, Op::dispatch_rank_major}) {
      for (const size_t bytes : {size_t{0}, sizeof(epx_row_format) - 8, sizeof(epx_row_format) + 8}) {
        const auto calls = round.calls();
        give_format(*calls, op, {.way = FormatWay::on_wire});
        set_prepare_dispatch(*calls);
        calls->format.struct_size = bytes;
        check_status(call(op, *calls), EPX_ERROR_INVALID_ARGUMENT, "epx_row_format");
        check_tells(epx_last_error(),
                    {"epx_row_format.struct_size is " + std::to_string(bytes), std::to_string(sizeof(epx_row_format))},
                    "epx_row_format");
      }
    }
    round.run_all();
  });
}

// Asks for an output of each size, by `fill`, and compares it with `whole`, which is what a caller of this version gets.
template <typename Struct, typename Fill>
void check_output_sizes(const char* name, const Struct& whole, const Fill& fill) {
  for (const size_t bytes : {kBytes01<Struct>, sizeof(Struct), sizeof(Struct) + 8, kMaxStructBytes}) {
    CallersStruct<Struct> callers;
    std::memset(callers.storage, 0xa5, sizeof(callers.storage));
    callers.known().struct_size = bytes;
    check_ok(fill(&callers.known()), name);
    check_equal(callers.known().struct_size, bytes, std::string(name) + ".struct_size");
    const size_t filled = std::min(bytes, sizeof(Struct));
    check(std::memcmp(callers.storage + sizeof(size_t), reinterpret_cast<const unsigned char*>(&whole) + sizeof(size_t),
                      filled - sizeof(size_t)) == 0,
          "{} of {} bytes: the values differ", name, bytes);
    for (size_t i = filled; i < sizeof(callers.storage); ++i)
      check_equal(static_cast<int>(callers.storage[i]), i < bytes ? 0 : 0xa5,
                  fmt::format("byte {} of an {} of {} bytes", i, name, bytes));
  }
  for (const size_t bytes : {size_t{0}, kBytes01<Struct> - 8, kBytes01<Struct> + 4, kMaxStructBytes + 8}) {
    CallersStruct<Struct> callers;
    std::memset(callers.storage, 0xa5, sizeof(callers.storage));
    callers.known().struct_size = bytes;
    const CallersStruct<Struct> before = callers;
    check_status(fill(&callers.known()), EPX_ERROR_INVALID_ARGUMENT, name);
    check_tells(epx_last_error(), {std::string(name) + ".struct_size is " + std::to_string(bytes)}, name);
    check(std::memcmp(&callers, &before, sizeof(callers)) == 0, "{}: an output has changed", name);
  }
}

TEST_CASE("outputs of any size get the fields that both versions know, and zeros beyond") {
  const epx_group_config config = round_config();
  epx_memory_plan plan{};
  plan.struct_size = sizeof(plan);
  CHECK(epx_group_memory_plan(&config, kRanks, &plan) == EPX_SUCCESS);
  CHECK_NOTHROW(check_output_sizes("epx_memory_plan", plan,
                                   [&](epx_memory_plan* out) { return epx_group_memory_plan(&config, kRanks, out); }));
  Meeting prepared(kRanks);
  with_group(config, [&](epx_group group, int rank) {
    epx_group_info group_info{};
    group_info.struct_size = sizeof(group_info);
    check_ok(epx_group_query(group, &group_info), "epx_group_query");
    check_output_sizes("epx_group_info", group_info, [&](epx_group_info* out) { return epx_group_query(group, out); });

    // A report that is refused clears no event.
    LayerRound round(group, rank);
    round.mask(0, 0, kExperts);
    round.run(Op::prepare);
    epx_group_report report{};
    check_status(epx_group_status(group, &report), EPX_ERROR_INVALID_ARGUMENT, "epx_group_status of struct_size 0");
    report.struct_size = sizeof(report);
    check_ok(epx_group_status(group, &report), "epx_group_status");
    check_equal<uint64_t>(report.event_counts[EPX_EVENT_BAD_INDEX], 1, "the number of bad indices");

    // From here on each report has the same contents. An abort while the peer is still in prepare would end that, too.
    prepared.wait();
    check_ok(epx_group_abort(group), "epx_group_abort");
    check_status(call(Op::prepare, *round.calls()), EPX_ERROR_ABORTED, "prepare on an aborted group");
    check_ok(epx_group_status(group, &report), "epx_group_status");
    check(report.status == EPX_ERROR_ABORTED && report.message[0] != '\0', "the abort is not reported");
    check_output_sizes("epx_group_report", report, [&](epx_group_report* out) { return epx_group_status(group, out); });
  });
}

} // namespace
} // namespace epx::test
