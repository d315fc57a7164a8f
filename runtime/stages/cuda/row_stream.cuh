// Rows on their way through shared memory, in pieces: bulk copies bring them, so that many bytes are under way for few
// instructions and no registers. Rows are aligned to 16 bytes, and so are their sizes.
#pragma once

#include "runtime/base/device/bulk_copy.cuh"
#include "runtime/stages/cuda/warp.cuh"

namespace epx::cuda {

// Of one warp. One lane begins the copies and waits for them.
class RowStream {
public:
  // Shared memory for each warp: pieces of rows, and a barrier for each. 16 warps use nearly all that a block of Hopper may
  // have, and a row of 7168 16-bit elements is under way at once.
  static constexpr int kStages = 7;
  static constexpr int kPieceBytes = 2048;
  static constexpr int64_t kStagesBytes = kStages * kPieceBytes;
  static constexpr int64_t kHalfBytes = kStagesBytes / 2; // the pieces of plain copies
  static constexpr size_t kSharedBytes = kStagesBytes + kStages * sizeof(LoadBarrier);

  // All lanes. `shared`: kSharedBytes for each warp of the block, 128 bytes aligned.
  __device__ RowStream(std::byte* shared, int warp, int num_warps)
      : stages_(shared + warp * kStagesBytes),
        barriers_(reinterpret_cast<LoadBarrier*>(shared + num_warps * kStagesBytes) + warp * kStages) {
    if (lane() == 0) {
#pragma unroll 1
      for (int stage = 0; stage < kStages; ++stage)
        init_barrier(barriers_ + stage);
      fence_shared_before_bulk_copies();
    }
    __syncwarp();
  }
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;

  // Reads `num_rows` rows side by side, `bytes` bytes of each: take(row, offset, piece, piece_bytes) is called for the
  // first piece of every row, then for the second, and so on; `piece` is in shared memory. row_at(row) tells where a row
  // begins. What this warp has acquired comes before. All lanes; each sees the whole piece.
  template <typename RowAt, typename Take>
  __device__ void read(int num_rows, int64_t bytes, const RowAt& row_at, const Take& take) {
    begin();
    Position ahead{0, 0}, here{0, 0};
#pragma unroll 1
    for (int stage = 0; stage < kStages && ahead.offset < bytes; ++stage, ahead.advance(num_rows))
      load(stage, row_at(ahead.row), ahead.offset, bytes);
#pragma unroll 1
    for (int stage = 0; here.offset < bytes; stage = stage + 1 < kStages ? stage + 1 : 0, here.advance(num_rows)) {
      wait(stage);
      __syncwarp();
      take(here.row, here.offset, stage_at(stage), bytes_at(here.offset, bytes));
      __syncwarp(); // all lanes have read the stage
      if (ahead.offset >= bytes) continue;
      load(stage, row_at(ahead.row), ahead.offset, bytes);
      ahead.advance(num_rows);
    }
  }

  // Begins to copy `bytes` bytes to the places that the lanes name; NULL: none. finish() ends it. What this warp has
  // acquired comes before. All lanes.
  __device__ void spread(const std::byte* from, int64_t bytes, std::byte* to) {
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
      wait(half);
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
    __syncwarp();
    for (int64_t i = lane(); i < kHalfBytes / 16; i += kWarp)
      reinterpret_cast<uint4*>(stages_)[i] = uint4{0, 0, 0, 0};
    fence_shared_before_bulk_copies(); // in each lane: its own zeros come before the copies
    __syncwarp();
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
    if (lane() == 0) wait_for_stores();
    __syncwarp();
  }

private:
  struct Position {
    int row;
    int64_t offset;
    __device__ void advance(int num_rows) {
      if (++row < num_rows) return;
      row = 0;
      offset += kPieceBytes;
    }
  };

  __device__ void begin() {
    if (lane() != 0) return;
    fence_global_before_bulk_copies();
    wait_for_store_reads<0>(); // rows before have left the stages
  }
  __device__ static uint32_t bytes_at(int64_t offset, int64_t bytes) {
    return static_cast<uint32_t>(min(int64_t{kPieceBytes}, bytes - offset));
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
    return stages_ + stage * kPieceBytes;
  }
  __device__ void load(int stage, const std::byte* row, int64_t offset, int64_t bytes) {
    if (lane() == 0) begin_load(stage_at(stage), row + offset, bytes_at(offset, bytes), barriers_ + stage);
  }
  __device__ void wait(int stage) {
    if (lane() != 0) return;
    wait_for_load(barriers_ + stage, parities_ >> stage & 1);
    parities_ ^= 1u << stage;
  }

  std::byte* stages_;
  LoadBarrier* barriers_;
  uint32_t parities_ = 0; // of the stages' next loads, a bit each; lane 0's
};

} // namespace epx::cuda
