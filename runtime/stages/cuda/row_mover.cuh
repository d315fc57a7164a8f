// Moves rows from global memory to several places: read once, by bulk copies through shared memory where all ends are aligned to
// 16 bytes. One lane begins the copies and waits for them; many bytes are under way for few instructions, so that few
// multiprocessors suffice.
#pragma once

#include "runtime/base/device/bulk_copy.cuh"
#include "runtime/stages/cuda/rows.cuh"

namespace epx::cuda {

// Of one warp.
class RowMover {
public:
  // Shared memory for each warp: pieces of rows, and a barrier for each piece. 16 warps use nearly all that a block of Hopper
  // may have, and a row of 7168 16-bit elements is under way at once.
  static constexpr int kStages = 4;
  static constexpr uint32_t kStageBytes = 3584;
  static constexpr size_t kSharedBytes = kStages * (kStageBytes + sizeof(LoadBarrier));

  // All lanes. `shared`: kSharedBytes for each warp of the block, 128 bytes aligned.
  __device__ RowMover(std::byte* shared, int warp, int num_warps)
      : stages_(shared + warp * kStages * kStageBytes),
        barriers_(reinterpret_cast<LoadBarrier*>(shared + num_warps * kStages * kStageBytes) + warp * kStages) {
    if (lane() == 0) {
      for (int stage = 0; stage < kStages; ++stage)
        init_barrier(barriers_ + stage);
      fence_before_bulk_copies();
    }
    __syncwarp();
  }
  RowMover(const RowMover&) = delete;
  RowMover& operator=(const RowMover&) = delete;

  // Begins to copy `bytes` bytes to the places that the lanes name; NULL: none. finish() ends it. What this warp has acquired
  // comes before.
  __device__ void spread(const std::byte* from, int64_t bytes, std::byte* to) {
    const unsigned lanes = __ballot_sync(~0u, to != nullptr ? 1 : 0);
    if (lanes == 0) return;
    const uint64_t bits = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(bytes);
    if (__all_sync(~0u, bits % 16 == 0 ? 1 : 0) == 0) {
      spread_row(from, bytes, to);
      return;
    }
    const int pieces = static_cast<int>((bytes + kStageBytes - 1) / kStageBytes);
    if (lane() == 0) {
      fence_before_bulk_copies();
      wait_for_store_reads<0>(); // the row before has left the stages
      for (int piece = 0; piece < kStages && piece < pieces; ++piece)
        load(from, bytes, piece);
    }
    for (int piece = 0; piece < pieces; ++piece) {
      if (lane() == 0) {
        const int stage = piece % kStages;
        wait_for_load(barriers_ + stage, parities_ >> stage & 1);
        parities_ ^= 1u << stage;
      }
      for (unsigned left = lanes; left != 0; left &= left - 1) {
        std::byte* const place = from_lane(to, __ffs(static_cast<int>(left)) - 1);
        if (lane() == 0) begin_store(place + offset_of(piece), stage_of(piece), bytes_of(bytes, piece));
      }
      if (lane() != 0) continue;
      end_store_group();
      if (piece >= 1 && piece - 1 + kStages < pieces) { // the stage of the piece before is free once it has been read
        wait_for_store_reads<1>();
        load(from, bytes, piece - 1 + kStages);
      }
    }
  }

  // Until all rows are where they belong, and whatever a lane tells afterwards comes after them.
  __device__ void finish() {
    if (lane() == 0) wait_for_stores();
    __syncwarp();
  }

private:
  __device__ static int64_t offset_of(int piece) { return static_cast<int64_t>(piece) * kStageBytes; }
  __device__ static uint32_t bytes_of(int64_t bytes, int piece) {
    return static_cast<uint32_t>(min(static_cast<int64_t>(kStageBytes), bytes - offset_of(piece)));
  }
  __device__ std::byte* stage_of(int piece) const { return stages_ + piece % kStages * kStageBytes; }
  __device__ void load(const std::byte* from, int64_t bytes, int piece) {
    begin_load(stage_of(piece), from + offset_of(piece), bytes_of(bytes, piece), barriers_ + piece % kStages);
  }

  std::byte* stages_;
  LoadBarrier* barriers_;
  uint32_t parities_ = 0; // of the stages' next loads, a bit each; lane 0's
};

} // namespace epx::cuda
