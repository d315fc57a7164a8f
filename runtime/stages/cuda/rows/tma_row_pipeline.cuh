// SPDX-License-Identifier: Apache-2.0
// The TMA row pipeline: bulk copies (cp.async.bulk) bring rows through a ring of shared memory stages, so that many bytes are
// in flight for few instructions and no registers. A stage is one buffer of the ring; what fills it is an h-tile, that is
// kStageBytes of one row, as a k-tile fills a stage of a GEMM. Rows are aligned to 16 bytes, and so are their sizes.
#pragma once

#include "base/device/bulk_copy.cuh"
#include "base/device/warp.cuh"

namespace epx::cuda {

// Each warp has one.
class TmaRowPipeline {
public:
  // Each warp has kStages stages and an mbarrier for each of them. 16 warps use nearly all the shared memory that a block may
  // have on Hopper, and a row of 7168 16-bit elements is in flight at once.
  static constexpr int kStages = 7;
  static constexpr int kStageBytes = 2048;
  static constexpr int64_t kStagesBytes = kStages * kStageBytes;
  static constexpr int64_t kHalfBytes = kStagesBytes / 2; // plain copies use the ring as a double buffer of two halves
  static constexpr size_t kSharedBytes = kStagesBytes + kStages * sizeof(LoadBarrier);

  // All lanes call this. `shared` has kSharedBytes for each warp of the block and is 128 bytes aligned.
  __device__ TmaRowPipeline(std::byte* shared, int warp, int num_warps)
      : stages_(in_register(shared + warp * kStagesBytes)),
        barriers_(in_register(reinterpret_cast<LoadBarrier*>(shared + num_warps * kStagesBytes) + warp * kStages)) {
    if (lane() == 0) {
#pragma unroll 1
      for (int stage = 0; stage < kStages; ++stage)
        init_barrier(barriers_ + stage);
      // fence.proxy.async: loads complete on the mbarriers in the async proxy (PTX, Async proxy). begin() makes the
      // initialized mbarriers visible to the other lanes. No test notices that the fence is missing.
      fence_shared_before_bulk_copies();
    }
  }
  TmaRowPipeline(const TmaRowPipeline&) = delete;
  TmaRowPipeline& operator=(const TmaRowPipeline&) = delete;

  // Begins to read `bytes` bytes of each row: front() returns h-tile 0 of every row, then h-tile 1, and so on. The loads come
  // after what this warp has acquired. The list before has been taken to its end. All lanes call this.
  template <typename T>
  __device__ void begin_rows(const WarpList<const T*>& rows, int64_t bytes) {
    begin();
    low_ = reinterpret_cast<const std::byte*>(rows.own(0));
    high_ = reinterpret_cast<const std::byte*>(rows.own(kWarp));
    num_rows_ = rows.size();
    h_tiles_left_ = h_tiles_of(bytes);
    last_bytes_ = bytes_of(h_tiles_left_ - 1, bytes);
    next_row_ = front_ = back_ = 0;
#pragma unroll 1
    for (int stage = 0; stage < kStages && h_tiles_left_ > 0; ++stage)
      load_next();
  }
  // Waits for the oldest h-tile that has not been taken, and returns it. pop() must follow, until which it stays there. All lanes
  // call this.
  __device__ const std::byte* front() {
    wait_for_load(barriers_ + front_, next_phase(front_));
    return stage_at(front_);
  }
  // The lanes have read the front stage, which is loaded again. All lanes call this.
  __device__ void pop() {
    __syncwarp(); // all lanes have read the stage
    front_ = front_ + 1 < kStages ? front_ + 1 : 0;
    if (h_tiles_left_ > 0) load_next();
  }

  // Return how many h-tiles a row has, and how many bytes one of them has.
  __device__ static int h_tiles_of(int64_t bytes) {
    return static_cast<int>((bytes + kStageBytes - 1) / kStageBytes);
  }
  __device__ static uint32_t bytes_of(int h_tile, int64_t bytes) {
    return static_cast<uint32_t>(min(int64_t{kStageBytes}, bytes - int64_t{h_tile} * kStageBytes));
  }

  // Begins a multi-destination copy of `bytes` bytes to the addresses that the lanes pass; a lane that passes NULL has none.
  // finish() ends it. The copy comes after what this warp has acquired. All lanes call this.
  __device__ void begin_copy_to_destinations(const std::byte* from, int64_t bytes, std::byte* to) {
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
      if (const uint32_t phase = next_phase(half); lane() == 0) wait_for_load(barriers_ + half, phase);
#pragma unroll 1
      for (unsigned left = lanes; left != 0; left &= left - 1) {
        std::byte* const destination = from_lane(to, lowest_bit(left));
        if (lane() == 0) begin_store(destination + offset, half_at(half), bytes_of_half(offset, bytes));
      }
      if (lane() != 0) continue;
      end_store_group();
      if (offset + 2 * kHalfBytes >= bytes) continue;
      wait_for_store_reads<0>(); // the stores have read the half, which may be overwritten
      load_half(half, from, offset + 2 * kHalfBytes, bytes);
    }
  }

  // Fills the stages with zeros for clear(), which must follow with nothing else in between. All lanes call this.
  __device__ void make_zeros() {
    begin();
    for (int64_t i = lane(); i < kHalfBytes / 16; i += kWarp)
      reinterpret_cast<uint4*>(stages_)[i] = uint4{0, 0, 0, 0};
    // fence.proxy.async in each lane: its generic stores of zeros come before the bulk copies (PTX, Async proxy), ...
    fence_shared_before_bulk_copies();
    __syncwarp(); // ... which lane 0 begins. No test notices that either is missing, as above
  }
  // Begins to fill with zeros the rows of `bytes` bytes that the lanes pass; a lane that passes NULL has none. finish() ends
  // it. All lanes call this.
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

  // Waits until all stores are complete; what any lane signals afterwards comes after them.
  __device__ void finish() {
    if (lane() == 0) wait_for_stores(); // wait_group without .read: a release does not cover a copy that is in flight
    __syncwarp(); // every lane sees the stores complete, and a lane that signals sees what the other lanes have stored
  }

private:
  // Begins the next load. The lane that holds the row's address issues it.
  __device__ void load_next() {
    if (lane() == (next_row_ & (kWarp - 1)))
      begin_load(stage_at(back_), next_row_ < kWarp ? low_ : high_, h_tiles_left_ > 1 ? uint32_t{kStageBytes} : last_bytes_,
                 barriers_ + back_);
    back_ = back_ + 1 < kStages ? back_ + 1 : 0;
    if (++next_row_ < num_rows_) return;
    next_row_ = 0;
    low_ += kStageBytes;
    high_ += kStageBytes;
    --h_tiles_left_;
  }

  __device__ void begin() {
    if (lane() == 0) wait_for_store_reads<0>(); // earlier stores have read the stages
    __syncwarp(); // so every lane may overwrite the stages; and each lane sees what the others have acquired
    // fence.proxy.async in each lane that may begin a copy: rows that this warp has acquired by generic loads are read in the
    // async proxy (PTX, Proxies and Async proxy). No test notices that it is missing: the copy reads from the L2 cache, after
    // the branch that depends on the acquired flag.
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
  // Returns the phase parity of the stage's load in flight. All lanes call this, once for each load.
  __device__ uint32_t next_phase(int stage) {
    const uint32_t phase = phases_ >> stage & 1;
    phases_ ^= 1u << stage;
    return phase;
  }

  std::byte* stages_;
  LoadBarrier* barriers_;
  uint32_t phases_ = 0; // phase parity of each stage's next load, a bit each
  // The list that is read: each lane holds where the next h-tile of the row `lane` lies, and that of the row 32 + `lane`.
  const std::byte* low_ = nullptr;
  const std::byte* high_ = nullptr;
  int num_rows_ = 0;
  int h_tiles_left_ = 0; // of each row, to be loaded
  uint32_t last_bytes_ = 0;
  int next_row_ = 0; // of which the next h-tile is loaded, ...
  int back_ = 0;     // ... into this stage
  int front_ = 0;    // the stage of the oldest h-tile that has not been taken
};

} // namespace epx::cuda
