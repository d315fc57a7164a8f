// Rows on their way through shared memory, in pieces: bulk copies bring them, so that many bytes are under way for few
// instructions and no registers. Rows are aligned to 16 bytes, and so are their sizes.
#pragma once

#include "base/device/bulk_copy.cuh"
#include "base/device/warp.cuh"

namespace epx::cuda {

// Of one warp.
class TmaRowPipeline {
public:
  // Shared memory for each warp: pieces of rows, and a barrier for each. 16 warps use nearly all that a block of Hopper may
  // have, and a row of 7168 16-bit elements is under way at once.
  static constexpr int kStages = 7;
  static constexpr int kStageBytes = 2048;
  static constexpr int64_t kStagesBytes = kStages * kStageBytes;
  static constexpr int64_t kHalfBytes = kStagesBytes / 2; // the pieces of plain copies
  static constexpr size_t kSharedBytes = kStagesBytes + kStages * sizeof(LoadBarrier);

  // All lanes. `shared`: kSharedBytes for each warp of the block, 128 bytes aligned.
  __device__ TmaRowPipeline(std::byte* shared, int warp, int num_warps)
      : stages_(shared + warp * kStagesBytes),
        barriers_(reinterpret_cast<LoadBarrier*>(shared + num_warps * kStagesBytes) + warp * kStages) {
    if (lane() == 0) {
#pragma unroll 1
      for (int stage = 0; stage < kStages; ++stage)
        init_barrier(barriers_ + stage);
      // Loads complete on the barriers in another proxy (PTX, Async proxy); begin() tells the other lanes. No test notices.
      fence_shared_before_bulk_copies();
    }
  }
  TmaRowPipeline(const TmaRowPipeline&) = delete;
  TmaRowPipeline& operator=(const TmaRowPipeline&) = delete;

  // Reads rows side by side, `bytes` bytes of each: take(row, piece, data, data_bytes) is called for piece 0 of every row,
  // then for piece 1, and so on; `data` is in shared memory. What this warp has acquired comes before. All lanes; each sees
  // the whole piece.
  template <typename T, typename Take>
  __device__ void read(const WarpList<const T*>& rows, int64_t bytes, const Take& take) {
    begin();
    const auto row_stages = static_cast<int>((bytes + kStageBytes - 1) / kStageBytes);
    const auto last_bytes = static_cast<uint32_t>(bytes - static_cast<int64_t>(row_stages - 1) * kStageBytes);
    const auto bytes_of = [&](int row_stage) { return row_stage + 1 < row_stages ? uint32_t{kStageBytes} : last_bytes; };
    const auto load = [&](int stage, const Position& at) { // by the lane that knows where the row is
      if (lane() != (at.row & (kWarp - 1))) return;
      const auto* const row = reinterpret_cast<const std::byte*>(rows.own(at.row));
      begin_load(stage_at(stage), row + static_cast<int64_t>(at.row_stage) * kStageBytes, bytes_of(at.row_stage),
                 barriers_ + stage);
    };
    Position ahead{0, 0}, here{0, 0};
#pragma unroll 1
    for (int stage = 0; stage < kStages && ahead.row_stage < row_stages; ++stage, ahead.advance(rows.size()))
      load(stage, ahead);
#pragma unroll 1
    for (int stage = 0; here.row_stage < row_stages;
         stage = stage + 1 < kStages ? stage + 1 : 0, here.advance(rows.size())) {
      wait_for_load(barriers_ + stage, next_parity(stage));
      take(here.row, here.row_stage, stage_at(stage), bytes_of(here.row_stage));
      __syncwarp(); // all lanes have read the stage
      if (ahead.row_stage >= row_stages) continue;
      load(stage, ahead);
      ahead.advance(rows.size());
    }
  }

  // Begins to copy `bytes` bytes to the places that the lanes name; NULL: none. finish() ends it. What this warp has
  // acquired comes before. All lanes.
  __device__ void begin_copy_to_lanes(const std::byte* from, int64_t bytes, std::byte* to) {
    const unsigned lanes = __ballot_sync(~0u, to != nullptr ? 1 : 0);
    if (lanes == 0) return;
    begin();
    if (lane() == 0)
#pragma unroll 1
      for (int half = 0; half < 2 && half * kHalfBytes < bytes; ++half)
        load_half(half, from, half * kHalfBytes, bytes);
    int half = 0;
#pragma unroll 1
    for (int64_t offset = 0; offset < bytes; offset += kHalfBytes, half ^= 1) {
      if (const uint32_t parity = next_parity(half); lane() == 0) wait_for_load(barriers_ + half, parity);
#pragma unroll 1
      for (unsigned left = lanes; left != 0; left &= left - 1) {
        std::byte* const place = from_lane(to, lowest_bit(left));
        if (lane() == 0) begin_store(place + offset, half_at(half), bytes_of_half(offset, bytes));
      }
      if (lane() != 0) continue;
      end_store_group();
      if (offset + 2 * kHalfBytes >= bytes) continue;
      wait_for_store_reads<0>(); // then its place is free
      load_half(half, from, offset + 2 * kHalfBytes, bytes);
    }
  }

  // Before clear(), with nothing else in between. All lanes.
  __device__ void make_zeros() {
    begin();
    for (int64_t i = lane(); i < kHalfBytes / 16; i += kWarp)
      reinterpret_cast<uint4*>(stages_)[i] = uint4{0, 0, 0, 0};
    fence_shared_before_bulk_copies(); // in each lane: its own zeros come before the copies (PTX, Async proxy) ...
    __syncwarp();                      // ... which lane 0 begins. No test notices that either is missing, as above
  }
  // Begins to fill the rows of `bytes` bytes that the lanes name with zeros; NULL: none. finish() ends it. All lanes.
  __device__ void clear(int64_t bytes, std::byte* to) {
#pragma unroll 1
    for (unsigned left = __ballot_sync(~0u, to != nullptr ? 1 : 0); left != 0; left &= left - 1) {
      std::byte* const row = from_lane(to, lowest_bit(left));
      if (lane() != 0) continue;
      for (int64_t offset = 0; offset < bytes; offset += kHalfBytes)
        begin_store(row + offset, stages_, bytes_of_half(offset, bytes));
      end_store_group();
    }
  }

  // Until all rows are where they belong, and whatever a lane tells afterwards comes after them.
  __device__ void finish() {
    if (lane() == 0) wait_for_stores(); // complete, and not only read: a release covers no copy that is under way
    __syncwarp();                       // the lanes see them complete; and one that tells, what the others have stored
  }

private:
  struct Position {
    int row;
    int row_stage;
    __device__ void advance(int num_rows) {
      if (++row < num_rows) return;
      row = 0;
      ++row_stage;
    }
  };

  __device__ void begin() {
    if (lane() == 0) wait_for_store_reads<0>(); // rows before have left the stages
    __syncwarp();                               // so every lane may fill them; and each sees what others have acquired
    // In each lane that may begin a copy: rows that this warp has acquired by ordinary loads are read in another proxy (PTX,
    // Proxies and Async proxy). No test notices: the copy goes to the L2 cache, after the branch that the acquired flag decides.
    fence_global_before_bulk_copies();
  }
  __device__ static uint32_t bytes_of_half(int64_t offset, int64_t bytes) {
    return static_cast<uint32_t>(min(kHalfBytes, bytes - offset));
  }
  __device__ std::byte* half_at(int half) const {
    return stages_ + half * kHalfBytes;
  }
  __device__ void load_half(int half, const std::byte* row, int64_t offset, int64_t bytes) {
    begin_load(half_at(half), row + offset, bytes_of_half(offset, bytes), barriers_ + half);
  }
  __device__ std::byte* stage_at(int stage) const {
    return stages_ + stage * kStageBytes;
  }
  // The parity of the stage's load under way. All lanes, once for each load.
  __device__ uint32_t next_parity(int stage) {
    const uint32_t parity = parities_ >> stage & 1;
    parities_ ^= 1u << stage;
    return parity;
  }

  std::byte* stages_;
  LoadBarrier* barriers_;
  uint32_t parities_ = 0; // of the stages' next loads, a bit each
};

} // namespace epx::cuda
