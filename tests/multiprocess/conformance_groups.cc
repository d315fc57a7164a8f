// SPDX-License-Identifier: Apache-2.0
// These scenarios create several groups at a time, one after the other, and of some of the ranks, and allocate their memory.
#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/multiprocess/conformance.h"
#include "tests/support/check.h"

namespace epx::test {

namespace {

// Part is a group of the ranks that share this rank's color, and a layer of it.
struct Part {
  int color;
  int key;
  int expected_rank = 0;
  int size = 0;
};

Part part_of(const RankContext& context, int (*color_of)(int rank, int num_ranks), int (*key_of)(int rank, int num_ranks)) {
  Part part{color_of(context.rank, context.num_ranks), key_of(context.rank, context.num_ranks)};
  for (int rank = 0; rank < context.num_ranks; ++rank) {
    if (color_of(rank, context.num_ranks) != part.color) continue;
    ++part.size;
    const int key = key_of(rank, context.num_ranks);
    part.expected_rank += std::tuple(key, rank) < std::tuple(part.key, context.rank);
  }
  return part;
}

Case part_case(const Part& part, uint64_t salt) {
  Case c = base_case();
  c.group.num_ranks = part.size;
  c.group.num_experts = 2 * part.size + 1;
  c.seed = mix(salt, static_cast<uint64_t>(part.color)); // another color's data would not match
  return c;
}

int row_color(int rank, int /*num_ranks*/) {
  return rank / 2;
}
int column_color(int rank, int /*num_ranks*/) {
  return rank % 2;
}
int one_color(int /*rank*/, int /*num_ranks*/) {
  return 7;
}
int own_color(int rank, int /*num_ranks*/) {
  return -rank;
}
int no_key(int /*rank*/, int /*num_ranks*/) {
  return 0;
}
int reversed(int rank, int num_ranks) {
  return num_ranks - rank;
}
int odd_first(int rank, int /*num_ranks*/) {
  return rank % 2 == 1 ? -1 : 1;
}

} // namespace

TEST_CASE("the rows and columns of an expert x data-parallel mesh are groups at the same time") {
  on_every_rank([&](const RankContext& context) {
    const Part row = part_of(context, row_color, no_key);
    const Part column = part_of(context, column_color, no_key);
    const Case row_case = part_case(row, 1);
    const Case column_case = part_case(column, 2);
    GroupRun row_group(context, row_case.group, row.color, row.key, row.expected_rank);
    GroupRun column_group(context, column_case.group, column.color, column.key, column.expected_rank);
    LayerRun row_layer(row_group, row_case.layer, Placement::random, row_case.seed);
    LayerRun column_layer(column_group, column_case.layer, Placement::random, column_case.seed);
    const Workload row_work = make_workload(row_case.group, row_case.layer, row_case.seed);
    const Workload column_work = make_workload(column_case.group, column_case.layer, column_case.seed);
    row_layer.prepare(row_work);
    column_layer.prepare(column_work);
    column_layer.dispatch(column_work);
    row_layer.dispatch(row_work);
    row_layer.combine(row_work);
    column_layer.combine(column_work);
    row_group.check_status();
    column_group.check_status();
  });
}

TEST_CASE("keys order the ranks of a color") {
  for (const auto color_of : {one_color, column_color, own_color}) {
    for (const auto key_of : {reversed, odd_first}) {
      on_every_rank([&](const RankContext& context) {
        const Part part = part_of(context, color_of, key_of);
        const Case c = part_case(part, 3);
        GroupRun group(context, c.group, part.color, part.key, part.expected_rank);
        LayerRun layer(group, c.layer, Placement::random, c.seed);
        run_iteration(group, layer, make_workload(c.group, c.layer, c.seed));
      });
    }
  }
}

TEST_CASE("groups have different ids") {
  on_every_rank([&](const RankContext& context) {
    const Part part = part_of(context, column_color, no_key);
    const Case c = part_case(part, 4);
    GroupRun first(context, c.group, part.color, part.key, part.expected_rank);
    GroupRun second(context, c.group, part.color, part.key, part.expected_rank);
    const std::vector<uint64_t> first_ids = context.gather(first.info().group_id);
    const std::vector<uint64_t> second_ids = context.gather(second.info().group_id);
    std::set<uint64_t> different;
    for (int rank = 0; rank < context.num_ranks; ++rank) {
      const auto i = static_cast<size_t>(rank);
      const auto leader = static_cast<size_t>(column_color(rank, context.num_ranks));
      check(first_ids[i] == first_ids[leader], "ranks {} and {} of one group have different ids", leader, rank);
      check(second_ids[i] == second_ids[leader], "ranks {} and {} of one group have different ids", leader, rank);
      different.insert({first_ids[i], second_ids[i]});
    }
    check_equal(different.size(), static_cast<size_t>(2 * std::min(2, context.num_ranks)), "number of different ids");
  });
}

TEST_CASE("several groups with different configs, interleaved") {
  std::vector<Case> cases(3, base_case());
  cases[1].group.precision = EPX_COMBINE_EXACT;
  cases[1].group.max_dtype = EPX_BFLOAT16;
  cases[1].group.num_experts += 3;
  cases[2].group.hidden_dim = 9;
  cases[2].layer.hidden = 9;
  cases[2].layer.combine_hidden = 5;
  cases[2].group.max_recv_rows = 50;
  std::vector<Workload> work;
  for (size_t i = 0; i < cases.size(); ++i)
    work.push_back(make_workload(cases[i].group, cases[i].layer, 40 + i));

  on_every_rank([&](const RankContext& context) {
    std::vector<std::unique_ptr<GroupRun>> groups;
    std::vector<LayerRun> layers;
    for (size_t i = 0; i < cases.size(); ++i) {
      groups.push_back(std::make_unique<GroupRun>(context, cases[i].group));
      layers.emplace_back(*groups[i], cases[i].layer, Placement::random, 30 + i);
    }
    for (const size_t i : {2u, 0u, 1u})
      groups[i]->add_arena(1 << 17);
    for (size_t i = 0; i < layers.size(); ++i)
      layers[i].prepare(work[i]);
    for (int round = 0; round < 2; ++round) {
      for (const size_t i : {0u, 1u, 2u})
        layers[i].dispatch(work[i]);
      for (const size_t i : {1u, 2u, 0u})
        layers[i].combine(work[i]);
      for (const size_t i : {2u, 1u, 0u})
        layers[i].combine_bwd(work[i]);
      for (const size_t i : {0u, 2u, 1u})
        layers[i].dispatch_bwd(work[i]);
    }
    for (const auto& group : groups)
      group->check_status();
    groups[0].reset(); // the others live on
    run_iteration(*groups[2], layers[2], work[2]);
  });
}

TEST_CASE("groups destroyed and created again") {
  Case c = base_case();
  c.group.max_tokens = 5;
  const Workload work = make_workload(c.group, c.layer, 50);
  on_every_rank([&](const RankContext& context) {
    for (int round = 0; round < 20; ++round) {
      GroupRun group(context, c.group);
      LayerRun layer(group, c.layer, Placement::random, 51);
      run_iteration(group, layer, work);
    }
  });
}

TEST_CASE("memory is allocated, freed and refused") {
  Case c = base_case();
  const Workload work = make_workload(c.group, c.layer, 60);
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    LayerRun layer(group, c.layer, Placement::in_place, 61);
    for (const int64_t bytes : {1, 257, 4096, 100'000, 3 << 20})
      group.add_arena(bytes);
    run_iteration(group, layer, work);
    group.free_arena(3);
    group.free_arena(0);
    run_iteration(group, layer, work);
    group.add_arena(70'000);

    void* memory = nullptr;
    check_status(epx_mem_alloc(group.handle(), size_t{1} << 56, &memory), EPX_ERROR_OUT_OF_MEMORY, "epx_mem_alloc");
    if (context.num_ranks > 1) {
      const size_t bytes = 1000 + static_cast<size_t>(context.rank);
      check_status(epx_mem_alloc(group.handle(), bytes, &memory), EPX_ERROR_MISMATCH, "epx_mem_alloc of different sizes");
    }
    check(memory == nullptr, "a refused epx_mem_alloc set the pointer");
    int on_stack = 0;
    check_status(epx_mem_free(group.handle(), nullptr), EPX_ERROR_INVALID_ARGUMENT, "epx_mem_free(NULL)");
    check_status(epx_mem_free(group.handle(), &on_stack), EPX_ERROR_INVALID_ARGUMENT, "epx_mem_free of foreign memory");
    if (context.device->transport() == EPX_TRANSPORT_HOST)
      check_status(epx_mem_register(group.handle(), &on_stack, sizeof(on_stack)), EPX_ERROR_UNSUPPORTED,
                   "epx_mem_register on the host transport");
    run_iteration(group, layer, work);
    while (!group.arenas().empty())
      group.free_arena(group.arenas().size() - 1);
    run_iteration(group, layer, work);
  });
}

// Gathers records of `bytes` bytes, which differ between ranks and rounds, into memory that ends with a guard byte.
void gather_records(epx_group group, const RankContext& context, int64_t bytes, int round) {
  const auto byte_of = [&](int rank, int64_t i) { return static_cast<unsigned char>(31 * rank + 7 * i + round + 1); };
  std::vector<unsigned char> send(static_cast<size_t>(bytes));
  for (size_t i = 0; i < send.size(); ++i)
    send[i] = byte_of(context.rank, static_cast<int64_t>(i));
  constexpr unsigned char kGuard = 0xa5;
  std::vector<unsigned char> recv(send.size() * static_cast<size_t>(context.num_ranks) + 1, kGuard);
  check_ok(epx_group_all_gather(group, send.data(), recv.data(), send.size()), "epx_group_all_gather");
  for (int64_t i = 0; i < bytes * context.num_ranks; ++i)
    check(recv[static_cast<size_t>(i)] == byte_of(static_cast<int>(i / bytes), i % bytes),
          "byte {} of the {} of rank {} is {}", i % bytes, bytes, i / bytes, recv[static_cast<size_t>(i)]);
  check(recv.back() == kGuard, "epx_group_all_gather wrote behind the records of all ranks");
}

TEST_CASE("records of all ranks are gathered between calls") {
  Case c = base_case();
  const Workload work = make_workload(c.group, c.layer, 62);
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    LayerRun layer(group, c.layer, Placement::in_place, 63);
    run_iteration(group, layer, work);
    int round = 0;
    for (const int64_t bytes : {1, 8, 100, 256}) {
      gather_records(group.handle(), context, bytes, ++round);
      run_iteration(group, layer, work);
    }
    if (context.num_ranks > 1) {
      std::vector<unsigned char> recv(256 * static_cast<size_t>(context.num_ranks), 9);
      const size_t bytes = context.rank == 0 ? 8 : 24;
      check_status(epx_group_all_gather(group.handle(), &round, recv.data(), sizeof(int)), EPX_SUCCESS, "equal sizes");
      std::fill(recv.begin(), recv.end(), static_cast<unsigned char>(9));
      check_status(epx_group_all_gather(group.handle(), recv.data(), recv.data(), bytes), EPX_ERROR_MISMATCH,
                   "epx_group_all_gather of different sizes");
      const std::string sentence = epx_last_error();
      check(contains(sentence, "rank 0") && contains(sentence, "rank 1") && contains(sentence, "8") &&
                contains(sentence, "24"),
            "\"{}\" does not have two ranks and their bytes", sentence);
      check(std::all_of(recv.begin(), recv.end(), [](unsigned char byte) { return byte == 9; }), "a refused call wrote");
    }
    gather_records(group.handle(), context, 16, ++round);
    run_iteration(group, layer, work);
    group.check_status();
  });
}

TEST_CASE("memory is freed between movements") {
  Case c = base_case();
  c.group.max_tokens = 24;
  c.group.num_comm_sms = 1; // more tokens than warps
  c.group.precision = EPX_COMBINE_EXACT;
  const Workload work = make_workload(c.group, c.layer, 65);
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    for (int i = 0; i < 3; ++i)
      group.add_arena(1 << 12);
    LayerRun layer(group, c.layer, Placement::plain, 66);
    layer.prepare(work);
    layer.combine_bwd(work);
    group.free_arena(2);
    layer.combine_bwd(work);
    layer.combine(work);
    group.free_arena(1);
    layer.combine(work);
    layer.dispatch_bwd(work);
    group.free_arena(0);
    layer.dispatch_bwd(work);
    group.check_status();
  });
}

TEST_CASE("a call that one rank has refused takes no part in the sequence") {
  Case c = base_case();
  const Workload work = make_workload(c.group, c.layer, 70);
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    LayerRun layer(group, c.layer, Placement::random, 71);
    layer.prepare(work);
    if (context.rank == context.num_ranks - 1) {
      epx_dispatch_args args = {};
      args.struct_size = sizeof(args);
      args.layer = {c.layer.top_k, c.group.max_alignment + 1};
      check_status(epx_dispatch(group.handle(), &args), EPX_ERROR_INVALID_ARGUMENT, "epx_dispatch");
    }
    layer.dispatch(work);
    layer.combine(work);
    group.check_status();
  });
}

} // namespace epx::test
