// SPDX-License-Identifier: Apache-2.0
// A movement: what scatter and gather have in common. It reads the plan in the handle memory, decides which ranks take part and
// which routes are live in this call, and assigns the warp roles and the tiles.
#pragma once

#include "base/device/launch.h"
#include "base/device/warp.cuh"
#include "runtime/layout/handle_limits.h"
#include "runtime/layout/multi_node_handle.h"
#include "runtime/layout/slots.h"
#include "runtime/stages/call_descriptor.h"
#include "runtime/stages/cuda/kernels.h"
#include "runtime/stages/cuda/protocol/call_session.cuh"
#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"
#include "runtime/stages/stages.h"

namespace epx::cuda {

// The parameters that the kernels of scatter and gather have in common.
struct MovementParams {
  DeviceGroup group;
  HandleLayout layout;
  WarpRoleCounts role_counts;
  MovementCall call;
  CallDescriptor descriptor; // this rank's, without the plan id
};

inline MovementParams make_movement_params(const DeviceGroup& group, const WarpRoleCounts& role_counts,
                                           const MovementCall& call, const CallDescriptor& descriptor) {
  return {group, call.layout != nullptr ? *call.layout : make_handle_layout(group.context.shape, call.top_k), role_counts,
          call, descriptor};
}

constexpr int kMovementWarps = kMovementThreads / kWarp;

template <int kWarps = kMovementWarps, int64_t kRingBytes = TmaRowPipeline::kStagesBytes>
__device__ inline TmaRowPipeline pipeline_of_warp() {
  return {dynamic_shared_memory<std::byte>(), static_cast<int>(threadIdx.x) / kWarp, kWarps, kRingBytes};
}

// The index of a warp among the `count` warps that have the same role.
struct WorkPartition {
  int64_t index;
  int64_t count;
};

// Partitions the work among `num_warps` warps of `num_blocks` blocks. Neighbouring indices are in different blocks, so that few
// tiles spread over many SMs.
__device__ inline WorkPartition partition_warps(int first_warp, int num_warps, int first_block, int num_blocks, int block) {
  return {static_cast<int64_t>(static_cast<int>(threadIdx.x) / kWarp - first_warp) * num_blocks + (block - first_block),
          static_cast<int64_t>(num_warps) * num_blocks};
}
__device__ inline WorkPartition partition_warps(int first_warp, int num_warps, int first_block, int num_blocks) {
  return partition_warps(first_warp, num_warps, first_block, num_blocks, static_cast<int>(blockIdx.x));
}

enum class WarpRole { none, send, signal, receive };

struct WarpAssignment : WorkPartition { // index -1: the warp has joined, and has no first tile
  WarpRole role;
  int64_t joining = 0; // of a receiver: how many warps join later
};

// How many warps join the receivers: the senders, and the signal warps once these have closed.
__device__ inline int64_t joining_warps(const WarpRoleCounts& role_counts) {
  return role_counts.joins ? int64_t{role_counts.sender_blocks} * (role_counts.sender_warps + role_counts.signal_warps) : 0;
}

// Warp specialization of the high-throughput path: some warps send, and the ready flag of each row is signaled by its sender or
// by a signal warp; the others receive, so that a rank's work on its rows overlaps the wire. With one rank, all warps receive.
// `block` is the number of the warp's block: role_counts.sender_blocks blocks from 0 on have senders.
__device__ inline WarpAssignment assign_warp_role(const WarpRoleCounts& role_counts, int num_ranks, int block) {
  const int blocks = static_cast<int>(gridDim.x);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (num_ranks == 1) return {partition_warps(0, warps, 0, blocks, block), WarpRole::receive};
  const int sender_blocks = role_counts.sender_blocks;
  const int senders = role_counts.sender_warps;
  const int signals = role_counts.signal_warps;
  const int others = warps - senders - signals;
  const int64_t joining = joining_warps(role_counts);
  if (block >= sender_blocks)
    return {partition_warps(0, warps, sender_blocks, blocks - sender_blocks, block), WarpRole::receive, joining};
  if (warp < senders) return {partition_warps(0, senders, 0, sender_blocks, block), WarpRole::send};
  if (warp >= senders + others)
    return {partition_warps(senders + others, signals, 0, sender_blocks, block), WarpRole::signal};
  return {partition_warps(senders, others, 0, sender_blocks, block),
          sender_blocks == blocks ? WarpRole::receive : WarpRole::none, joining};
}
__device__ inline WarpAssignment assign_warp_role(const WarpRoleCounts& role_counts, int num_ranks) {
  return assign_warp_role(role_counts, num_ranks, static_cast<int>(blockIdx.x));
}
// The assignment of a sender that has no more to send, or of a signal warp that has no more to signal, if they join the
// receivers.
__device__ inline WarpAssignment join_receivers(const WarpRoleCounts& role_counts) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int other_blocks = static_cast<int>(gridDim.x) - role_counts.sender_blocks;
  const int others = warps - role_counts.sender_warps - role_counts.signal_warps;
  const int receivers = other_blocks > 0 ? other_blocks * warps : role_counts.sender_blocks * others;
  return {{-1, receivers}, role_counts.joins ? WarpRole::receive : WarpRole::none, joining_warps(role_counts)};
}

// The tiles of a role that takes batches of tokens, which a warp looks up at the same time. The last `singles` tokens or more
// are tiles by themselves, so that all warps end at about the same time.
struct TokenTiles {
  int32_t more_tokens; // than one, of each batch
  int32_t batches;
  int32_t count;

  __device__ TokenTiles(int32_t tokens, int batch_tokens, int32_t singles)
      : more_tokens(batch_tokens - 1), batches(more_tokens > 0 ? max(tokens - singles, 0) / batch_tokens : 0),
        count(tokens - batches * more_tokens) {}
  __device__ int32_t first_token(int64_t tile) const {
    return static_cast<int32_t>(tile) + min(static_cast<int32_t>(tile), batches) * more_tokens;
  }
};

// A value for each k of a token: each lane holds that of k = `lane` in `low` and that of k = 32 + `lane` in `high`.
template <typename T>
struct PerRoute {
  T low, high;

  __device__ T own(int first) const { return first < kWarp ? low : high; } // k = `first` + lane
  __device__ T operator[](int k) const { return from_lane(own(k), k % kWarp); }
  // Returns a mask of the k for whose values `holds` is true.
  template <typename Holds>
  __device__ uint64_t mask_of(const Holds& holds) const {
    return static_cast<uint64_t>(__ballot_sync(~0u, holds(low) ? 1 : 0)) |
           static_cast<uint64_t>(__ballot_sync(~0u, holds(high) ? 1 : 0)) << kWarp;
  }
};

// Returns all ranks that the lanes pass; -1: none.
__device__ inline RankMask set_of_ranks(const PerRoute<int>& ranks) {
  RankMask own_ranks;
  if (ranks.low >= 0) own_ranks.set(ranks.low);
  if (ranks.high >= 0) own_ranks.set(ranks.high);
  return RankMask::from_bits(or_of_lanes(own_ranks.bits()));
}

// The routes of one token.
struct WarpRoutes : PerRoute<Route> {
  // Returns the ranks of the routes for which `holds` is true.
  template <typename Holds>
  __device__ RankMask ranks_of(const Holds& holds) const {
    return set_of_ranks({holds(low) ? low.rank : -1, holds(high) ? high.rank : -1});
  }
  __device__ int32_t slot(int k) const { return from_lane(own(k).slot, k % kWarp); }
  __device__ int32_t rank_ordinal(int k) const { return from_lane(own(k).rank_ordinal, k % kWarp); }
};

// The live slots of one token on this rank, in k order.
struct TokenSlots {
  WarpList<int32_t> slots;
  int32_t first_slot = -1; // the token's first slot on this rank, live or not; -1: none
  int rank_ordinal = 0;    // the index of this rank among the ranks that the token goes to
  int32_t token = 0;
};

// The live slots of several tokens on this rank, which Movement::slots_of_batch looks up at the same time: lane t walks the
// slots of token t.
struct SlotBatch {
  static constexpr int kMaxTokens = 8;

  int32_t slot = -1;       // lane t * room_for(K) + i has the i-th live slot of token t
  int size = 0;            // lane t has the number of live slots of token t, ...
  int32_t first_slot = -1; // ... and its first slot, live or not; -1: none

  // Returns how many tokens with K = `top_k` fit into a batch.
  __device__ static int max_tokens(int top_k) { return min(kMaxTokens, kWarp / room_for(top_k)); }
  // Returns the least power of 2 that is not below `top_k`.
  __device__ static int room_for(int top_k) { return 1 << (kWarp - __clz(top_k - 1)); }

  __device__ TokenSlots slots_of(int index, int top_k, int64_t token) const {
    TokenSlots found;
    found.token = static_cast<int32_t>(token);
    found.first_slot = from_lane(first_slot, index);
    found.slots = {from_lane(slot, (index * room_for(top_k) + lane()) % kWarp), from_lane(size, index)};
    return found;
  }
};

// The live slots of one token on this rank on the low-latency path, by k; -1: none.
struct LlSlots : PerRoute<int32_t> {
  uint64_t live; // a mask of the k that have a live slot

  __device__ LlSlots(int32_t low_slot, int32_t high_slot) : PerRoute{low_slot, high_slot} {
    live = mask_of([](int32_t slot) { return slot >= 0; });
  }
};

// Returns the i-th peer, i < P - 1, that this rank serves at a token: the first one rotates with the token.
__device__ inline int peer_in_order(const CallSession& call, int64_t token, int i) {
  const auto peers = static_cast<unsigned>(call.num_ranks() - 1);
  const int rotated = call.rank() + 1 + static_cast<int>((static_cast<unsigned>(token) + static_cast<unsigned>(i)) % peers);
  return rotated < call.num_ranks() ? rotated : rotated - call.num_ranks();
}

// Returns whether a rank's receive rows lie in an allocation of the group. Peers then store them in place, at
// registered_rows(), but for what Scatter::is_in_place excludes.
__device__ inline bool has_registered_rows(const CallSession& call, int rank) {
  return call.descriptors().rows_allocation[rank] >= 0;
}
__device__ inline std::byte* registered_rows(const DeviceGroup& group, const CallSession& call, int rank) {
  const int64_t allocation = call.descriptors().rows_allocation[rank] % kMaxDeviceAllocations;
  return group.allocations[allocation * call.num_ranks() + static_cast<int>(window_index(rank))] +
         call.descriptors().rows_offset[rank];
}

// Reports the same events in the same order as the host transport. One thread calls this. It is not inlined; see CallContext.
__device__ __noinline__ inline void report_events(const CallContext& context, const MovementParams& params,
                                                  const PeerDescriptors& descriptors, bool is_usable) {
  const MovementCall& args = params.call;
  if (!args.reports_events) return;
  const HandleReader plan(args.handle_mem, params.layout);
  if (!is_usable) {
    record_event(context, EPX_EVENT_HANDLE_MISMATCH, 1, args.top_k, args.alignment, args.num_tokens, -1,
                 args.rows_per_source, plan.header);
    return;
  }
  const HandleHeader& header = *reinterpret_cast<const HandleHeader*>(args.checked_header);
  for (int rank = 0; rank < context.num_ranks(); ++rank) {
    const uint64_t plan_id = descriptors.plan_id[rank];
    if (plan_id == 0 || plan_id == header.plan_id) continue;
    // A group of several nodes has it where a rail peer differs, too.
    if (!has_had_event(context, EPX_EVENT_HANDLE_MISMATCH))
      record_event(context, EPX_EVENT_HANDLE_MISMATCH, 1, 0, 0, 0, rank, static_cast<int64_t>(plan_id), plan.header);
    break;
  }
  if (args.recv_rows >= header.rows_in_use) return;
  const GroupShape& shape = context.group.context.shape;
  const HandleLimits limits{shape, args.top_k, args.num_slots(shape)};
  const int local_experts = ExpertBlocks{shape.num_experts, shape.num_ranks}.num_local_experts(context.rank());
  int64_t beyond = 0;
  HandleLimits::Zone zone{};
  for (int expert = 0; expert < local_experts; ++expert) {
    zone = limits.zone(plan.zone_begin, plan.zone_rows, expert, zone.end, args.alignment);
    beyond += max(int64_t{0}, zone.end_of_rows - max(args.recv_rows, zone.begin));
  }
  if (beyond > 0) record_event(context, EPX_EVENT_TOO_FEW_ROWS, beyond, beyond, args.recv_rows, plan.header->rows_in_use);
}

// One movement in progress: a call session with the plan of its handle memory.
class Movement {
public:
  __device__ explicit Movement(const MovementParams& params)
      : Movement(params, CallSession(params.group, params.call.operation)) {}
  __device__ Movement(const MovementParams& params, const CallSession& session) : params_(params), call_(session) {
    const MovementCall& call = params.call;
    const HandleHeader header = *reinterpret_cast<const HandleHeader*>(call.checked_header);
    plan_id_ = header.plan_id;
    ll_tokens_ = header.ll_tokens;
    is_compact_ = call.is_rank_major() && header.is_compact != 0;
    // Bitwise & evaluates all terms, so that no load waits behind a branch on the one before it.
    is_usable_ = (header.magic == kHandleMagic) & (header.checksum == header_checksum(header)) &
                 (header.group_id == params.group.context.group_id) & (header.rank == params.group.context.rank) &
                 (header.top_k == call.top_k) & (header.alignment == call.alignment) &
                 (header.num_tokens == call.num_tokens) & (header.rows_per_source == call.rows_per_source);
    if constexpr (kTestHooks) {
      // A call that overlaps with this one, against the contract, may rewrite the checked header meanwhile. On the CPU, where
      // lanes read it one after the other, they must agree all the same.
      is_usable_ = from_lane(is_usable_ ? 1 : 0, 0) != 0;
      plan_id_ = from_lane(plan_id_, 0);
      ll_tokens_ = from_lane(ll_tokens_, 0);
      is_compact_ = from_lane(is_compact_ ? 1 : 0, 0) != 0;
    }
  }

  // A movement whose plan is not there yet is not usable: only call(), next_tile() and peer_in_order() may be called.
  struct WithoutPlan {};
  __device__ Movement(const MovementParams& params, const CallSession& session, WithoutPlan)
      : params_(params), call_(session), is_usable_(false), is_compact_(false), plan_id_(0), ll_tokens_(0) {}

  // The kernel calls this before anything else.
  __device__ void post() const {
    if (blockIdx.x == 0) call_.post(params_.descriptor, is_usable_ ? plan_id_ : 0);
  }
  // Returns whether the handle memory belongs to this call; if not, outputs stay untouched. It is the same in all threads and
  // never changes.
  __device__ bool is_usable() const { return is_usable_; }
  // Returns whether the plan allows the low-latency (LL) path; combine_bwd, and gathers in precision exact or with
  // a row format, take the high-throughput path all the same. This and ll_tokens() are the same on all ranks with this plan.
  __device__ bool takes_ll_path() const {
    return is_usable_ && ll_tokens_ > 0 && ll_tokens_ >= params_.call.num_tokens && // prepare writes no other value
           ll_tokens_ <= params_.group.context.layout.ll_tokens;
  }
  // On the low-latency path, the number of tokens of the rank that has the most.
  __device__ int64_t ll_tokens() const { return ll_tokens_; }
  // The entry barrier. Returns false, the same in all threads, when the group has failed or the handle memory is not usable.
  __device__ bool begin() const {
    if (!call_.enter(params_.descriptor)) return false;
    if (blockIdx.x == 0 && threadIdx.x == blockDim.x - 1) {
      report();
      if (!is_usable_) call_.sent(1);
    }
    return is_usable_;
  }
  // The entry barrier of the low-latency path, where each warp enters by itself; see CallSession::enter_warp. Returns false,
  // the same in all lanes, when the group has failed.
  __device__ bool enter_warp() {
    using Fields = CallSession::Fields;
    if (!call_.enter_warp(params_.descriptor, must_enter() ? Fields::all : Fields::ll_path,
                          dynamic_shared_memory<PeerDescriptors>()[threadIdx.x / kWarp]))
      return false;
    if (must_enter() && lane() == 0) report();
    return true;
  }
  // Returns whether this is the warp that enters even if it has no tile, because the kernel must not end before the entry
  // barrier. It also checks that the ranks agree, and is not the warp with the first tile.
  __device__ bool must_enter() const { return blockIdx.x == 0 && threadIdx.x / kWarp == 1; }

  __device__ const CallSession& call() const { return call_; }
  __device__ HandleReader plan() const { return {params_.call.handle_mem, params_.layout}; }
  __device__ bool is_active(int rank) const {
    return is_usable_ && ((call_.descriptors().plan_id[rank] ^ plan_id_) & ~kSendsNoRows) == 0;
  }
  // Returns whether a rank, this one included, is active and its tokens have rows.
  __device__ bool sends_rows(int rank) const {
    return is_usable_ && call_.descriptors().plan_id[rank] == (plan_id_ & ~kSendsNoRows);
  }
  // A route is live when prepare has kept it, its rank is active, and its slot is below that rank's N.
  __device__ bool is_live(const Route& route) const {
    return route.slot >= 0 && is_active(route.rank) && route.slot < call_.descriptors().recv_rows[route.rank];
  }
  // The same for a route of this rank to itself, which is known without the descriptors of the peers.
  __device__ bool is_live_here(const Route& route) const {
    return route.rank == call_.rank() && route.slot >= 0 && route.slot < params_.call.recv_rows;
  }
  // The functions below read the body of the handle memory, and return values in bounds whatever its bytes are. Routes that
  // were not kept have slot -1. The rank ordinals of routes are not checked here; see rank_ordinal_of.
  __device__ WarpRoutes routes_of(int64_t token) const {
    const Route* const routes = plan().routes + token * params_.call.top_k;
    const auto route = [&](int k) {
      constexpr Route kNone{-1, -1, 0};
      if (k >= params_.call.top_k) return kNone;
      return kept_or_none(routes[k]);
    };
    return {route(lane()), route(lane() + kWarp)};
  }
  __device__ Route route_of(int64_t token, int k) const {
    return kept_or_none(plan().routes[route_index(token, params_.call.top_k, k)]);
  }
  // Return the rank ordinal of a route, or of a slot of this rank, in bounds.
  __device__ int rank_ordinal_of(int32_t rank_ordinal) const { return limits().rank_ordinal(rank_ordinal); }
  __device__ int rank_ordinal_of_slot(int32_t slot) const {
    return limits().rank_ordinal(plan().slot_records[slot].rank_ordinal);
  }
  __device__ int k_of_slot(int32_t slot) const { return limits().k(plan().slot_records[slot].k); }
  // `index` is a token of the rank; of a rank-major plan it is a row, because that lists only the tokens that came.
  __device__ TokenSlots slots_of(int rank, int64_t index) const {
    if (params_.call.is_rank_major()) return slot_of_row(rank, index);
    const int64_t token = index;
    TokenSlots found;
    found.token = static_cast<int32_t>(token);
    const int32_t first_slot = first_slot_of(rank, token);
    if (first_slot < 0) return found;
    found.first_slot = first_slot;
    found.rank_ordinal = rank_ordinal_of_slot(first_slot);
    for (SlotChain chain(limits(), plan().slot_records, first_slot); chain.has_slot(); chain.advance())
      if (chain.slot() < params_.call.recv_rows) found.slots.append(chain.slot());
    return found;
  }
  // Rank-major: the one slot of a row.
  __device__ TokenSlots slot_of_row(int rank, int64_t row) const {
    TokenSlots found;
    if (row >= tokens_of(rank)) return found;
    const auto slot = static_cast<int32_t>(rank * params_.call.slots_per_source + row);
    const SlotRecord record = plan().slot_records[slot];
    if (!limits().has_origin(record)) return found;
    found.first_slot = slot;
    found.rank_ordinal = rank_ordinal_of(record.rank_ordinal);
    found.token = record.token;
    found.slots.append(slot);
    return found;
  }
  // Rank-major: returns whether the receive rows of the sources follow each other. No peer knows where this rank has its rows
  // then, so that none stores them in place.
  __device__ bool is_compact() const { return is_compact_; }
  // Returns the row of the receive tensors that a slot of this rank is.
  __device__ int64_t row_of_slot(int64_t slot) const {
    if (!is_compact_) return params_.call.row_of_slot(slot);
    const auto slots = static_cast<uint32_t>(params_.call.slots_per_source); // a 64-bit division would take long
    const uint32_t source = static_cast<uint32_t>(slot) / slots;
    return limits().compact_row(plan().source_rows[source], static_cast<uint32_t>(slot) - source * slots, slots);
  }
  // Rank-major: returns which k of the row in a slot go to this rank.
  __device__ uint64_t mask_of_row(int32_t slot) const {
    if (params_.call.top_k == 1) return 1;
    const RankMajorMask mask = plan().masks(params_.call.num_slots(params_.group.context.shape))[slot];
    return mask.low | uint64_t{mask.high} << 32;
  }
  // Rank-major: returns a route of this rank with the slot of its row; slot -1: it was not kept, or its rank is not active.
  __device__ Route kept_route(int64_t token, int k) const {
    Route route = plan().routes[route_index(token, params_.call.top_k, k)];
    route.slot = limits().slot_of_kept(route);
    if (route.slot >= 0 && !is_active(route.rank)) route.slot = -1;
    return route;
  }
  // As slots_of, on the low-latency path.
  __device__ LlSlots ll_slots_of(int rank, int64_t token) const {
    if (params_.call.is_rank_major()) {
      const TokenSlots found = slot_of_row(rank, token);
      return {lane() == 0 && found.token < ll_tokens_ ? found.first_slot : -1, -1};
    }
    const int32_t* const slots =
        plan().ll_slots + (rank * params_.group.context.layout.ll_tokens + token) * params_.call.top_k;
    const auto live_slot = [&](int k) {
      const int32_t slot = k < params_.call.top_k ? slots[k] : -1;
      return limits().is_slot(slot) && slot < params_.call.recv_rows ? slot : -1;
    };
    return {live_slot(lane()), live_slot(lane() + kWarp)};
  }
  // The slots on this rank of one of its own tokens.
  __device__ LlSlots ll_slots_here(const WarpRoutes& routes) const {
    return {is_live_here(routes.low) ? routes.low.slot : -1, is_live_here(routes.high) ? routes.high.slot : -1};
  }
  // Dynamic tile scheduler: a warp that has finished one of `tiles` tiles gets the next, because some warps get more bandwidth
  // of the wire and of memory than others. A warp's first tile is its index in the work partition; it goes on until
  // it gets a number beyond the last tile. So the tile counter is taken tiles + joining times: once for each tile that is not
  // the first of a warp, and once more by each warp that had a tile or has joined. Returns the first tile of a warp, which is
  // taken from the counter too if the warp has joined.
  __device__ int64_t first_tile(const WarpAssignment& warp, int64_t tiles) const {
    return warp.index >= 0 ? warp.index : next_tile(warp, tiles);
  }
  // Returns the next tile.
  __device__ int64_t next_tile(const WarpAssignment& warp, int64_t tiles) const {
    DeviceState& state = *params_.group.state;
    return warp.count + call_.take_tile(warp.role == WarpRole::send ? state.send_tiles_taken : state.receive_tiles_taken,
                                        tiles + warp.joining);
  }
  // Returns how many tokens of a rank may have slots on this rank; rank-major: how many rows of it this rank keeps.
  __device__ int64_t tokens_of(int rank) const {
    if (params_.call.is_rank_major()) return limits().rows(plan().source_rows[rank], params_.call.slots_per_source);
    return is_active(rank) ? call_.descriptors().num_tokens[rank] : params_.group.context.shape.max_tokens_per_rank;
  }
  // Returns the `index`-th token of a peer in the order in which this rank serves its peers: tokens ascend, and the peer that
  // comes first rotates with the token, since stores of all ranks to the same peer at the same time take longer. The token may
  // be beyond those of the peer. The index is below P * max_tokens_per_rank, which is less than 2^31.
  struct PeerToken {
    int rank;
    int64_t token;
  };
  __device__ PeerToken peer_token(uint32_t index) const { // a 64-bit division would take long
    const auto peers = static_cast<uint32_t>(call_.num_ranks() - 1);
    const uint32_t token = index / peers;
    return {peer_in_order(token, static_cast<int>(index - token * peers)), token};
  }
  // As slots_of, for up to SlotBatch::max_tokens(K) tokens at the same time: each lane passes one, whose rank is -1 where there
  // is none. It is not for rank-major plans.
  __device__ SlotBatch slots_of_batch(const PeerToken& from) const {
    SlotBatch batch;
    const int room = SlotBatch::room_for(params_.call.top_k);
    if (from.rank >= 0 && from.token < tokens_of(from.rank)) batch.first_slot = first_slot_of(from.rank, from.token);
    SlotChain chain(limits(), plan().slot_records, batch.first_slot);
    while (__any_sync(~0u, chain.has_slot() ? 1 : 0) != 0) {
      const bool is_live = chain.has_slot() && chain.slot() < params_.call.recv_rows;
      const int token = lane() / room;
      const int32_t slot = from_lane(is_live ? chain.slot() : -1, token);
      const int index = from_lane(batch.size, token);
      if (slot >= 0 && index == lane() % room) batch.slot = slot;
      if (is_live) ++batch.size;
      if (chain.has_slot()) chain.advance();
    }
    return batch;
  }
  // Returns the i-th peer, i < P - 1, that this rank serves at a token.
  __device__ int peer_in_order(int64_t token, int i) const { return cuda::peer_in_order(call_, token, i); }
  // Returns the number of indices that peer_token takes.
  __device__ int64_t num_peer_tokens() const {
    int64_t max_tokens = 0;
    for (int rank = 0; rank < call_.num_ranks(); ++rank)
      if (rank != call_.rank()) max_tokens = max(max_tokens, tokens_of(rank));
    return max_tokens * (call_.num_ranks() - 1);
  }

private:
  // The limits are built from the parameters each time, because keeping them would take registers.
  __device__ HandleLimits limits() const {
    const GroupShape& shape = params_.group.context.shape;
    return {shape, params_.call.top_k, params_.call.num_slots(shape)};
  }

  __device__ Route kept_or_none(const Route& found) const {
    const bool is_kept = limits().is_route(found);
    return {is_kept ? found.slot : -1, is_kept ? found.rank : -1, found.rank_ordinal};
  }
  // Returns a token's first slot on this rank, live or not; -1: none.
  __device__ int32_t first_slot_of(int rank, int64_t token) const {
    const int32_t slot =
        plan().first_slots[rank * static_cast<int64_t>(params_.group.context.shape.max_tokens_per_rank) + token];
    return limits().is_slot(slot) ? slot : -1;
  }

  __device__ void report() const { report_events(call_.context(), params_, call_.descriptors(), is_usable_); }

  const MovementParams& params_;
  CallSession call_;
  bool is_usable_;
  bool is_compact_;
  uint64_t plan_id_; // from the handle header, as is the next one
  int32_t ll_tokens_;
};

} // namespace epx::cuda
