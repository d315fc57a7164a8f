// SPDX-License-Identifier: Apache-2.0
// How many rows each rank has for this one in a call of dispatch_rank_major, which every rank tells by the exchange board; and
// what follows from it for the call as a whole.
#pragma once

#include "runtime/stages/cuda/rank_major/rank_major_call.cuh"

namespace epx::cuda {

// Each warp has one.
class RankMajorRowCounts : public RankMajorCall {
public:
  using RankMajorCall::RankMajorCall;

  // A warp that receives or reports calls these two: the first begins to load the numbers, which may be there or not, and the
  // second, behind the entry barrier, waits for those that were not. It returns false when the group has failed.
  __device__ void load_counts() {
    if (lane() < call_.num_ranks()) low_ = load_packet_relaxed_sys(board_at(call_.rank(), lane()));
    if (kWarp + lane() < call_.num_ranks()) high_ = load_packet_relaxed_sys(board_at(call_.rank(), kWarp + lane()));
  }
  __device__ bool wait_for_counts() {
    bool ok = true;
#pragma unroll 1
    for (int first = 0; first < call_.num_ranks(); first += kWarp) {
      const int source = first + lane();
      if (source >= call_.num_ranks() || !ok) continue;
      LlPacket16& counts = first == 0 ? low_ : high_;
      ok = counts.epoch == call_.epoch() || call_.wait_for_packet(board_at(call_.rank(), source), counts, source);
    }
    return __all_sync(~0u, ok ? 1 : 0) != 0;
  }

  // One warp stores what concerns all rows.
  __device__ void report() const {
    int64_t dropped = 0;
    int32_t most_rows = 0;
#pragma unroll 1
    for (int first = 0; first < call_.num_ranks(); first += kWarp) {
      const int source = first + lane();
      const LlPacket16& counts = first == 0 ? low_ : high_;
      const int32_t rows = rows_of_own_lane(first);
      if (source >= call_.num_ranks()) continue;
      plan_.source_rows[source] = rows;
      store_integer(args_.counts, args_.counts_are_64, source, rows);
      dropped += counts.values[1];
      most_rows = max(most_rows, static_cast<int32_t>(counts.values[0]));
    }
#pragma unroll 1
    for (int distance = 1; distance < kWarp; distance *= 2)
      dropped += __shfl_xor_sync(~0u, dropped, distance);
    most_rows = static_cast<int32_t>(__reduce_max_sync(~0u, static_cast<unsigned>(most_rows)));
    if (lane() == 0) {
      store_header();
      if (dropped > 0)
        record_event(call_.context(), EPX_EVENT_TOO_FEW_ROWS, dropped, dropped, args_.rows_per_source, most_rows);
    }
    if (group_.context.checks_handle_mem) store_pad_records();
  }

protected:
  // How many rows of a source this rank keeps. `source` may differ by lane; all lanes call this.
  __device__ int32_t rows_of(int source) const {
    const int32_t low = from_lane(rows_of_own_lane(0), source % kWarp);
    if (call_.num_ranks() <= kWarp) return low;
    const int32_t high = from_lane(rows_of_own_lane(kWarp), source % kWarp);
    return source < kWarp ? low : high;
  }
  // The same of the peer that has the most.
  __device__ int32_t most_rows_of_peers() const {
    int32_t most = 0;
#pragma unroll 1
    for (int source = 0; source < call_.num_ranks(); ++source)
      if (source != call_.rank()) most = max(most, rows_of(source));
    return most;
  }

private:
  // The peer's number may be anything.
  __device__ int32_t rows_of_own_lane(int first) const {
    const int source = first + lane();
    if (source >= call_.num_ranks()) return 0;
    const auto sent = static_cast<int32_t>((first == 0 ? low_ : high_).values[0]);
    return max(0, min(sent, static_cast<int32_t>(args_.slots_per_source))); // M is larger only where no source can be
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

  LlPacket16 low_{}, high_{}; // of the sources `lane` and 32 + `lane`
};

} // namespace epx::cuda
