// SPDX-License-Identifier: Apache-2.0
// How many rows each rank has for this one in a call of dispatch_rank_major, which every rank stores on the exchange board; and
// what follows from it for the call as a whole.
//
// The kernels exist twice, with kCompact for EPX_ROWS_COMPACT. Where a source's rows lie in the receive tensors of a rank follows
// from the counts of the sources before it then, so that no row goes there before the rank has them.
#pragma once

#include "runtime/stages/cuda/scatter/rank_major_call.cuh"

namespace epx::cuda {

// Each warp has one.
template <bool kCompact>
class RankMajorRowCounts : public RankMajorCall {
public:
  using RankMajorCall::RankMajorCall;

  // One thread stores on a rank's board how many rows this one has for it, and how many routes lie beyond M. The rows lie
  // beside the epoch, since most warps use these two words alone (memory_order.cuh).
  __device__ void store_counts(int rank, int32_t rows, int32_t dropped) const {
    store_packet_relaxed_sys(board_at(rank, call_.rank()),
                             LlPacket16{{static_cast<uint32_t>(dropped), 0, static_cast<uint32_t>(rows)}, call_.epoch()});
  }

  // A warp calls these two: the first begins to load the numbers, and the second waits for those that were not there. It
  // returns false when the group has failed. A rank that has stored its number has begun the call.
  __device__ void load_counts() {
    if (lane() < call_.num_ranks()) counts_.low = load_packet_relaxed_sys(board_at(call_.rank(), lane()));
    if (kWarp + lane() < call_.num_ranks()) counts_.high = load_packet_relaxed_sys(board_at(call_.rank(), kWarp + lane()));
  }
  __device__ bool wait_for_counts() {
    bool ok = wait_for_counts_of(lane(), counts_.low);
    if (call_.num_ranks() > kWarp) ok &= wait_for_counts_of(kWarp + lane(), counts_.high);
    if (__all_sync(~0u, ok ? 1 : 0) == 0) return false;
    if constexpr (kCompact) {
      begins_ = begins_of({kept_of(counts_.low), kept_of(counts_.high)});
      own_begin_ = static_cast<int32_t>(recv_row(call_.rank(), 0));
    }
    return true;
  }

  // One warp calls these two, which store what concerns the whole call; the first one needs no counts.
  __device__ void report_plan() const {
    if (lane() == 0) store_header();
  }
  __device__ void report_counts() const {
    const PerRank<int32_t> rows{kept_of(counts_.low), kept_of(counts_.high)};
    store_count(lane(), {rows.low, begins_.low});
    store_count(kWarp + lane(), {rows.high, begins_.high});
    int64_t dropped = int64_t{counts_.low.values[0]} + counts_.high.values[0];
#pragma unroll 1
    for (int distance = 1; distance < kWarp; distance *= 2)
      dropped += __shfl_xor_sync(~0u, dropped, distance);
    const uint32_t most_rows = __reduce_max_sync(~0u, max(counts_.low.values[2], counts_.high.values[2]));
    if (lane() == 0 && dropped > 0)
      record_event(call_.context(), EPX_EVENT_TOO_FEW_ROWS, dropped, dropped, args_.rows_per_source, most_rows);
    if (group_.context.checks_handle_mem) store_pad_records();
  }

protected:
  // Returns the row of the receive tensors; unlike MovementCall::row_of_slot without a division. In a compact call the warp has
  // waited for the counts, and all its lanes call this, each with a source of its own; -1: any row.
  __device__ int64_t recv_row(int source, int32_t row) const {
    if constexpr (kCompact) {
      const int32_t low = from_lane(begins_.low, source & (kWarp - 1));
      const int32_t high = from_lane(begins_.high, source & (kWarp - 1));
      return int64_t{source < kWarp ? low : high} + row;
    } else {
      return source * args_.rows_per_source + row;
    }
  }
  // The same of a row of this rank. Each lane may call it by itself.
  __device__ int64_t own_recv_row(int32_t row) const {
    return (kCompact ? int64_t{own_begin_} : call_.rank() * args_.rows_per_source) + row;
  }
  // How many rows of a source this rank keeps. `source` may differ by lane; all lanes call this.
  __device__ int32_t rows_of(int source) const {
    const int32_t low = from_lane(kept_of(counts_.low), source % kWarp);
    if (call_.num_ranks() <= kWarp) return low;
    const int32_t high = from_lane(kept_of(counts_.high), source % kWarp);
    return source < kWarp ? low : high;
  }
  // The same of the rank that has the most, and of the peer that has the most.
  __device__ int32_t most_rows() const {
    return static_cast<int32_t>(
        __reduce_max_sync(~0u, static_cast<unsigned>(max(kept_of(counts_.low), kept_of(counts_.high)))));
  }
  __device__ int32_t most_rows_of_peers() const {
    const int32_t low = lane() != call_.rank() ? kept_of(counts_.low) : 0;
    const int32_t high = kWarp + lane() != call_.rank() ? kept_of(counts_.high) : 0;
    return static_cast<int32_t>(__reduce_max_sync(~0u, static_cast<unsigned>(max(low, high))));
  }

private:
  __device__ bool wait_for_counts_of(int source, LlPacket16& counts) const {
    return source >= call_.num_ranks() || call_.wait_for_loaded_packet(board_at(call_.rank(), source), counts, source);
  }
  // The peer's number may be anything; M is larger than slots_per_source only where no source can have so many rows.
  __device__ int32_t kept_of(const LlPacket16& counts) const {
    return max(0, min(static_cast<int32_t>(counts.values[2]), static_cast<int32_t>(args_.slots_per_source)));
  }
  __device__ void store_count(int source, const SourceRows& rows) const {
    if (source >= call_.num_ranks()) return;
    plan_.source_rows[source] = rows;
    store_integer(args_.counts, args_.counts_are_64, source, rows.kept);
  }
  // Returns how many rows the ranks before each one have.
  __device__ static PerRank<int32_t> begins_of(const PerRank<int32_t>& kept) {
    PerRank<int32_t> sums = kept;
#pragma unroll 1
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const PerRank<int32_t> left{__shfl_up_sync(~0u, sums.low, distance), __shfl_up_sync(~0u, sums.high, distance)};
      if (lane() >= distance) sums = {sums.low + left.low, sums.high + left.high};
    }
    return {sums.low - kept.low, from_lane(sums.low, kWarp - 1) + sums.high - kept.high};
  }

  // EPX_CHECK_HANDLE_MEM sums up the records of all slots, so those without a row need contents. One warp stores them.
  __device__ void store_pad_records() const {
    const auto slots = static_cast<int32_t>(args_.slots_per_source);
#pragma unroll 1
    for (int source = 0; source < call_.num_ranks(); ++source)
#pragma unroll 1
      for (int32_t row = rows_of(source) + lane(); row < slots; row += kWarp) {
        plan_.slot_records[slot_of(source, row)] = kPadRecord;
        if (args_.top_k > 1) plan_.masks(args_.num_slots(group_.context.shape))[slot_of(source, row)] = {0, 0, 0};
      }
  }

  PerRank<LlPacket16> counts_{}; // zeros where there is no such rank
  PerRank<int32_t> begins_{};    // compact: the row of the receive tensors where the rows of the rank begin; else 0
  int32_t own_begin_ = 0;        // that of this rank
};

} // namespace epx::cuda
