// SPDX-License-Identifier: Apache-2.0
// The second half of prepare, for both algorithms: every route gets its slot, and the handle memory and the outputs are
// written.
//
// The derived class (CRTP) maps the number of a token, among the tokens that the blocks partition, to its rank (origin_of) and
// to its experts (expert_of), and stores a slot, its record, and a token's first slot (put_*). With kWritesLocally, put_* write
// what concerns this rank into the handle memory. Without it, put_record and put_first_slot store LL packets in the window of
// the slot's rank, this one included, and take_record and take_first_slot read them there.
#pragma once

#include "runtime/stages/cuda/prepare/prepare_cta.cuh"

namespace epx::cuda {

// A token and its home rank.
struct Origin {
  int rank;
  int64_t token;
};

template <typename Derived>
class SlotAssignment : public PrepareCta {
public:
  __device__ void finish() {
    assign();
    if (threadIdx.x == kThreads - 1) call_.sent(gridDim.x);
    deliver();
  }

protected:
  __device__ explicit SlotAssignment(const PrepareCta& cta) : PrepareCta(cta) {}

private:
  __device__ const Derived& derived() const { return static_cast<const Derived&>(*this); }

  __device__ void assign() {
    const int64_t tile_tokens = kThreads / args_.top_k;
#pragma unroll 1
    for (int64_t token = begin_; token < end_; token += tile_tokens)
      assign_tile(token, min(token + tile_tokens, end_));
  }

  // Each thread has one route; the routes of a token are in neighbouring threads.
  __device__ void assign_tile(int64_t first_token, int64_t end_token) {
    __shared__ int32_t slots[kThreads]; // -1: masked or dropped
    __shared__ int32_t ranks[kThreads];
    const int thread = threadIdx.x;
    const int warp = thread / kWarp;
    const int k = thread % args_.top_k;
    const int64_t token = first_token + thread / args_.top_k;
    const bool is_route = token < end_token;
    const Origin origin = is_route ? derived().origin_of(token) : Origin{};
    const int expert = is_route ? derived().expert_of(token, k) : -1;

    // A route's position among the tile's routes to the same expert: first come the routes of the warps before, then those of
    // the lanes before. This keeps the sort stable.
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
    const int first = thread - k; // the thread of the token's first route
    const int64_t route = origin.token * args_.top_k + k;
    const bool is_own = origin.rank == call_.rank();
    const int32_t slot = slots[thread];
    const int32_t rank = ranks[thread];
    if (is_own && args_.slot != nullptr) args_.slot[route] = slot;
    derived().put_slot(origin, k, rank, slot);
    if (slot < 0) {
      if (is_own) plan_.routes[route] = {-1, -1, 0};
      return;
    }
    uint64_t lower_ranks = 0; // a bit for each lower rank that the token goes to
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
    if (is_own) plan_.routes[route] = {slot, rank, rank_ordinal};
    const SlotRecord record{static_cast<int32_t>(origin.token),     next_slot,
                            static_cast<uint16_t>(origin.rank),     static_cast<uint8_t>(k),
                            static_cast<uint8_t>(is_first ? 1 : 0), static_cast<uint8_t>(rank_ordinal & 0x7f)};
    derived().put_record(rank, slot, record);
  }

  // Stores the first slot, or -1, of each token of the tile: on this rank alone with kWritesLocally, otherwise on every rank.
  // Neighbouring threads have neighbouring tokens, so that their stores coalesce.
  __device__ void write_first_slots(int64_t first_token, int num_tokens, const int32_t* slots, const int32_t* ranks) const {
    const int first_rank = Derived::kWritesLocally ? call_.rank() : 0;
    const int num_ranks = Derived::kWritesLocally ? 1 : shape_.num_ranks;
#pragma unroll 1
    for (int i = threadIdx.x; i < num_tokens * num_ranks; i += kThreads) {
      const int rank = first_rank + i / num_tokens;
      const int token = i % num_tokens;
      int32_t first_slot = -1;
      for (int k = args_.top_k - 1; k >= 0; --k)
        if (const int route = token * args_.top_k + k; ranks[route] == rank) first_slot = slots[route];
      const Origin origin = derived().origin_of(first_token + token);
      derived().put_first_slot(rank, origin.rank * static_cast<int64_t>(shape_.max_tokens_per_rank) + origin.token,
                               first_slot);
    }
  }

  // The first slot of the zone of one of this rank's experts, and the routes that it keeps.
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

  // Damaged counts may add up to more than 31 bits, so that the sum may even be negative.
  __device__ int64_t rows_in_use_of(int64_t rows_needed) const {
    return max(int64_t{0}, min(rows_needed, usable_));
  }

  // All blocks write together what is left of the handle memory and the outputs.
  __device__ void deliver() {
    const int local_experts = experts_.num_local_experts(call_.rank());
    const int last_expert = experts_.first_expert(call_.rank()) + local_experts - 1;
    const int64_t rows_needed = local_experts == 0 ? 0 : zone_[last_expert] + rows_of_zone(demand_[last_expert]);
    const int64_t rows_in_use = rows_in_use_of(rows_needed);
    const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
    const uint32_t threads = gridDim.x * kThreads;
    if (derived().is_leader_cta()) deliver_totals(local_experts, rows_needed);
    if (!deliver_first_slots(thread, threads) || !deliver_records(thread, threads, static_cast<uint32_t>(rows_in_use)))
      return;
    if (args_.slot_origin != nullptr)
#pragma unroll 1
      for (int64_t slot = rows_in_use + thread; slot < shape_.max_recv_tokens; slot += threads)
        write_origin(slot, kPadRecord);
    if (args_.global_counts != nullptr) derived().deliver_global_counts();
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
    if (threadIdx.x / kWarp == kWarps - 1) Derived(derived()).report(local_experts, rows_needed);
  }

  // Writes the first slots, which movements look up by (source, token). Entries beyond a source's tokens are written too,
  // because the handle memory may hold anything, such as the slots of an earlier prepare. Returns false when the group has
  // failed.
  __device__ bool deliver_first_slots(uint32_t thread, uint32_t threads) const {
    const auto max_tokens = static_cast<uint32_t>(shape_.max_tokens_per_rank);
    const uint32_t all = static_cast<uint32_t>(shape_.num_ranks) * max_tokens; // fewer than 2^31
#pragma unroll 1
    for (uint32_t i = thread; i < all; i += threads) {
      const auto source = static_cast<int>(i / max_tokens);
      int32_t first_slot = -1;
      if (static_cast<int32_t>(i % max_tokens) < call_.descriptors().num_tokens[source]) {
        if constexpr (Derived::kWritesLocally)
          continue;
        else if (!derived().take_first_slot(source, i, first_slot))
          return false;
      } else {
        derived().put_no_slots({source, static_cast<int64_t>(i % max_tokens)});
      }
      plan_.first_slots[i] = first_slot;
    }
    return true;
  }

  // Returns false when the group has failed.
  __device__ bool deliver_records(uint32_t thread, uint32_t threads, uint32_t rows_in_use) const {
#pragma unroll 1
    for (uint32_t slot = thread; slot < rows_in_use; slot += threads) {
      const int expert = expert_at(static_cast<int32_t>(slot));
      SlotRecord record = kPadRecord;
      if (static_cast<int32_t>(slot) - zone_[expert] < demand_[expert]) {
        if constexpr (Derived::kWritesLocally)
          continue;
        else if (!derived().take_record(slot, record))
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
    header.ll_tokens = derived().ll_tokens();
    header.checksum = header_checksum(header);
    *plan_.header = header;
  }

  // One warp calls this.
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
      args_.info[3] = static_cast<int64_t>(dropped_routes());
      args_.info[4] = rows_needed;
    }
    if constexpr (Derived::kWritesLocally) report_bad_indices(bad_indices().number, bad_indices().first_inverted);
    if (group_.context.overflow == EPX_OVERFLOW_ERROR && demand > kept)
      record_event(call_.context(), EPX_EVENT_OVERFLOW, demand - kept, demand, demand - kept, rows_needed);
  }
};

} // namespace epx::cuda
