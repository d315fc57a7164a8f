// What scatter and gather have in common: the plan in the handle memory, who takes part, which routes live in this call, and
// who does what. Some warps of each block send, token by token, and tell the receiver of each; the others receive, so that
// what a rank does with its rows happens behind the wire.
#pragma once

#include "runtime/stages/cuda/call.cuh"
#include "runtime/stages/cuda/warp.cuh"
#include "runtime/stages/slots.h"
#include "runtime/stages/stages.h"

namespace epx::cuda {

// What a warp does, and which of the warps of its role it is.
struct Role {
  bool sends;
  int64_t index;
  int64_t count;
};

// The first `senders` warps of each block send; with one rank, all receive. Neighbours are in different blocks, so that few
// tokens are on many multiprocessors.
__device__ inline Role role_of_warp(int senders, int num_ranks) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (num_ranks == 1) senders = 0;
  const bool sends = warp < senders;
  const int of_role = sends ? senders : warps - senders;
  return {sends, static_cast<int64_t>(sends ? warp : warp - senders) * gridDim.x + blockIdx.x,
          static_cast<int64_t>(gridDim.x) * of_role};
}

// One movement in progress, after its ranks have met.
class Movement {
public:
  __device__ Movement(const DeviceGroup& group, const MovementCall& call, const HandleLayout& layout)
      : group_(group), call_(group, call.operation), args_(call), plan_(call.handle_mem, layout) {
    const HandleHeader& header = *plan_.header;
    is_usable_ = header.magic == kHandleMagic && header.checksum == header_checksum(header) &&
                 header.group_id == group.context.group_id && header.rank == group.context.rank &&
                 header.top_k == call.top_k && header.alignment == call.alignment && header.num_tokens == call.num_tokens;
  }

  // False: the group has failed.
  __device__ bool begin(CallPost offer) {
    offer.top_k = args_.top_k;
    offer.alignment = args_.alignment;
    offer.hidden = args_.hidden;
    offer.dtype = args_.dtype;
    offer.plan_id = is_usable_ ? plan_.header->plan_id : 0;
    offer.num_tokens = args_.num_tokens;
    offer.recv_rows = args_.recv_rows;
    if (!call_.arrive(offer, blockIdx.x == 0)) return false;
    if (blockIdx.x == 0 && threadIdx.x == 0) report();
    return true;
  }

  // False: the handle memory is not this call's; outputs stay untouched.
  __device__ bool takes_part() const { return is_usable_; }

  __device__ const Call& call() const { return call_; }
  __device__ const HandleReader& plan() const { return plan_; }
  __device__ bool is_active(int rank) const { return is_usable_ && call_.offer_of(rank).plan_id == plan_.header->plan_id; }
  // Whether a route takes part in this call: kept by prepare, its rank active, its slot below that rank's N.
  __device__ bool is_live(const Route& route) const {
    return route.slot >= 0 && is_active(route.rank) && route.slot < call_.offer_of(route.rank).recv_rows;
  }
  // The slots here of a token that are live, in k order.
  __device__ WarpList<int32_t> live_slots(int rank, int64_t token) const {
    WarpList<int32_t> slots;
    for (int64_t slot = head_of(rank, token); slot >= 0; slot = plan_.slot_records[slot].next_slot)
      if (slot < args_.recv_rows) slots.append(static_cast<int32_t>(slot));
    return slots;
  }
  // The first slot here of a token, live or not; -1: none.
  __device__ int32_t head_of(int rank, int64_t token) const {
    return plan_.heads[rank * static_cast<int64_t>(group_.context.shape.max_tokens_per_rank) + token];
  }
  // Tokens of a rank that may have slots here.
  __device__ int64_t tokens_of(int rank) const {
    return is_active(rank) ? call_.offer_of(rank).num_tokens : group_.context.shape.max_tokens_per_rank;
  }
  // The token of a peer that is `index`-th in the order in which this rank serves its peers: tokens ascending, and at each
  // token another peer first, since stores of all ranks to the same peer at the same time take longer. May be beyond its
  // tokens.
  struct PeerToken {
    int rank;
    int64_t token;
  };
  __device__ PeerToken peer_token(int64_t index) const {
    const int peers = call_.num_ranks() - 1;
    const int64_t token = index / peers;
    return {peer_in_order(token, static_cast<int>(index % peers)), token};
  }
  // The i-th peer, i < P - 1, of this rank at a token.
  __device__ int peer_in_order(int64_t token, int i) const {
    const int peers = call_.num_ranks() - 1;
    return (call_.rank() + 1 + static_cast<int>((token + i) % peers)) % call_.num_ranks();
  }
  // As many indices as peer_token has.
  __device__ int64_t num_peer_tokens() const {
    int64_t most = 0;
    for (int rank = 0; rank < call_.num_ranks(); ++rank)
      if (rank != call_.rank()) most = max(most, tokens_of(rank));
    return most * (call_.num_ranks() - 1);
  }

  // Where a peer's receive rows can be written; NULL where they cannot.
  __device__ std::byte* rows_of(int rank) const {
    const CallPost& offer = call_.offer_of(rank);
    if (offer.rows_allocation < 0) return nullptr;
    return group_.allocations[offer.rows_allocation % kMaxDeviceAllocations * call_.num_ranks() + rank] + offer.rows_offset;
  }

private:
  // What the host transport reports too, in the same order.
  __device__ void report() const {
    if (!is_usable_) {
      call_.record_event(EPX_EVENT_HANDLE_MISMATCH, args_.top_k, args_.alignment, args_.num_tokens, -1, 0, plan_.header);
      return;
    }
    for (int rank = 0; rank < call_.num_ranks(); ++rank) {
      const uint64_t plan_id = call_.offer_of(rank).plan_id;
      if (plan_id == 0 || plan_id == plan_.header->plan_id) continue;
      call_.record_event(EPX_EVENT_HANDLE_MISMATCH, 0, 0, 0, rank, static_cast<int64_t>(plan_id), plan_.header);
      break;
    }
    if (args_.recv_rows >= plan_.header->rows_in_use) return;
    const ExpertBlocks experts{group_.context.shape.num_experts, call_.num_ranks()};
    int64_t beyond = 0;
    for (int expert = 0; expert < experts.num_local_experts(call_.rank()); ++expert) {
      const int64_t begin = plan_.zone_begin[expert];
      const int64_t end = begin + plan_.zone_rows[expert];
      const int64_t first_lost = args_.recv_rows > begin ? args_.recv_rows : begin;
      if (end > first_lost) beyond += end - first_lost;
    }
    if (beyond > 0) call_.record_event(EPX_EVENT_TOO_FEW_ROWS, beyond, args_.recv_rows, plan_.header->rows_in_use);
  }

  const DeviceGroup& group_;
  Call call_;
  const MovementCall& args_;
  HandleReader plan_;
  bool is_usable_;
};

} // namespace epx::cuda
