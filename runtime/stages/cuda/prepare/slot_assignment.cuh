// The second half of prepare, for either way: every route gets its slot, and the handle memory and the outputs are written.
//
// A way tells, of tokens by their number in what the blocks share, whose they are (origin_of) and where they go
// (expert_of), and what becomes of a slot, its record, and a token's first slot (put_*). kWritesHere: then all that
// concerns this rank is written; else the last two come from peers, itself among them (take_*).
#pragma once

#include "runtime/stages/cuda/prepare/prepare_cta.cuh"

namespace epx::cuda {

// A token, and whose it is.
struct Origin {
  int rank;
  int64_t token;
};

template <typename Way>
class SlotAssignment : public PrepareCta {
public:
  __device__ void finish() {
    assign();
    if (threadIdx.x == kThreads - 1) call_.sent(gridDim.x);
    deliver();
  }

protected:
  __device__ explicit SlotAssignment(const PrepareCta& block) : PrepareCta(block) {}

private:
  __device__ const Way& way() const { return static_cast<const Way&>(*this); }

  __device__ void assign() {
    const int64_t tile_tokens = kThreads / args_.top_k;
#pragma unroll 1
    for (int64_t token = begin_; token < end_; token += tile_tokens)
      assign_tile(token, min(token + tile_tokens, end_));
  }

  // A thread is one route; a token's routes lie in neighbouring threads.
  __device__ void assign_tile(int64_t first_token, int64_t end_token) {
    __shared__ int32_t slots[kThreads]; // -1: masked or dropped
    __shared__ int32_t ranks[kThreads];
    const int thread = threadIdx.x;
    const int warp = thread / kWarp;
    const int k = thread % args_.top_k;
    const int64_t token = first_token + thread / args_.top_k;
    const bool is_route = token < end_token;
    const Origin origin = is_route ? way().origin_of(token) : Origin{};
    const int expert = is_route ? way().expert_of(token, k) : -1;

    // Stable rank among the tile's routes to the same expert: those in warps before, then those in lanes before.
#pragma unroll 1
    for (int i = thread; i < num_experts() * kWarps; i += kThreads)
      warp_base_[i] = 0;
    __syncthreads();
    const unsigned same = __match_any_sync(~0u, expert);
    const unsigned before = same & ((1u << lane()) - 1);
    if (expert >= 0 && before == 0) warp_base_[warp * num_experts() + expert] = __popc(same);
    __syncthreads();
#pragma unroll 1
    for (int e = thread; e < num_experts(); e += kThreads) {
      int32_t counts[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w)
        counts[w] = warp_base_[w * num_experts() + e];
      int32_t next = next_[e];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        warp_base_[w * num_experts() + e] = next;
        next += counts[w];
      }
      next_[e] = next;
    }
    __syncthreads();
    int64_t slot = -1;
    if (expert >= 0) {
      slot = warp_base_[warp * num_experts() + expert] + __popc(before);
      if (static_cast<uint64_t>(slot) >= static_cast<uint64_t>(usable_)) slot = -1;
    }
    slots[thread] = static_cast<int32_t>(slot);
    ranks[thread] = slot >= 0 ? experts_.rank_of(expert) : -1;
    __syncthreads();
    if (is_route) write_route(origin, k, slots, ranks);
    write_first_slots(first_token, static_cast<int>(end_token - first_token), slots, ranks);
    __syncthreads();
  }

  __device__ void write_route(const Origin& origin, int k, const int32_t* slots, const int32_t* ranks) const {
    const int thread = threadIdx.x;
    const int first = thread - k; // of the token
    const int64_t route = origin.token * args_.top_k + k;
    const bool is_mine = origin.rank == call_.rank();
    const int32_t slot = slots[thread];
    const int32_t rank = ranks[thread];
    if (is_mine && args_.slot != nullptr) args_.slot[route] = slot;
    way().put_slot(origin, k, rank, slot);
    if (slot < 0) {
      if (is_mine) plan_.routes[route] = {-1, -1, 0};
      return;
    }
    uint64_t lower_ranks = 0; // that the token goes to, a bit each
    int32_t next_slot = -1;
    bool is_first = true;
    for (int other = args_.top_k - 1; other >= 0; --other) {
      const int32_t other_rank = ranks[first + other];
      if (other_rank < 0) continue;
      if (other_rank < rank) lower_ranks |= uint64_t{1} << other_rank;
      if (other_rank != rank) continue;
      if (other > k) next_slot = slots[first + other];
      if (other < k) is_first = false;
    }
    const int rank_ordinal = __popcll(lower_ranks);
    if (is_mine) plan_.routes[route] = {slot, rank, rank_ordinal};
    const SlotRecord record{static_cast<int32_t>(origin.token),     next_slot,
                            static_cast<uint16_t>(origin.rank),     static_cast<uint8_t>(k),
                            static_cast<uint8_t>(is_first ? 1 : 0), static_cast<uint8_t>(rank_ordinal & 0x7f)};
    way().put_record(rank, slot, record);
  }

  // The first slot of each token of the tile, on each rank that wants to know; -1: none. Neighbouring threads,
  // neighbouring tokens.
  __device__ void write_first_slots(int64_t first_token, int num_tokens, const int32_t* slots, const int32_t* ranks) const {
    const int first_rank = Way::kWritesHere ? call_.rank() : 0;
    const int num_ranks = Way::kWritesHere ? 1 : shape_.num_ranks;
#pragma unroll 1
    for (int i = threadIdx.x; i < num_tokens * num_ranks; i += kThreads) {
      const int rank = first_rank + i / num_tokens;
      const int token = i % num_tokens;
      int32_t head = -1;
      for (int k = args_.top_k - 1; k >= 0; --k)
        if (const int route = token * args_.top_k + k; ranks[route] == rank) head = slots[route];
      const Origin origin = way().origin_of(first_token + token);
      way().put_first_slot(rank, origin.rank * static_cast<int64_t>(shape_.max_tokens_per_rank) + origin.token, head);
    }
  }

  // Slots that a zone of this rank's experts really has.
  struct Zone {
    int64_t begin, kept;
  };
  __device__ Zone zone_of(int local_expert) const {
    const int expert = experts_.first_expert(call_.rank()) + local_expert;
    const int64_t begin = rows_in_use_of(zone_[expert]);
    const int64_t demand = demand_[expert];
    const int64_t kept = max(int64_t{0}, min(usable_ - begin, demand));
    return {begin, kept};
  }

  // Counts that nobody can have sent may add up to more than 31 bits, and to less than nothing.
  __device__ int64_t rows_in_use_of(int64_t rows_needed) const {
    return max(int64_t{0}, min(rows_needed, usable_));
  }

  // What is left to write. All blocks.
  __device__ void deliver() {
    const int local_experts = experts_.num_local_experts(call_.rank());
    const int last_expert = experts_.first_expert(call_.rank()) + local_experts - 1;
    const int64_t rows_needed = local_experts == 0 ? 0 : zone_[last_expert] + rows_of_zone(demand_[last_expert]);
    const int64_t rows_in_use = rows_in_use_of(rows_needed);
    const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
    const uint32_t threads = gridDim.x * kThreads;
    if (way().is_leader_cta()) deliver_totals(local_experts, rows_needed);
    if (!deliver_first_slots(thread, threads) || !deliver_records(thread, threads, static_cast<uint32_t>(rows_in_use)))
      return;
    if (args_.slot_origin != nullptr)
#pragma unroll 1
      for (int64_t slot = rows_in_use + thread; slot < shape_.max_recv_tokens; slot += threads)
        write_origin(slot, kPadRecord);
    if (args_.global_counts != nullptr) way().deliver_global_counts();
  }

  __device__ void deliver_totals(int local_experts, int64_t rows_needed) {
    const int64_t rows_in_use = rows_in_use_of(rows_needed);
#pragma unroll 1
    for (int e = threadIdx.x; e < local_experts; e += kThreads) {
      const Zone zone = zone_of(e);
      plan_.zone_begin[e] = static_cast<int32_t>(zone.begin);
      plan_.zone_rows[e] = static_cast<int32_t>(zone.kept);
      store_count(args_.counts, e, zone.kept);
      store_count(args_.offsets, e, zone.begin);
    }
    if (threadIdx.x == kThreads - kWarp - 1) {
      plan_.zone_begin[local_experts] = static_cast<int32_t>(rows_in_use);
      store_count(args_.offsets, local_experts, rows_in_use);
      write_header(rows_in_use);
    }
    if (threadIdx.x / kWarp == kWarps - 1) Way(way()).report(local_experts, rows_needed);
  }

  // What movements look up by (source, token). Tokens that a source lacks have no slots, and the handle memory may hold
  // anything, such as the slots of an earlier prepare. False: the group has failed.
  __device__ bool deliver_first_slots(uint32_t thread, uint32_t threads) const {
    const auto max_tokens = static_cast<uint32_t>(shape_.max_tokens_per_rank);
    const uint32_t all = static_cast<uint32_t>(shape_.num_ranks) * max_tokens; // fewer than slots can be numbered
#pragma unroll 1
    for (uint32_t i = thread; i < all; i += threads) {
      const auto source = static_cast<int>(i / max_tokens);
      int32_t head = -1;
      if (static_cast<int32_t>(i % max_tokens) < call_.descriptors().num_tokens[source]) {
        if constexpr (Way::kWritesHere)
          continue;
        else if (!way().take_first_slot(source, i, head))
          return false;
      } else {
        way().put_no_slots({source, static_cast<int64_t>(i % max_tokens)});
      }
      plan_.first_slots[i] = head;
    }
    return true;
  }

  // False: the group has failed.
  __device__ bool deliver_records(uint32_t thread, uint32_t threads, uint32_t rows_in_use) const {
#pragma unroll 1
    for (uint32_t slot = thread; slot < rows_in_use; slot += threads) {
      const int expert = expert_at(static_cast<int32_t>(slot));
      SlotRecord record = kPadRecord;
      if (static_cast<int32_t>(slot) - zone_[expert] < demand_[expert]) {
        if constexpr (Way::kWritesHere)
          continue;
        else if (!way().take_record(slot, record))
          return false;
      }
      write_record(slot, record);
    }
    return true;
  }

  __device__ void write_header(int64_t rows_in_use) const {
    HandleHeader header{};
    header.magic = kHandleMagic;
    header.group_id = group_.context.group_id;
    header.plan_id = call_.sequence();
    header.num_tokens = args_.num_tokens;
    header.rows_in_use = rows_in_use;
    header.top_k = args_.top_k;
    header.alignment = args_.alignment;
    header.rank = call_.rank();
    header.ll_tokens = way().ll_tokens();
    header.checksum = header_checksum(header);
    *plan_.header = header;
  }

  // One warp.
  __device__ __noinline__ void report(int local_experts, int64_t rows_needed) const {
    int64_t demand = 0;
    int64_t kept = 0;
#pragma unroll 1
    for (int e = lane(); e < local_experts; e += kWarp) {
      demand += demand_[experts_.first_expert(call_.rank()) + e];
      kept += zone_of(e).kept;
    }
    for (int distance = 1; distance < kWarp; distance *= 2) {
      demand += __shfl_xor_sync(~0u, demand, distance);
      kept += __shfl_xor_sync(~0u, kept, distance);
    }
    if (lane() != 0) return;
    if (args_.info != nullptr) {
      args_.info[0] = demand;
      args_.info[1] = kept;
      args_.info[2] = demand - kept;
      args_.info[3] = static_cast<int64_t>(dropped_of_mine());
      args_.info[4] = rows_needed;
    }
    if constexpr (Way::kWritesHere) report_bad_indices(bad_indices().number, bad_indices().first_inverted);
    if (group_.context.overflow == EPX_OVERFLOW_ERROR && demand > kept)
      call_.copy().record_event(EPX_EVENT_OVERFLOW, demand - kept, demand, demand - kept, rows_needed);
  }
};

} // namespace epx::cuda
