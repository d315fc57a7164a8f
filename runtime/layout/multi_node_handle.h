// SPDX-License-Identifier: Apache-2.0
// Handle memory of a group of several nodes on GPUs. It holds the state of this rank as a home, as a relay and as an owner of
// experts, and is read-only after prepare. The tables from `zone begin` on are those of a HandleLayout: leg_layout() returns
// the offsets of one leg's plan, so that the kernels of one node can read it.
//
//   HandleHeader | home: Route [T', K] | sent tokens int32 [N, T'] | position int32 [N, T'] | number of tokens int32 [2, N]
//   | home back rows int32 [N, T' + 1] | relay back rows int32 [N, T' + 1]
//   | zone begin int32 [E_l + 1] | zone rows int32 [E_l] | no zones int32 [E_l + 1] | SlotRecord [R]
//   | Route [L, C, K] | first slots int32 [L, G, C]
//
// T' is max_tokens_per_rank rounded up to whole chunks of C tokens.
#pragma once

#include "runtime/layout/handle_memory.h"
#include "runtime/layout/multi_node_shape.h"
#include "transport/peer_window.h"

namespace epx {

struct MultiNodeHandleLayout {
  // Of this rank as the home of its tokens.
  int64_t home_routes;  // Route [T', K]: ranks are those of the group, and rank ordinals count those of the route's node
  int64_t sent_tokens;  // int32 [N, T']: by node, the tokens that go there, ascending, of the own node all tokens; then -1
  int64_t positions;    // int32 [N, T']: the index of each token among those; -1: it does not go there
  int64_t token_counts; // int32 [2, N]: how many go to each node; then how many this rank relays for its rail peer there
  // Where the rows that come home from a node begin: entry j is the index of the first row of the j-th token of sent_tokens,
  // among all rows that come home from that node; the entry behind the last token is the number of all these rows.
  // EPX_COMBINE_NODE does not use these tables, since one row comes home of each token, row j.
  int64_t home_back_rows;  // int32 [N, T' + 1]
  int64_t relay_back_rows; // int32 [N, T' + 1]: the same for the rows that this rank, as a relay, sends home to each node
  // Of this rank as an owner of experts, and of its node's legs.
  int64_t zone_begin;
  int64_t zone_rows;
  int64_t no_zones; // int32 [E_l + 1]: zeros, for all legs but leg(own_node, 0)
  int64_t
      slot_records;   // SlotRecord [R]: `token` and `source` are of the group, `rank_ordinal` counts the ranks of this node
  int64_t leg_routes; // Route [L, C, K]: ranks are indices in this node; -1 beyond the tokens
  int64_t leg_first_slots; // int32 [L, G, C]
  int64_t total_bytes;
};

inline MultiNodeHandleLayout make_multi_node_handle_layout(const MultiNodeShape& shape, int top_k) {
  const char* what = "handle memory";
  const GroupShape& group = shape.group;
  const int64_t experts = (static_cast<int64_t>(group.num_experts) + group.num_ranks - 1) / group.num_ranks;
  const int64_t nodes = shape.num_nodes();
  const int64_t tokens = shape.padded_tokens();
  MultiNodeHandleLayout layout{};
  int64_t end = checked_round_up(sizeof(HandleHeader), kRowAlignment, what);
  const auto append = [&](int64_t count, int64_t bytes_each) {
    const int64_t offset = end;
    end = checked_round_up(checked_add(end, checked_mul(count, bytes_each, what), what), kRowAlignment, what);
    return offset;
  };
  layout.home_routes = append(checked_mul(tokens, top_k, what), sizeof(Route));
  layout.sent_tokens = append(nodes * tokens, sizeof(int32_t));
  layout.positions = append(nodes * tokens, sizeof(int32_t));
  layout.token_counts = append(2 * nodes, sizeof(int32_t));
  layout.home_back_rows = append(nodes * (tokens + 1), sizeof(int32_t));
  layout.relay_back_rows = append(nodes * (tokens + 1), sizeof(int32_t));
  layout.zone_begin = append(experts + 1, sizeof(int32_t));
  layout.zone_rows = append(experts, sizeof(int32_t));
  layout.no_zones = append(experts + 1, sizeof(int32_t));
  layout.slot_records = append(group.max_recv_tokens, sizeof(SlotRecord));
  layout.leg_routes = append(checked_mul(nodes * tokens, top_k, what), sizeof(Route));
  layout.leg_first_slots = append(checked_mul(nodes * tokens, shape.ranks_per_node(), what), sizeof(int32_t));
  layout.total_bytes = end;
  return layout;
}

// Added to the plan id of a leg, in its header and in the CallDescriptor: the rank stands for a rail peer that is not active.
// It sends no rows of its tokens, and their slots get zeros; to the tokens of the other ranks it is a rank like any other.
constexpr uint64_t kSendsNoRows = uint64_t{1} << 63;

// Returns the places of a leg's plan in the handle memory. Only leg(own_node, 0) has the zones, so that pads are cleared, and
// too few rows are reported, once in a call.
constexpr HandleLayout leg_layout(const MultiNodeHandleLayout& layout, const MultiNodeShape& shape, int top_k, int leg) {
  const bool has_zones = leg == shape.leg(shape.own_node, 0);
  HandleLayout plan{};
  plan.routes = layout.leg_routes + static_cast<int64_t>(sizeof(Route)) * leg * shape.chunk_tokens() * top_k;
  plan.zone_begin = has_zones ? layout.zone_begin : layout.no_zones;
  plan.zone_rows = has_zones ? layout.zone_rows : layout.no_zones;
  plan.slot_records = layout.slot_records;
  plan.first_slots =
      layout.leg_first_slots + static_cast<int64_t>(sizeof(int32_t)) * leg * shape.ranks_per_node() * shape.chunk_tokens();
  plan.ll_slots = 0; // legs take the high-throughput path
  plan.total_bytes = layout.total_bytes;
  return plan;
}

// Returns the bytes of handle memory, which are the same on all ranks: in a group of several nodes whose windows kernels access
// it has this layout, else that of handle_memory.h.
inline int64_t handle_mem_bytes(const GroupShape& shape, WindowAccess access, int top_k) {
  return access == WindowAccess::by_kernels && shape.num_nodes() > 1
             ? make_multi_node_handle_layout(make_multi_node_shape(shape, 0), top_k).total_bytes
             : make_handle_layout(shape, top_k).total_bytes;
}

// Gives typed access to handle memory at `base`; the pointers are const if the memory is.
template <typename Byte>
struct MultiNodeHandleView {
  template <typename T>
  using Ptr = std::conditional_t<std::is_const_v<Byte>, const T*, T*>;

  EPX_HOST_DEVICE MultiNodeHandleView(Byte* base, const MultiNodeHandleLayout& layout, const MultiNodeShape& shape)
      : header(reinterpret_cast<Ptr<HandleHeader>>(base)),
        home_routes(reinterpret_cast<Ptr<Route>>(base + layout.home_routes)),
        zone_begin(reinterpret_cast<Ptr<int32_t>>(base + layout.zone_begin)),
        zone_rows(reinterpret_cast<Ptr<int32_t>>(base + layout.zone_rows)),
        no_zones(reinterpret_cast<Ptr<int32_t>>(base + layout.no_zones)),
        slot_records(reinterpret_cast<Ptr<SlotRecord>>(base + layout.slot_records)),
        leg_routes(reinterpret_cast<Ptr<Route>>(base + layout.leg_routes)),
        sent_counts(reinterpret_cast<Ptr<int32_t>>(base + layout.token_counts)),
        relay_counts(sent_counts + shape.num_nodes()),
        sent_tokens_(reinterpret_cast<Ptr<int32_t>>(base + layout.sent_tokens)),
        positions_(reinterpret_cast<Ptr<int32_t>>(base + layout.positions)),
        home_back_rows_(reinterpret_cast<Ptr<int32_t>>(base + layout.home_back_rows)),
        relay_back_rows_(reinterpret_cast<Ptr<int32_t>>(base + layout.relay_back_rows)),
        padded_tokens_(shape.padded_tokens()) {}

  // Each returns the row of a node in the table of that name.
  EPX_HOST_DEVICE Ptr<int32_t> sent_tokens(int node) const { return sent_tokens_ + node * padded_tokens_; }
  EPX_HOST_DEVICE Ptr<int32_t> positions(int node) const { return positions_ + node * padded_tokens_; }
  EPX_HOST_DEVICE Ptr<int32_t> home_back_rows(int node) const { return home_back_rows_ + node * (padded_tokens_ + 1); }
  EPX_HOST_DEVICE Ptr<int32_t> relay_back_rows(int node) const { return relay_back_rows_ + node * (padded_tokens_ + 1); }

  Ptr<HandleHeader> header;
  Ptr<Route> home_routes;
  Ptr<int32_t> zone_begin;
  Ptr<int32_t> zone_rows;
  Ptr<int32_t> no_zones;
  Ptr<SlotRecord> slot_records;
  Ptr<Route> leg_routes;
  Ptr<int32_t> sent_counts;  // [N]; that of the own node is T
  Ptr<int32_t> relay_counts; // [N]; that of the own node is T

private:
  Ptr<int32_t> sent_tokens_;
  Ptr<int32_t> positions_;
  Ptr<int32_t> home_back_rows_;
  Ptr<int32_t> relay_back_rows_;
  int64_t padded_tokens_;
};

using MultiNodeHandleReader = MultiNodeHandleView<const std::byte>;
using MultiNodeHandleWriter = MultiNodeHandleView<std::byte>;

} // namespace epx
