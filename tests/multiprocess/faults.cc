// SPDX-License-Identifier: Apache-2.0
// Sticky errors end a group; these tests check, with ranks as threads, who is named, who learns of it, and how soon.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/multiprocess/fault_rank.h"
#include "tests/support/check.h"
#include "tests/support/run_ranks.h"

namespace epx::test {

namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr int64_t kShortMs = 1'000; // for ranks that are to time out; a busy machine can make a call in this time
constexpr int64_t kLongMs = 60'000; // for ranks that must not time out
constexpr auto kSoon = 10s;         // much less than kLongMs

// Reports collects the reports of several ranks, for checks over all of them.
class Reports {
public:
  void add(const epx_group_report& report) {
    const std::scoped_lock lock(mutex_);
    reports_.push_back(report);
  }
  // At least one rank has timed out itself, and lists whom it waited for; the others may have learned of it from that rank.
  void check_missing(const std::vector<int>& missing, uint64_t expected, uint64_t seen) const {
    int waited = 0;
    for (const epx_group_report& report : reports_) {
      if (report.phase == EPX_PHASE_NONE) continue;
      ++waited;
      const std::vector<int> reported(report.missing, report.missing + report.num_missing);
      check(reported == missing, "{} ranks are missing instead of {}: \"{}\"", reported.size(), missing.size(),
            report.message);
      check_equal(report.expected, expected, "the call that was waited for");
      check_equal(report.seen, seen, "the last call that the culprit reached");
      check(report.phase == EPX_PHASE_ARRIVE, "another phase than that in which ranks arrive: \"{}\"", report.message);
      for (const uint64_t number : {static_cast<uint64_t>(kShortMs), expected, seen})
        check_says(report.message, std::to_string(number));
    }
    check(waited > 0, "no rank reports that it waited");
  }

private:
  std::mutex mutex_;
  std::vector<epx_group_report> reports_;
};

// Rank 1 of 3 calls `operation` only after the others have timed out.
void stay_away_from(epx_operation operation) {
  constexpr int kAbsent = 1;
  std::atomic<int> gave_up{0};
  Reports reports;
  const uint64_t sequence = operation == EPX_OP_PREPARE ? 1 : 2;
  with_ranks(3, [&](const RankContext& context) {
    FaultRank rank(context, context.rank == kAbsent ? kLongMs : kShortMs, FaultRank::MayFail{});
    if (sequence == 2) check_ok(rank.call(EPX_OP_PREPARE), "epx_prepare");
    if (context.rank == kAbsent) wait_until([&] { return gave_up == 2; });
    const auto begin = Clock::now();
    const epx_status status = rank.call(operation);
    const auto waited = Clock::now() - begin;
    const ExpectedFailure expected{EPX_ERROR_TIMEOUT, operation, kAbsent, sequence};
    const epx_group_report report = check_failed(rank, status, expected);
    if (context.rank == kAbsent) {
      check(waited < kSoon, "a late rank waited {} ms", waited / 1ms);
    } else {
      check_says(report.message, "rank 1");
      reports.add(report);
      ++gave_up;
    }
    rank.destroy();
  });
  reports.check_missing({kAbsent}, sequence, sequence - 1);
}

// Rank 0 and the others make different calls, or the same call with different fields. All of them must report it.
void disagree(epx_operation operation, epx_operation others_operation, const CallFields& terms,
              const CallFields& others_fields, epx_status status, const std::vector<std::string>& words) {
  with_ranks(3, [&](const RankContext& context) {
    FaultRank rank(context, kLongMs);
    const bool first = context.rank == 0;
    const epx_operation mine = first ? operation : others_operation;
    const auto begin = Clock::now();
    const epx_status returned = rank.call(mine, first ? terms : others_fields);
    check(Clock::now() - begin < kSoon, "ranks that disagree waited");
    const epx_group_report report = check_failed(rank, returned, {status, mine, {}, 2});
    for (const std::string& word : words) {
      check_says(report.message, word);
    }
    rank.destroy();
  });
}

void disagree_on(epx_operation operation, void (*change)(CallFields&), const std::vector<std::string>& words,
                 const CallFields& terms = {}) {
  CallFields others = terms;
  change(others);
  std::vector<std::string> all = words;
  all.insert(all.end(), {"rank 0", "rank 1"});
  disagree(operation, operation, terms, others, EPX_ERROR_MISMATCH, all);
}

} // namespace

TEST_CASE("a rank that does not come is named by all, and its own late call fails") {
  for (const epx_operation operation : {EPX_OP_PREPARE, EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_COMBINE_BWD,
                                        EPX_OP_DISPATCH_BWD, EPX_OP_DISPATCH_RANK_MAJOR, EPX_OP_PREPARE_DISPATCH,
                                        EPX_OP_RAGGED_ALL_TO_ALL, EPX_OP_MEM_ALLOC, EPX_OP_ALL_GATHER}) {
    CAPTURE(std::string(operation_name(operation)));
    stay_away_from(operation);
  }
}

TEST_CASE("two ranks that do not come are both listed") {
  Reports reports;
  std::atomic<int> gave_up{0};
  with_ranks(4, [&](const RankContext& context) {
    FaultRank rank(context, kShortMs);
    if (context.rank == 1 || context.rank == 2) {
      wait_until([&] { return gave_up == 2; });
      return;
    }
    const epx_status status = rank.call(EPX_OP_DISPATCH);
    const epx_group_report report = check_failed(rank, status, {EPX_ERROR_TIMEOUT, EPX_OP_DISPATCH, {}, 2});
    check(report.culprit == 1 || report.culprit == 2, "culprit is {}", report.culprit);
    reports.add(report);
    ++gave_up;
  });
  reports.check_missing({1, 2}, 2, 1);
}

TEST_CASE("a rank that has destroyed its group is named") {
  with_ranks(3, [&](const RankContext& context) {
    FaultRank rank(context, kShortMs);
    if (context.rank == 2) {
      rank.destroy();
      return;
    }
    const epx_status status = rank.call(EPX_OP_COMBINE);
    check_failed(rank, status, {EPX_ERROR_TIMEOUT, EPX_OP_COMBINE, 2, 2});
  });
}

TEST_CASE("abort from another thread unblocks this rank, and the peers learn of it") {
  std::atomic<int> returned{0};
  with_ranks(3, [&](const RankContext& context) {
    FaultRank rank(context, kLongMs);
    if (context.rank == 1) wait_until([&] { return returned == 2; });
    std::thread aborter;
    if (context.rank == 0) {
      aborter = std::thread([group = rank.group()] {
        std::this_thread::sleep_for(200ms);
        epx_group_abort(group);
      });
    }
    const auto begin = Clock::now();
    const epx_status status = rank.call(EPX_OP_DISPATCH);
    const auto waited = Clock::now() - begin;
    if (aborter.joinable()) aborter.join();
    ++returned;
    check(waited < kSoon, "rank {} waited {} ms", context.rank, waited / 1ms);
    const epx_group_report report = check_failed(rank, status, {EPX_ERROR_ABORTED, EPX_OP_DISPATCH, 0, 2});
    check(context.rank == 0 || contains(report.message, "rank 0"), "\"{}\" does not name rank 0", report.message);
    rank.destroy();
  });
}

TEST_CASE("abort before a call ends the group, also one of a single rank, and may be repeated") {
  for (const int num_ranks : {1, 2}) {
    with_ranks(num_ranks, [&](const RankContext& context) {
      FaultRank rank(context, kLongMs);
      context.gather(0);
      if (context.rank == 0) {
        check_ok(epx_group_abort(rank.group()), "epx_group_abort");
        check_ok(epx_group_abort(rank.group()), "the second epx_group_abort");
      }
      const epx_status status = rank.call(EPX_OP_COMBINE);
      const epx_group_report report = check_failed(rank, status, {EPX_ERROR_ABORTED, EPX_OP_COMBINE, 0, 2});
      const char* const word = context.rank == 0 ? "abort" : "rank 0";
      check_says(report.message, word);
    });
  }
}

TEST_CASE("ranks that make different calls are out of sequence") {
  const std::pair<epx_operation, epx_operation> pairs[] = {
      {EPX_OP_DISPATCH, EPX_OP_COMBINE},          {EPX_OP_PREPARE, EPX_OP_DISPATCH},
      {EPX_OP_COMBINE_BWD, EPX_OP_DISPATCH_BWD},  {EPX_OP_DISPATCH_RANK_MAJOR, EPX_OP_PREPARE},
      {EPX_OP_COMBINE_BWD, EPX_OP_PREPARE},       {EPX_OP_PREPARE_DISPATCH, EPX_OP_PREPARE},
      {EPX_OP_DISPATCH, EPX_OP_PREPARE_DISPATCH}, {EPX_OP_MEM_ALLOC, EPX_OP_DISPATCH},
      {EPX_OP_ALL_GATHER, EPX_OP_MEM_ALLOC},      {EPX_OP_RAGGED_ALL_TO_ALL, EPX_OP_DISPATCH}};
  for (const auto& pair : pairs) {
    const std::string first = operation_name(pair.first), second = operation_name(pair.second);
    CAPTURE(first);
    disagree(pair.first, pair.second, {}, {}, EPX_ERROR_OUT_OF_SEQUENCE, {first, second});
  }
}

TEST_CASE("ranks that free different memory are out of sequence") {
  with_ranks(2, [&](const RankContext& context) {
    FaultRank rank(context, kLongMs);
    void* memory[2] = {};
    for (void*& piece : memory)
      check_ok(epx_mem_alloc(rank.group(), 512, &piece), "epx_mem_alloc");
    check_ok(rank.call(EPX_OP_ALL_GATHER), "epx_group_all_gather");
    const epx_status status = epx_mem_free(rank.group(), memory[context.rank]);
    // prepare was call 1, and each of the calls since then counts as two
    check_failed(rank, status, {EPX_ERROR_OUT_OF_SEQUENCE, EPX_OP_MEM_FREE, {}, 8});
    check(epx_mem_free(rank.group(), memory[1 - context.rank]) != EPX_ERROR_TIMEOUT, "epx_mem_free waited");
  });
}

TEST_CASE("when ranks disagree on a field of a call, each reports the field, the ranks and the values") {
  for (const epx_operation operation :
       {EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_COMBINE_BWD, EPX_OP_DISPATCH_BWD, EPX_OP_PREPARE_DISPATCH}) {
    CAPTURE(std::string(operation_name(operation)));
    disagree_on(operation, [](CallFields& terms) { terms.hidden = 7; }, {"hidden", "8", "7"});
    disagree_on(operation, [](CallFields& terms) { terms.dtype = EPX_BFLOAT16; }, {"dtype", "float32", "bfloat16"});
    disagree_on(operation, [](CallFields& terms) { terms.top_k = 3; }, {"top_k", "2", "3"});
    disagree_on(operation, [](CallFields& terms) { terms.alignment = 8; }, {"alignment", "4", "8"});
  }
  disagree_on(EPX_OP_PREPARE, [](CallFields& terms) { terms.top_k = 3; }, {"top_k", "2", "3"});
  disagree_on(EPX_OP_PREPARE, [](CallFields& terms) { terms.alignment = 8; }, {"alignment", "4", "8"});
  for (const epx_operation operation : {EPX_OP_PREPARE, EPX_OP_PREPARE_DISPATCH})
    disagree_on(operation, [](CallFields& terms) { terms.zone_stride = 8; }, {"zone_stride", "0", "8"});
  disagree_on(EPX_OP_DISPATCH, [](CallFields& terms) { terms.sidecar_bytes = 5; }, {"sidecar", "0", "5"});
  for (const epx_operation operation : {EPX_OP_DISPATCH_RANK_MAJOR, EPX_OP_COMBINE_RANK_MAJOR})
    disagree_on(operation, [](CallFields& terms) { terms.rows_per_source = 0; }, {"M", "4", "0"});
  disagree_on(EPX_OP_DISPATCH_RANK_MAJOR, [](CallFields& terms) { terms.row_spacing = EPX_ROWS_COMPACT; },
              {"row_spacing", "EPX_ROWS_STRIDED", "EPX_ROWS_COMPACT"});
  for (const epx_operation operation : {EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_COMBINE_BWD, EPX_OP_PREPARE_DISPATCH}) {
    disagree_on(operation, [](CallFields& terms) { terms.weights = false; }, {"weights"});
  }
  for (const epx_operation operation : {EPX_OP_COMBINE_BWD, EPX_OP_DISPATCH_BWD, EPX_OP_DISPATCH_RANK_MAJOR_BWD}) {
    disagree_on(operation, [](CallFields& terms) { terms.grads = false; }, {"weights"});
  }
}

TEST_CASE("when ranks disagree on a ragged_all_to_all, each reports what on, the ranks and the values") {
  constexpr auto kRagged = EPX_OP_RAGGED_ALL_TO_ALL;
  disagree_on(kRagged, [](CallFields& terms) { terms.slices_per_rank = 2; }, {"slices", "3", "6"});
  disagree_on(kRagged, [](CallFields& terms) { terms.hidden = 7; }, {"row", "bytes", "32", "28"});
  disagree_on(kRagged, [](CallFields& terms) { terms.dtype = EPX_FLOAT16; }, {"row", "bytes", "32", "16"});
  disagree_on(kRagged, [](CallFields& terms) { terms.direction = EPX_SLICES_TRANSPOSED; }, {"direction"});
}

TEST_CASE("row formats that differ between ranks are reported with the ranks and the values") {
  for (const epx_operation operation :
       {EPX_OP_COMBINE, EPX_OP_DISPATCH_BWD, EPX_OP_COMBINE_RANK_MAJOR, EPX_OP_DISPATCH_RANK_MAJOR_BWD}) {
    CallFields terms; // of rank 0
    terms.scaling = EPX_SCALING_BLOCK128;
    disagree_on(
        operation, [](CallFields& others) { others.scaling = EPX_SCALING_MX; }, {"scaling", "block128", "mx"}, terms);
    disagree_on(
        operation, [](CallFields& others) { others.scaling = EPX_SCALING_NONE; }, {"scaling", "block128", "none"}, terms);
    disagree_on(
        operation, [](CallFields& others) { others.amax_floor = 0.5F; }, {"amax_floor", "0", "0.5"}, terms);
  }
  for (const epx_operation operation : {EPX_OP_DISPATCH, EPX_OP_PREPARE_DISPATCH, EPX_OP_COMBINE_BWD,
                                        EPX_OP_DISPATCH_RANK_MAJOR, EPX_OP_COMBINE_RANK_MAJOR_BWD}) {
    CallFields terms;      // of rank 0; the wire is quantised
    terms.weights = false; // which not all scalings take in combine_bwd
    terms.scaling = EPX_SCALING_BLOCK128;
    disagree_on(
        operation, [](CallFields& others) { others.scaling = EPX_SCALING_BLOCK128_POW2; },
        {"scaling", "block128", "block128_pow2"}, terms);
    disagree_on(
        operation, [](CallFields& others) { others.scaling = EPX_SCALING_NONE; }, {"scaling", "block128", "none"}, terms);
    terms.amax_floor = 0.25F;
    disagree_on(
        operation, [](CallFields& others) { others.amax_floor = 0.5F; }, {"amax_floor", "0.25", "0.5"}, terms);
    terms.amax_floor = 0.0F;
    disagree_on(
        operation, [](CallFields& others) { others.scales = EPX_FLOAT32; }, // b, not c
        {"dtype", "receive", "float32", "float8_e4m3"}, terms);
    terms.scaling = EPX_SCALING_MX;
    disagree_on(
        operation, [](CallFields& others) { others.elements = EPX_FLOAT8_E5M2; },
        {"format.dtype", "float8_e4m3", "float8_e5m2"}, terms);
    terms.scaling = EPX_SCALING_BLOCK128_POW2;
    terms.scales = EPX_FLOAT8_E8M0;
    disagree_on(
        operation, [](CallFields& others) { others.scales = EPX_FLOAT32; }, {"scales", "float8_e8m0", "float32"}, terms);
  }
}

TEST_CASE("the same ranks form a new group after a failure") {
  with_ranks(3, [&](const RankContext& context) {
    {
      FaultRank rank(context, kShortMs);
      if (context.rank != 0) check_status(rank.call(EPX_OP_DISPATCH), EPX_ERROR_TIMEOUT, "epx_dispatch");
      context.gather(0);
    }
    FaultRank rank(context, kLongMs);
    check_ok(rank.call(EPX_OP_DISPATCH), "epx_dispatch in the new group");
    check_ok(rank.call(EPX_OP_COMBINE), "epx_combine in the new group");
  });
}

} // namespace epx::test
