// SPDX-License-Identifier: Apache-2.0
// Tests of prepare over nodes what the conformance suite on several nodes cannot see: tokens that rails have no room for, and
// tables with anything in them. All ranks of a group are in this process, and the test copies between them what travels by
// rail.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include "runtime/nodes/multi_node_kernels.h"
#include "runtime/nodes/multi_node_prepare_params.h"
#include "runtime/nodes/rail_records.h"
#include "runtime/reference/reference.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "tests/support/rng.h"

namespace epx::cuda {
namespace {

using test::Rng;

constexpr uint64_t kGroupId = 0x1234;
constexpr uint64_t kFirstSequence = 41;
constexpr int32_t kGarbage = 0x5a5a5a5a;
constexpr int kNumSms = 3;

struct NodesCase {
  int num_ranks, ranks_per_node, num_experts, max_tokens, top_k, alignment;
  int chunk_tokens;
  int64_t max_recv_tokens; // 0: the worst case
  epx_combine_precision precision;
  int masked_percent, bad_percent;
  int hot_percent; // of the routes that go to expert 0
  int fixed_rail_tokens = 0;
  int max_top_k = 0; // of the group; 0: top_k
};

MultiNodeShape shape_of(const NodesCase& test_case) {
  GroupShape group;
  group.num_ranks = test_case.num_ranks;
  group.ranks_per_node = test_case.ranks_per_node;
  group.num_experts = test_case.num_experts;
  group.max_tokens_per_rank = test_case.max_tokens;
  group.hidden_dim = 8;
  group.max_top_k = std::max(test_case.top_k, test_case.max_top_k);
  group.max_alignment = test_case.alignment;
  const int64_t experts = (test_case.num_experts + test_case.num_ranks - 1) / test_case.num_ranks;
  group.max_recv_tokens = test_case.max_recv_tokens != 0
                              ? test_case.max_recv_tokens
                              : zone_rows(int64_t{test_case.num_ranks} * test_case.max_tokens * test_case.top_k +
                                              experts * (test_case.alignment - 1),
                                          test_case.alignment);
  group.max_token_dtype = EPX_FLOAT32;
  group.precision = test_case.precision;
  group.fixed_rail_tokens = test_case.fixed_rail_tokens;
  MultiNodeShape shape = make_multi_node_shape(group, 0);
  shape.node.max_tokens_per_rank = std::min(test_case.chunk_tokens, test_case.max_tokens);
  return shape;
}

struct StreamDeleter {
  using pointer = cudaStream_t;
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
using Stream = std::unique_ptr<cudaStream_t, StreamDeleter>;

// One rank: what its group and its caller own.
struct Rank {
  MultiNodeShape shape;
  Stream stream;
  std::vector<LlCallDescriptor> window; // of bytes; only the alignment matters
  DeviceState device_state{};
  std::unique_ptr<StatusRecord> record = std::make_unique<StatusRecord>();
  uint64_t host_abort_record = 0;
  DeviceGroup group{};
  MultiNodeState state{};
  std::unique_ptr<MultiNodeProgress> progress = std::make_unique<MultiNodeProgress>();
  MultiNodeDevice device{};
  std::vector<int32_t> block_counts, own_counts, all_counts, sent_tables, received_tables, token_ends;
  MultiNodePrepareTotals totals{};
  MultiNodePrepareBuffers buffers{};

  reference::Routing routing;
  std::vector<int32_t> topk_idx_32;
  std::vector<std::byte> handle_mem;
  std::vector<int64_t> counts, offsets, global_counts;
  std::vector<int32_t> counts_32, offsets_32, global_counts_32;
  std::array<int64_t, 5> info{};
  int64_t beyond_rails = 0; // routes
  std::vector<int32_t> slot, slot_origin;
  PrepareCall call{};
  epx_operation operation = EPX_OP_PREPARE;

  MultiNodePrepareParams params() const { return make_multi_node_prepare_params(device, buffers, call, operation); }
  MultiNodeHandleReader plan() const {
    return {handle_mem.data(), make_multi_node_handle_layout(shape, call.top_k), shape};
  }
};

// A group of several nodes whose ranks are streams of this process.
class NodesGroup {
public:
  explicit NodesGroup(const NodesCase& test_case) : case_(test_case) {
    for (int r = 0; r < case_.num_ranks; ++r)
      ranks_.push_back(make_rank(r));
    for (const auto& rank : ranks_)
      for (int i = 0; i < case_.ranks_per_node; ++i)
        rank->group.bases[i] = reinterpret_cast<std::byte*>(rank_at(rank->shape.first_rank() + i).window.data());
  }

  // Prepares with new random routing, and checks the outputs and the events.
  void run(Rng& rng) {
    ++prepares_;
    for (const auto& rank : ranks_)
      draw_routing(*rank, rng);
    std::vector<reference::Routing> routing;
    for (const auto& rank : ranks_)
      routing.push_back(drop_beyond_rails(*rank));
    oracle_ = reference::prepare({case_.num_experts, case_.top_k, case_.alignment, shape().group.max_recv_tokens,
                                  case_.precision, case_.ranks_per_node},
                                 routing);

    list_all();
    deliver_all();
    for (const auto& rank : ranks_) {
      CAPTURE(rank->shape.rank);
      CHECK(rank->progress->disagreement.is_known == 0);
      check_outputs(*rank);
      check_lists(*rank);
      check_events(*rank);
    }
  }

  // Makes the plans of the legs from tables with anything in them, values at the limits above all, and delivers them.
  void run_with_damaged_tables(Rng& rng) {
    run(rng);
    const auto num_slots = static_cast<int32_t>(shape().group.max_recv_tokens);
    for (const auto& rank : ranks_)
      for (int32_t& word : rank->received_tables)
        if (rng.chance(30))
          word = rng.pick({-1, 0, case_.ranks_per_node - 1, case_.ranks_per_node, case_.max_tokens - 1, case_.max_tokens,
                           num_slots - 1, num_slots, INT32_MIN, INT32_MAX});
    on_all([](Rank& rank) { return launch_list_relayed(rank.params(), rank.stream.get()); });
    deliver_all();
    for (const auto& rank : ranks_) {
      CHECK(rank->record->failed == 0);
      for (int node = 0; node < shape().num_nodes(); ++node)
        check_plan_of_damaged_table(*rank, node);
    }
  }

  // Prepares where the last rank makes another call than the others. Each rank must find that.
  void run_with_other_call(Rng& rng, const AgreedFields& other) {
    ++prepares_;
    const AgreedFields others{.operation = EPX_OP_PREPARE, .top_k = case_.top_k, .alignment = case_.alignment};
    for (const auto& rank : ranks_) {
      const bool is_last = rank == ranks_.back();
      rank->operation = static_cast<epx_operation>((is_last ? other : others).operation);
      draw_routing(*rank, rng, is_last ? other.top_k : case_.top_k);
      if (is_last) rank->call.alignment = other.alignment;
    }
    list_all();
    for (const auto& rank : ranks_) {
      CAPTURE(rank->shape.rank);
      const Disagreement& found = rank->progress->disagreement;
      CHECK(found.is_known == 1);
      CHECK(found.sequence == kFirstSequence + prepares_);
      CHECK(found.ranks[0] == 0);
      CHECK(found.ranks[1] == case_.num_ranks - 1);
      CHECK(found.fields[0] == others);
      CHECK(found.fields[1] == other);
      CHECK(rank->sent_tables.back() == kGarbage); // behind the tables
      CHECK(rank->received_tables.back() == kGarbage);
      for (int node = 0; node < shape().num_nodes(); ++node)
        check_plan_of_damaged_table(*rank, node);
    }
  }

private:
  const MultiNodeShape& shape() const { return ranks_.front()->shape; }
  Rank& rank_at(int rank) const { return *ranks_[static_cast<size_t>(rank)]; }
  Rank& rail_peer(const Rank& rank, int node) const {
    return rank_at(node * case_.ranks_per_node + rank.shape.index_in_node());
  }

  std::unique_ptr<Rank> make_rank(int number) {
    auto rank = std::make_unique<Rank>();
    rank->shape = shape_of(case_);
    rank->shape.rank = number;
    rank->shape.own_node = rank->shape.group.node_of(number);
    const MultiNodeShape& shape = rank->shape;
    const ExpertBlocks experts{case_.num_experts, case_.num_ranks};
    rank->shape.node.num_experts =
        experts.first_expert(shape.first_rank() + case_.ranks_per_node) - experts.first_expert(shape.first_rank());
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    rank->stream.reset(stream);

    const WindowLayout layout = make_window_layout(shape.node, WindowAccess::by_kernels);
    rank->window.resize(static_cast<size_t>(layout.total_bytes) / sizeof(LlCallDescriptor) + 1);
    GroupContext& context = rank->group.context;
    context.transport = EPX_TRANSPORT_NCCL;
    context.shape = shape.node;
    context.layout = layout;
    context.group_id = kGroupId;
    context.rank = shape.index_in_node();
    context.overflow = EPX_OVERFLOW_ERROR;
    context.timeout_ms = 60'000;
    context.window_access = WindowAccess::by_kernels;
    rank->group.state = &rank->device_state;
    rank->group.host_abort_record = &rank->host_abort_record;
    rank->group.record = rank->record.get();
    rank->group.timeout_ns = 60'000'000'000;

    rank->device = {shape, kGroupId, &rank->state, rank->progress.get(), nullptr, nullptr, nullptr, &rank->device_state};
    const auto words = static_cast<size_t>(shape.num_nodes() * table_words(shape) + 1);
    rank->block_counts.assign(static_cast<size_t>(int64_t{kMaxPrepareBlocks} * case_.num_experts), kGarbage);
    rank->own_counts.assign(static_cast<size_t>(count_words(shape.group)), kGarbage);
    rank->all_counts.assign(static_cast<size_t>(case_.num_ranks * count_words(shape.group)), kGarbage);
    rank->sent_tables.assign(words, kGarbage);
    rank->received_tables.assign(words, kGarbage);
    rank->token_ends.assign(static_cast<size_t>(shape.num_nodes()), kGarbage);
    rank->buffers = {rank->block_counts.data(), rank->own_counts.data(),  rank->all_counts.data(),     &rank->totals,
                     rank->token_ends.data(),   rank->sent_tables.data(), rank->received_tables.data()};
    return rank;
  }

  void draw_routing(Rank& rank, Rng& rng) { draw_routing(rank, rng, case_.top_k); }
  void draw_routing(Rank& rank, Rng& rng, int top_k) {
    // Some rank often has no token, and some have as many as there can be.
    const int64_t tokens = rng.chance(25) ? 0 : rng.chance(25) ? case_.max_tokens : rng.between(0, case_.max_tokens);
    rank.routing = {tokens, {}};
    for (int64_t route = 0; route < tokens * top_k; ++route) {
      int64_t index = rng.chance(case_.hot_percent) ? 0 : rng.below(case_.num_experts);
      if (rng.chance(case_.masked_percent)) index = -1;
      if (rng.chance(case_.bad_percent)) index = rng.chance(50) ? -2 : case_.num_experts;
      rank.routing.topk_idx.push_back(index);
    }
    rank.topk_idx_32.assign(rank.routing.topk_idx.begin(), rank.routing.topk_idx.end());
    const bool is_64 = prepares_ % 2 == 0;
    const ExpertBlocks experts{case_.num_experts, case_.num_ranks};
    const auto num_local = static_cast<size_t>(experts.num_local_experts(rank.shape.rank));
    rank.counts.assign(num_local, kGarbage);
    rank.counts_32.assign(num_local, kGarbage);
    rank.offsets.assign(num_local + 1, kGarbage);
    rank.offsets_32.assign(num_local + 1, kGarbage);
    const auto num_counts = static_cast<size_t>(int64_t{case_.num_ranks} * case_.num_experts);
    rank.global_counts.assign(num_counts, kGarbage);
    rank.global_counts_32.assign(num_counts, kGarbage);
    rank.slot.assign(rank.routing.topk_idx.size(), kGarbage);
    rank.slot_origin.assign(static_cast<size_t>(3 * shape().group.max_recv_tokens), kGarbage);
    // The first prepare has handle memory of anything, the others that of the call before.
    rank.handle_mem.resize(static_cast<size_t>(make_multi_node_handle_layout(rank.shape, top_k).total_bytes),
                           std::byte{0x5a});
    rank.state.sequence = kFirstSequence + prepares_;
    rank.call = {};
    rank.call.top_k = top_k;
    rank.call.alignment = case_.alignment;
    rank.call.handle_mem = rank.handle_mem.data();
    rank.call.num_tokens = tokens;
    rank.call.topk_idx_is_64 = rank.call.counts_are_64 = is_64;
    rank.call.topk_idx = is_64 ? static_cast<const void*>(rank.routing.topk_idx.data()) : rank.topk_idx_32.data();
    rank.call.counts = is_64 ? static_cast<void*>(rank.counts.data()) : rank.counts_32.data();
    rank.call.offsets = is_64 ? static_cast<void*>(rank.offsets.data()) : rank.offsets_32.data();
    rank.call.global_counts = is_64 ? static_cast<void*>(rank.global_counts.data()) : rank.global_counts_32.data();
    rank.call.info = rank.info.data();
    rank.call.slot = rank.slot.data();
    rank.call.slot_origin = rank.slot_origin.data();
  }

  template <typename Launch>
  void on_all(const Launch& launch) {
    for (const auto& rank : ranks_)
      REQUIRE(launch(*rank) == cudaSuccess);
    for (const auto& rank : ranks_)
      REQUIRE(cudaStreamSynchronize(rank->stream.get()) == cudaSuccess);
  }
  // Makes the plans of the legs.
  void list_all() {
    on_all([](Rank& rank) { return launch_count_routes(rank.params(), rank.stream.get()); });
    for (const auto& to : ranks_)
      for (size_t from = 0; from < ranks_.size(); ++from)
        std::ranges::copy(ranks_[from]->own_counts,
                          to->all_counts.begin() + static_cast<int64_t>(from) * count_words(shape().group));
    on_all([](Rank& rank) { return launch_assign_slots(rank.params(), rank.stream.get()); });
    on_all([](Rank& rank) { return launch_list_tokens(rank.params(), rank.stream.get()); });
    exchange_tables();
    on_all([](Rank& rank) { return launch_list_relayed(rank.params(), rank.stream.get()); });
  }
  // Each node makes its own legs first, as the group does.
  void deliver_all() {
    for (int m = 0; m < shape().num_nodes(); ++m)
      for (int chunk = 0; chunk < shape().num_chunks(); ++chunk)
        on_all([&](Rank& rank) {
          ++rank.group.launch;
          const int leg = rank.shape.leg((rank.shape.own_node + m) % shape().num_nodes(), chunk);
          return launch_deliver_leg(rank.group, rank.params(), leg, kNumSms, rank.stream.get());
        });
  }

  // Words of a table beyond its tokens are anything.
  void exchange_tables() {
    const int64_t words = table_words(shape());
    for (const auto& rank : ranks_)
      for (int node = 0; node < shape().num_nodes(); ++node) {
        if (node == rank->shape.own_node) continue;
        const Rank& peer = rail_peer(*rank, node);
        const auto sent = peer.sent_tables.begin() + rank->shape.own_node * words;
        const int64_t used = kTableHeaderWords + sent[0] * (1 + 2 * int64_t{peer.call.top_k});
        REQUIRE(used <= words);
        std::fill_n(rank->received_tables.begin() + node * words, words, kGarbage);
        std::copy_n(sent, used, rank->received_tables.begin() + node * words);
      }
  }

  // ---- What must be ----

  // Masks the routes to each other node of all tokens behind the first fixed_rail_tokens that have any.
  reference::Routing drop_beyond_rails(Rank& rank) const {
    reference::Routing routing = rank.routing;
    rank.beyond_rails = 0;
    if (case_.fixed_rail_tokens == 0) return routing;
    const ExpertBlocks experts{case_.num_experts, case_.num_ranks};
    std::vector<int> tokens(static_cast<size_t>(shape().num_nodes()), 0);
    for (int64_t token = 0; token < routing.num_tokens; ++token)
      for (int node = 0; node < shape().num_nodes(); ++node) {
        bool goes = false;
        for (int k = 0; k < case_.top_k; ++k) {
          int64_t& index = routing.topk_idx[static_cast<size_t>(token * case_.top_k + k)];
          if (node == rank.shape.own_node || index < 0 || index >= case_.num_experts) continue;
          if (experts.rank_of(static_cast<int>(index)) / case_.ranks_per_node != node) continue;
          goes = true;
          if (tokens[static_cast<size_t>(node)] < case_.fixed_rail_tokens) continue;
          index = -1;
          ++rank.beyond_rails;
        }
        if (goes) ++tokens[static_cast<size_t>(node)];
      }
    return routing;
  }

  // [P, E], of all routes that are not masked
  std::vector<int64_t> counts_before_drops() const {
    std::vector<int64_t> counts(static_cast<size_t>(int64_t{case_.num_ranks} * case_.num_experts), 0);
    for (const auto& rank : ranks_)
      for (const int64_t index : rank->routing.topk_idx)
        if (index >= 0 && index < case_.num_experts)
          ++counts[static_cast<size_t>(int64_t{rank->shape.rank} * case_.num_experts + index)];
    return counts;
  }

  // ---- Checks ----

  void check_outputs(const Rank& rank) const {
    const reference::RankPlan& expected = oracle_.ranks[static_cast<size_t>(rank.shape.rank)];
    const auto wide = [&](const std::vector<int64_t>& wide_values, const std::vector<int32_t>& narrow_values) {
      return rank.call.counts_are_64 ? wide_values : std::vector<int64_t>(narrow_values.begin(), narrow_values.end());
    };
    CHECK(wide(rank.counts, rank.counts_32) == expected.counts);
    CHECK(wide(rank.offsets, rank.offsets_32) == expected.offsets);
    CHECK(wide(rank.global_counts, rank.global_counts_32) == counts_before_drops());
    std::array<int64_t, 5> info = expected.info;
    info[3] += rank.beyond_rails;
    CHECK(rank.info == info);
    CHECK(rank.slot == expected.slot);
    CHECK(rank.slot_origin == expected.slot_origin);
  }

  void check_lists(const Rank& rank) const {
    for (int node = 0; node < shape().num_nodes(); ++node)
      if (node != rank.shape.own_node) CHECK(rank.plan().sent_counts[node] <= shape().max_rail_tokens());
  }

  // A route in a damaged table is kept if its token, its slot and its rank are some of the group's.
  void check_plan_of_damaged_table(const Rank& rank, int node) const {
    const MultiNodeHandleReader plan = rank.plan();
    const bool is_own = node == rank.shape.own_node;
    const int top_k = rank.call.top_k;
    const int32_t* const table = rank.received_tables.data() + node * table_words(shape());
    const int64_t count = is_own ? rank.call.num_tokens : std::clamp(table[0], 0, case_.max_tokens);
    CHECK(plan.relay_counts[node] == count);
    CHECK(plan.relay_back_rows(node)[shape().padded_tokens()] <= count * shape().max_back_rows(top_k));
    for (int64_t row = 0; row < shape().padded_tokens() && !is_own; ++row)
      for (int k = 0; k < top_k; ++k) {
        const int32_t* const words = table + kTableHeaderWords + row * (1 + 2 * int64_t{top_k});
        const int32_t slot = words[1 + 2 * k];
        const int32_t owner = words[2 + 2 * k];
        const bool is_kept = row < count && words[0] >= 0 && words[0] < case_.max_tokens && slot >= 0 &&
                             slot < shape().group.max_recv_tokens && owner >= 0 && owner < case_.ranks_per_node;
        const Route& found = plan.leg_routes[(node * shape().padded_tokens() + row) * top_k + k];
        CHECK(found.slot == (is_kept ? slot : -1));
        CHECK(found.rank == (is_kept ? owner : -1));
        CHECK(found.rank_ordinal >= 0);
        CHECK(found.rank_ordinal < case_.ranks_per_node);
      }
  }

  // Checks and forgets what the rank has reported.
  void check_events(Rank& rank) const {
    const reference::RankPlan& expected = oracle_.ranks[static_cast<size_t>(rank.shape.rank)];
    CHECK(rank.record->failed == 0);
    uint64_t num_events = 0;
    if (expected.bad_indices > 0) {
      const EventRecord& event = rank.record->events[num_events++];
      const auto first = std::ranges::find_if(rank.routing.topk_idx,
                                              [&](int64_t index) { return index < -1 || index >= case_.num_experts; });
      const int64_t route = first - rank.routing.topk_idx.begin();
      CHECK(event.kind == EPX_EVENT_BAD_INDEX);
      CHECK(event.operation == EPX_OP_PREPARE);
      CHECK(event.values[0] == expected.bad_indices);
      CHECK(event.values[1] == *first);
      CHECK(event.values[2] == route / case_.top_k);
      CHECK(event.values[3] == route % case_.top_k);
    }
    if (expected.info[2] > 0) {
      const EventRecord& event = rank.record->events[num_events++];
      CHECK(event.kind == EPX_EVENT_OVERFLOW);
      CHECK(event.values[0] == expected.info[0]);
      CHECK(event.values[1] == expected.info[2]);
      CHECK(event.values[2] == expected.info[4]);
    }
    CHECK(rank.record->num_events == num_events);
    rank.record->num_events = rank.device_state.num_events = 0;
  }

  NodesCase case_;
  uint64_t prepares_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
  reference::Plan oracle_;
};

TEST_CASE("prepare over nodes has the oracle's outputs where rails or slots lack room, of more parts than lanes, of many "
          "experts") {
  const NodesCase cases[] = {
      // ranks, of a node, experts, tokens, K, a, C, R, precision, masked, bad, hot, fixed_rail_tokens
      {4, 2, 600, 600, 3, 1, 300, 1000, EPX_COMBINE_EXACT, 0, 0, 5}, // more experts than threads
      {4, 2, 8, 20, 2, 16, 16, 15, EPX_COMBINE_NODE, 0, 0, 0},       // R < a drops everything
      {6, 2, 12, 30, 4, 4, 8, 0, EPX_COMBINE_WIRE, 20, 5, 0, 11},
      {4, 2, 16, 700, 2, 1, 256, 900, EPX_COMBINE_NODE, 50, 0, 5, 1},
      {2, 1, 8, 2000, 1, 1, 512, 0, EPX_COMBINE_WIRE, 20, 0, 0, 450}, // in the third tile
      {2, 1, 16, 900, 32, 4, 400, 0, EPX_COMBINE_WIRE, 10, 0, 0},     // more parts than lanes
  };
  for (const NodesCase& test_case : cases) {
    CAPTURE(&test_case - cases);
    NodesGroup group(test_case);
    Rng rng(static_cast<uint64_t>(&test_case - cases));
    for (int i = 0; i < 4; ++i) {
      CAPTURE(i);
      group.run(rng);
    }
  }
}

TEST_CASE("tables with anything in them lead to no slot, rank or token that is not") {
  for (const epx_combine_precision precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT, EPX_COMBINE_NODE})
    for (uint64_t seed = 0; seed < 3; ++seed) {
      Rng rng(seed);
      NodesGroup({4, 2, 8, 24, 3, 1, 10, 0, precision, 10, 0, 0}).run_with_damaged_tables(rng);
    }
}

TEST_CASE(
    "each rank finds that another one makes another prepare, whose tables lead to no slot, rank or token that is not") {
  const AgreedFields others[] = {{.operation = EPX_OP_PREPARE, .top_k = 7, .alignment = 4},
                                 {.operation = EPX_OP_PREPARE, .top_k = 1, .alignment = 4},
                                 {.operation = EPX_OP_PREPARE, .top_k = 3, .alignment = 2},
                                 {.operation = EPX_OP_PREPARE_DISPATCH, .top_k = 3, .alignment = 4}};
  for (const AgreedFields& other : others)
    for (const int ranks_per_node : {1, 2}) {
      CAPTURE(&other - others);
      CAPTURE(ranks_per_node);
      Rng rng(7);
      NodesGroup({4, ranks_per_node, 8, 24, 3, 4, 10, 0, EPX_COMBINE_WIRE, 10, 0, 0, 0, 7}).run_with_other_call(rng, other);
    }
}

} // namespace
} // namespace epx::cuda
