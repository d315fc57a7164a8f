// SPDX-License-Identifier: Apache-2.0
// These scenarios run ragged_all_to_all, and compare each output byte for byte, also where nothing lands.
#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/multiprocess/conformance.h"
#include "tests/support/check.h"
#include "tests/support/slices.h"

namespace epx::test {

namespace {

using Problems = std::deque<SliceProblem>;

constexpr int64_t kInt32Min = std::numeric_limits<int32_t>::min(), kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kInt64Min = std::numeric_limits<int64_t>::min(), kInt64Max = std::numeric_limits<int64_t>::max();
constexpr int64_t kTwoTo32 = int64_t{1} << 32;
constexpr int64_t kArenaBytes = 1 << 18;

int num_ranks() {
  return launcher().num_ranks();
}

Slices random_slices(int per_peer, int64_t most_rows, Rng& rng) {
  return random_slices(num_ranks(), per_peer, most_rows, rng);
}

void add_both_ways(Problems& problems, const Slices& slices, const RowShape& row, Rng& rng) {
  for (const auto direction : {EPX_SLICES_FORWARD, EPX_SLICES_TRANSPOSED})
    problems.emplace_back(slices, direction, row, rng);
}

// Runs `scenario` in a group whose rows are short, with memory that peers reach.
void in_group(uint64_t seed, const std::function<void(GroupRun& group, Rng& rng)>& scenario) {
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, base_case().group);
    group.add_arena(kArenaBytes);
    Rng rng(mix(seed, static_cast<uint64_t>(context.rank)));
    scenario(group, rng);
  });
}

// Each call has come to its end on a rank before its next begins there.
void run_all(const Problems& problems, Placement placement, uint64_t seed) {
  in_group(seed, [&](GroupRun& group, Rng& rng) {
    for (size_t i = 0; i < problems.size(); ++i)
      run(group, problems[i], i / 2 % 2 == 0 ? EPX_INT32 : EPX_INT64, placement, rng);
  });
}

// ---- Slices that do not move -------------------------------------------------------------------------------------------

// Makes a slice bad that has rows.
using SpoilSlice = void (*)(Slices& all, Slice bad);

void set_sizes(Slices& all, Slice bad, int64_t size) {
  all.send_size(bad) = all.recv_size(bad) = size;
}

constexpr SpoilSlice kSpoils[] = {
    // The two ranks disagree.
    [](Slices& all, Slice bad) { ++all.recv_size(bad); },
    [](Slices& all, Slice bad) { --all.recv_size(bad); },
    [](Slices& all, Slice bad) { all.recv_size(bad) = 0; },
    [](Slices& all, Slice bad) { all.send_size(bad) = 0; },
    [](Slices& all, Slice bad) { all.recv_size(bad) = -1; },
    [](Slices& all, Slice bad) { all.send_size(bad) = -all.send_size(bad); },
    // A negative size.
    [](Slices& all, Slice bad) { set_sizes(all, bad, -1); },
    [](Slices& all, Slice bad) { set_sizes(all, bad, kInt32Min); },
    // It leaves the near tensor.
    [](Slices& all, Slice bad) { all.input_offset(bad) = -1; },
    [](Slices& all, Slice bad) { all.input_offset(bad) = kInt32Min; },
    [](Slices& all, Slice bad) { all.input_offset(bad) = all.near_rows(bad) - all.send_size(bad) + 1; },
    [](Slices& all, Slice bad) { all.input_offset(bad) = kInt32Max; },
    // It leaves the far tensor.
    [](Slices& all, Slice bad) { all.output_offset(bad) = -1; },
    [](Slices& all, Slice bad) { all.output_offset(bad) = kInt32Min; },
    [](Slices& all, Slice bad) { all.output_offset(bad) = all.far_rows(bad) - all.send_size(bad) + 1; },
    [](Slices& all, Slice bad) { all.output_offset(bad) = kInt32Max; },
    // It is too long.
    [](Slices& all, Slice bad) { set_sizes(all, bad, all.near_rows(bad) + all.far_rows(bad)); },
    [](Slices& all, Slice bad) { set_sizes(all, bad, kInt32Max); },
};

constexpr SpoilSlice kWideSpoils[] = {
    // Most of these would be right if they were cut to 32 bits.
    [](Slices& all, Slice bad) { all.recv_size(bad) += kTwoTo32; },
    [](Slices& all, Slice bad) { all.send_size(bad) -= kTwoTo32; },
    [](Slices& all, Slice bad) { set_sizes(all, bad, all.send_size(bad) + kTwoTo32); },
    [](Slices& all, Slice bad) { set_sizes(all, bad, all.send_size(bad) - kTwoTo32); },
    [](Slices& all, Slice bad) { set_sizes(all, bad, kTwoTo32); },
    [](Slices& all, Slice bad) { all.input_offset(bad) += kTwoTo32; },
    [](Slices& all, Slice bad) { all.input_offset(bad) -= kTwoTo32; },
    [](Slices& all, Slice bad) { all.output_offset(bad) += kTwoTo32; },
    [](Slices& all, Slice bad) { all.output_offset(bad) -= kTwoTo32; },
    // Their ends, or their bytes, are beyond 64 bits.
    [](Slices& all, Slice bad) { all.input_offset(bad) = kInt64Max; },
    [](Slices& all, Slice bad) { all.input_offset(bad) = kInt64Min; },
    [](Slices& all, Slice bad) { all.output_offset(bad) = kInt64Max; },
    [](Slices& all, Slice bad) { all.output_offset(bad) = kInt64Min; },
    [](Slices& all, Slice bad) { set_sizes(all, bad, kInt64Max); },
    [](Slices& all, Slice bad) { set_sizes(all, bad, kInt64Min); },
    [](Slices& all, Slice bad) { set_sizes(all, bad, kInt64Max / 2 + 2); },
};

// Returns slices of which every second that has rows is bad, by each of `spoils` in turn.
Slices bad_slices(const std::vector<SpoilSlice>& spoils, Rng& rng) {
  const int wanted = 3 * static_cast<int>(spoils.size()); // a fifth has no rows
  Slices slices = random_slices(wanted / (num_ranks() * num_ranks()) + 1, 4, rng);
  size_t num_seen = 0;
  for (const Slice slice : slices.in_random_order(rng))
    if (slices.send_size(slice) > 0 && num_seen++ % 2 == 0) spoils[num_seen / 2 % spoils.size()](slices, slice);
  check(num_seen >= 2 * spoils.size(), "{} slices do not have each of {} faults", num_seen, spoils.size());
  return slices;
}

Slices bad_slices(Rng& rng) {
  return bad_slices({std::begin(kSpoils), std::end(kSpoils)}, rng);
}

Slices bad_wide_slices(Rng& rng) {
  std::vector<SpoilSlice> spoils(std::begin(kSpoils), std::end(kSpoils));
  spoils.insert(spoils.end(), std::begin(kWideSpoils), std::end(kWideSpoils));
  return bad_slices(spoils, rng);
}

} // namespace

TEST_CASE("ragged: random slices of rows of every dtype and width, and back") {
  const RowShape kRows[] = {
      {EPX_UINT8, {}, 1},
      {EPX_UINT8, {3}, 3},
      {EPX_FLOAT4_E2M1, {6}, 3},
      {EPX_INT32, {}, 4},
      {EPX_FLOAT8_E8M0, {5}, 5},
      {EPX_FLOAT16, {3}, 6},
      {EPX_BFLOAT16, {7, 1}, 14},
      {EPX_FLOAT8_E4M3, {2, 4, 2}, 16},
      {EPX_FLOAT4_E2M1, {3, 16, 2}, 48},
      {EPX_INT64, {1, 5}, 40},
      {EPX_FLOAT64, {8}, 64},
      {EPX_FLOAT8_E5M2, {33}, 33},
      {EPX_FLOAT32, {2, 3, 43}, 1032}, // longer than a row of the group
      {EPX_UINT8, {4099}, 4099},
  };
  Problems problems;
  Rng rng(200);
  int number = 0;
  for (const RowShape& row : kRows)
    add_both_ways(problems, random_slices(1 + number++ % 3, 4, rng), row, rng);
  run_all(problems, Placement::random, 201);
}

TEST_CASE("ragged: outputs in memory that peers reach, in that of the rank alone, and in both by rank") {
  Problems problems;
  Rng rng(210);
  for (const RowShape& row : {RowShape{EPX_UINT8, {5}, 5}, RowShape{EPX_FLOAT32, {8}, 32}, RowShape{EPX_UINT8, {64}, 64}})
    add_both_ways(problems, random_slices(2, 5, rng), row, rng);
  for (const auto placement : {Placement::plain, Placement::in_place})
    run_all(problems, placement, 211);
  in_group(212, [&](GroupRun& group, Rng& local) {
    for (const int first : {0, 1})
      for (const SliceProblem& problem : problems)
        run(group, problem, EPX_INT32, (group.rank() + first) % 2 == 0 ? Placement::in_place : Placement::plain, local);
    for (int i = 0; i < 8; ++i) // of single bytes, at odd offsets too
      run(group, problems[static_cast<size_t>(i) % 2], EPX_INT32, Placement::in_place, local);
  });
}

TEST_CASE("ragged: as many slices as a call may have") {
  Problems problems;
  Rng rng(220);
  add_both_ways(problems, random_slices(EPX_MAX_SLICES / num_ranks(), 1, rng), {EPX_FLOAT16, {1}, 2}, rng);
  run_all(problems, Placement::random, 221);
}

TEST_CASE("ragged: tensors without rows, ranks that send or get nothing, and calls that move nothing") {
  Problems problems;
  Rng rng(230);
  const RowShape row = {EPX_FLOAT32, {3}, 12};
  for (const bool is_silent : {true, false}) // or gets nothing
    for (const int lone : {0, num_ranks() - 1}) {
      Slices slices(num_ranks(), 2);
      for (const Slice slice : slices.in_random_order(rng))
        if ((is_silent ? slice.sender : slices.receiver(slice.number)) != static_cast<size_t>(lone))
          slices.send_size(slice) = rng.between(1, 3);
      slices.place(rng);
      add_both_ways(problems, slices, row, rng);
    }
  Slices nothing(num_ranks(), 3);
  nothing.place(rng);
  add_both_ways(problems, nothing, row, rng);
  for (RankSlices& rank : nothing.ranks) // the tensors have rows
    rank.near_rows = rank.far_rows = 4;
  add_both_ways(problems, nothing, row, rng);
  run_all(problems, Placement::random, 231);
}

TEST_CASE("ragged: slices that overlap where they are read, as in an all-gather") {
  const RowShape row = {EPX_BFLOAT16, {9}, 18};
  Rng rng(240);
  Slices gathered(num_ranks(), 1); // input_offsets are 0
  int64_t all_rows = 0;
  for (RankSlices& rank : gathered.ranks) {
    rank.near_rows = rng.between(1, 9);
    rank.send_sizes.assign(rank.send_sizes.size(), rank.near_rows);
    rank.output_offsets.assign(rank.output_offsets.size(), all_rows);
    all_rows += rank.near_rows;
  }
  for (RankSlices& rank : gathered.ranks) {
    rank.far_rows = all_rows;
    for (size_t peer = 0; peer < gathered.ranks.size(); ++peer)
      rank.recv_sizes[peer] = gathered.ranks[peer].near_rows;
  }
  Slices spread(num_ranks(), 2); // in the transpose, far rows are read
  for (const Slice slice : spread.in_random_order(rng)) {
    set_sizes(spread, slice, 3);
    spread.input_offset(slice) = 3 * static_cast<int64_t>(slice.number);
    spread.output_offset(slice) = rng.below(6);
    spread.near_rows(slice) = 3 * static_cast<int64_t>(spread.num_slices());
    spread.far_rows(slice) = 8;
  }
  Problems problems;
  problems.emplace_back(gathered, EPX_SLICES_FORWARD, row, rng);
  problems.emplace_back(spread, EPX_SLICES_TRANSPOSED, row, rng);
  for (const auto& output : SliceOutcome(problems.front()).outputs)
    CHECK(output == SliceOutcome(problems.front()).outputs.front()); // all ranks have the rows of all
  run_all(problems, Placement::random, 241);
}

TEST_CASE("ragged: parts of equal size, all to all") {
  constexpr int64_t kPart = 3, kRowBytes = 16;
  Rng rng(250);
  Slices slices(num_ranks(), 1);
  for (const Slice slice : slices.in_random_order(rng)) {
    set_sizes(slices, slice, kPart);
    slices.input_offset(slice) = kPart * static_cast<int64_t>(slice.number);
    slices.output_offset(slice) = kPart * static_cast<int64_t>(slice.sender);
    slices.near_rows(slice) = slices.far_rows(slice) = kPart * num_ranks();
  }
  Problems problems;
  add_both_ways(problems, slices, {EPX_FLOAT32, {4}, kRowBytes}, rng);
  const SliceOutcome outcome(problems.front());
  constexpr size_t kBytes = kPart * kRowBytes;
  for (size_t to = 0; to < slices.ranks.size(); ++to)
    for (size_t from = 0; from < slices.ranks.size(); ++from)
      CHECK(std::memcmp(outcome.outputs[to].data() + from * kBytes, problems.front().operands[from].data() + to * kBytes,
                        kBytes) == 0);
  run_all(problems, Placement::random, 251);
}

TEST_CASE("ragged: the transpose brings back the rows that were sent, and no call waits for the one before it") {
  Rng rng(260);
  Problems forward, back;
  for (const int per_peer : {1, 2, 3}) {
    const SliceProblem& there =
        forward.emplace_back(random_slices(per_peer, 6, rng), EPX_SLICES_FORWARD, RowShape{EPX_FLOAT32, {5}, 20}, rng);
    SliceProblem& again = back.emplace_back(there.slices, EPX_SLICES_TRANSPOSED, there.row, rng);
    again.operands = SliceOutcome(there).outputs;
    const SliceOutcome returned(again);
    for (Slice slice : there.slices.in_random_order(rng)) {
      const RankSlices& rank = there.slices.ranks[slice.sender];
      const auto bytes = static_cast<size_t>(rank.send_sizes[slice.number] * there.row.bytes);
      if (bytes == 0) continue;
      const auto offset = static_cast<size_t>(rank.input_offsets[slice.number] * there.row.bytes);
      CHECK(std::memcmp(returned.outputs[slice.sender].data() + offset, there.operands[slice.sender].data() + offset,
                        bytes) == 0);
    }
  }
  for (const auto placement : {Placement::plain, Placement::random})
    in_group(261, [&](GroupRun& group, Rng& local) {
      SliceCalls calls(group, placement, local);
      for (size_t i = 0; i < forward.size(); ++i) // each transpose reads what the call before it writes
        calls.make(back[i], EPX_INT64, calls.make(forward[i], EPX_INT32));
      calls.check_results();
    });
}

TEST_CASE("ragged: outputs that pass through the staging of a small group in many rounds") {
  GroupCase small = base_case().group;
  small.num_experts = small.num_ranks;
  small.max_tokens = 2;
  small.hidden_dim = 4;
  small.max_top_k = small.max_alignment = 1;
  Problems problems;
  Rng rng(270);
  // Few long slices, many short ones, and rows longer than what is staged for a rank.
  add_both_ways(problems, random_slices(1, 150, rng), {EPX_FLOAT32, {6}, 24}, rng);
  add_both_ways(problems, random_slices(24, 9, rng), {EPX_UINT8, {7}, 7}, rng);
  add_both_ways(problems, random_slices(2, 3, rng), {EPX_UINT8, {5003}, 5003}, rng);
  add_both_ways(problems, bad_slices(rng), {EPX_FLOAT64, {2, 2}, 32}, rng); // events have the number of the call
  for (const auto placement : {Placement::plain, Placement::random})
    on_every_rank([&](const RankContext& context) {
      GroupRun group(context, small);
      group.add_arena(kArenaBytes);
      Rng local(mix(271, static_cast<uint64_t>(context.rank)));
      SliceCalls calls(group, placement, local);
      for (const SliceProblem& problem : problems)
        calls.make(problem, EPX_INT32);
      calls.check_results();
    });
}

TEST_CASE("ragged: on GPUs an output that would take too many rounds is refused") {
  if (is_on_host() || num_ranks() == 1) return; // a lone rank stages nothing
  Rng rng(275);
  const SliceProblem good(random_slices(1, 4, rng), EPX_SLICES_FORWARD, RowShape{EPX_UINT8, {512}, 512}, rng);
  in_group(276, [&](GroupRun& group, Rng& local) {
    std::vector<Arena> none;
    CallBuffers buffers(group.device(), none, Placement::plain, local);
    const std::vector<std::byte> zeros(4096);
    const Tensor operand(buffers.input("operand", zeros, 16), EPX_UINT8, {8, 512});
    const Tensor integers(buffers.input("integers", zeros, 4), EPX_INT32, {num_ranks()});
    // Nothing lies there, and nothing is touched.
    const Tensor output(reinterpret_cast<void*>(uintptr_t{1} << 56), EPX_UINT8, {kInt32Max, 512});
    std::string sentence;
    epx_status status = EPX_SUCCESS;
    try {
      group.view().ragged_all_to_all({.stream = group.device().stream(),
                                      .operand = operand,
                                      .output = output,
                                      .input_offsets = integers,
                                      .send_sizes = integers,
                                      .output_offsets = integers,
                                      .recv_sizes = integers});
    } catch (const Error& error) {
      status = error.status();
      sentence = error.what();
    }
    check_status(status, EPX_ERROR_UNSUPPORTED, "epx_ragged_all_to_all");
    for (const char* const word : {"epx_ragged_all_to_all", "output", "512"})
      check_says(sentence, word);
    run(group, good, EPX_INT32, Placement::plain, local);
  });
}

TEST_CASE("ragged: bad slices do not move, both ranks report them, and the others arrive") {
  const RowShape row = {EPX_FLOAT16, {5}, 10};
  Rng rng(280);
  Problems narrow, wide;
  add_both_ways(narrow, bad_slices(rng), row, rng);
  add_both_ways(wide, bad_wide_slices(rng), row, rng);
  const SliceProblem good(random_slices(2, 4, rng), EPX_SLICES_FORWARD, row, rng);
  in_group(281, [&](GroupRun& group, Rng& local) {
    for (const auto placement : {Placement::plain, Placement::in_place}) {
      for (const SliceProblem& problem : narrow)
        for (const auto integers : {EPX_INT32, EPX_INT64})
          run(group, problem, integers, placement, local);
      for (const SliceProblem& problem : wide)
        run(group, problem, EPX_INT64, placement, local);
      run(group, good, EPX_INT32, placement, local);
    }
  });
}

TEST_CASE("ragged: one bad slice is reported by its two ranks alone") {
  if (num_ranks() == 1) return;
  Rng rng(290);
  Problems problems;
  const int last = num_ranks() - 1;
  for (const auto& [from, to] : {std::pair{0, last}, std::pair{last, 0}, std::pair{1, 1}}) {
    Slices slices = random_slices(2, 4, rng);
    const Slice bad = {static_cast<size_t>(from), 2 * static_cast<size_t>(to) + 1};
    set_sizes(slices, bad, 5);
    slices.input_offset(bad) = slices.near_rows(bad) - 4;
    slices.output_offset(bad) = 0;
    add_both_ways(problems, slices, {EPX_FLOAT32, {2}, 8}, rng);
    for (int rank = 0; rank <= last; ++rank)
      CHECK(SliceOutcome(problems.back()).num_bad[static_cast<size_t>(rank)] == (rank == from || rank == to ? 1 : 0));
  }
  run_all(problems, Placement::random, 291);
}

TEST_CASE("ragged: while some rank is always late, memory that peers reach is used again at once") {
  Rng rng(320);
  Problems problems;
  for (const int per_peer : {2, 3})
    add_both_ways(problems, random_slices(per_peer, 8, rng), {EPX_FLOAT32, {50}, 200}, rng);
  in_group(321, [&](GroupRun& group, Rng& local) {
    for (int i = 0; i < 16; ++i) {
      if (local.chance(25)) std::this_thread::sleep_for(std::chrono::microseconds(local.below(300)));
      run(group, problems[static_cast<size_t>(i) % problems.size()], EPX_INT32, Placement::in_place, local);
    }
  });
}

TEST_CASE("ragged: between the calls of layers, with bad slices and without") {
  const RowShape row = {EPX_BFLOAT16, {64}, 128};
  Case c = base_case();
  c.layer.rank_major = RankMajorRows::exact;
  const Workload work = make_workload(c.group, c.layer, 300);
  Rng rng(301);
  Problems problems;
  add_both_ways(problems, random_slices(2, 5, rng), row, rng);
  add_both_ways(problems, bad_slices(rng), row, rng);
  in_group(302, [&](GroupRun& group, Rng& local) {
    LayerRun layer(group, c.layer, Placement::random, 303);
    layer.prepare(work);
    layer.dispatch_rank_major(work);
    Rng same_everywhere(304);
    for (int i = 0; i < 24; ++i) {
      layer.call(same_everywhere.pick({EPX_OP_PREPARE, EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_PREPARE_DISPATCH,
                                       EPX_OP_COMBINE_BWD, EPX_OP_DISPATCH_BWD, EPX_OP_DISPATCH_RANK_MAJOR,
                                       EPX_OP_COMBINE_RANK_MAJOR}),
                 work);
      const auto which = static_cast<size_t>(same_everywhere.below(static_cast<int64_t>(problems.size())));
      run(group, problems[which], EPX_INT32, Placement::random, local);
    }
  });
}

TEST_CASE("ragged: ranks may differ in the dtype of integers, and in dtypes and shapes of rows of the same bytes") {
  const RowShape kRows[] = {
      {EPX_FLOAT32, {4}, 16}, {EPX_INT64, {1, 2, 1}, 16}, {EPX_FLOAT4_E2M1, {32}, 16}, {EPX_UINT8, {4, 4}, 16}};
  Rng rng(310);
  Problems problems;
  add_both_ways(problems, random_slices(2, 4, rng), kRows[0], rng);
  in_group(311, [&](GroupRun& group, Rng& local) {
    for (const int first : {0, 1})
      for (SliceProblem problem : problems) {
        const int number = group.rank() + first;
        problem.row = kRows[number % 4];
        run(group, problem, number % 2 == 0 ? EPX_INT32 : EPX_INT64, Placement::random, local);
      }
  });
}

TEST_CASE("ragged: ranks that disagree on the slices, the bytes of a row or the direction end the group") {
  if (num_ranks() == 1) return;
  const auto disagree_on = [](void (*change)(CallFields&), const std::vector<std::string>& words) {
    disagree(EPX_OP_RAGGED_ALL_TO_ALL, EPX_OP_RAGGED_ALL_TO_ALL, change, EPX_ERROR_MISMATCH, words);
  };
  disagree_on([](CallFields& fields) { fields.slices_per_rank = 2; },
              {"slices", std::to_string(num_ranks()), std::to_string(2 * num_ranks())});
  disagree_on([](CallFields& fields) { fields.hidden = 7; }, {"row", "32", "28"});
  disagree_on([](CallFields& fields) { fields.direction = EPX_SLICES_TRANSPOSED; }, {"direction"});
}

} // namespace epx::test
