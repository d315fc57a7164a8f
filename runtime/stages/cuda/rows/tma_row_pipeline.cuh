// SPDX-License-Identifier: Apache-2.0
// The TMA row pipeline: bulk copies (cp.async.bulk) bring rows through a ring of shared memory stages, so that many bytes are
// in flight for few instructions and no registers. A stage is one buffer of the ring; what fills it is an h-tile, that is
// kStageBytes of one row, as a k-tile fills a stage of a GEMM. begin_fill() takes the ring as a whole. Rows are aligned to 16 bytes, and so are their sizes. A warp
// that computes with several rows at a time uses the same shared memory for a RowReader.
#pragma once

#include "base/device/bulk_copy.cuh"
#include "base/device/warp.cuh"

namespace epx::cuda {

struct Nothing {
  __device__ void operator()() const {}
};

// Each warp has one.
class TmaRowPipeline {
public:
  // Each warp has kStages stages and an mbarrier for each of them. 16 warps use nearly all the shared memory that a block may
  // have on Hopper, and a row of 7168 16-bit elements is in flight at once.
  static constexpr int kStages = 7;
  static constexpr int kStageBytes = 2048;
  static constexpr int64_t kStagesBytes = kStages * kStageBytes;
  static constexpr int64_t kHalfBytes = kStagesBytes / 2; // plain copies use the ring as a double buffer of two halves
  static constexpr size_t kBarriersBytes = kStages * sizeof(LoadBarrier);
  static constexpr size_t kSharedBytes = kStagesBytes + kBarriersBytes;

  // All lanes call this. `shared` has ring_bytes + kBarriersBytes for each warp of the block and is 128 bytes aligned. A
  // ring may have more bytes than the stages, a multiple of 128, for a reader that needs them.
  __device__ TmaRowPipeline(std::byte* shared, int warp, int num_warps, int64_t ring_bytes = kStagesBytes)
      : stages_(in_register(shared + warp * ring_bytes)),
        barriers_(in_register(reinterpret_cast<LoadBarrier*>(shared + num_warps * ring_bytes) + warp * kStages)) {
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

  // What a function that is not inlined takes by value instead of a reference, for which the pipeline would lie in memory. It
  // makes a pipeline of it, and returns that one's state(), from which the caller's pipeline goes on.
  struct State {
    std::byte* stages;
    LoadBarrier* barriers;
    uint32_t phases;
  };
  __device__ explicit TmaRowPipeline(const State& state)
      : stages_(in_register(state.stages)), barriers_(in_register(state.barriers)), phases_(state.phases) {}
  __device__ State state() const {
    return {stages_, barriers_, phases_};
  }
  __device__ void go_on_from(const State& state) {
    phases_ = state.phases;
  }

  // Returns the shared memory of the ring, 128 bytes aligned, as many bytes as the constructor was passed, once earlier stores
  // have read it: the warp may use it until it calls another function of this class. All lanes call this.
  __device__ std::byte* begin_generic() {
    wait_for_idle_stages();
    return stages_;
  }
  // The two halves of begin_generic(), for a function that is not inlined: a caller with more to do around the call would need
  // more registers.
  __device__ std::byte* stages() const {
    return stages_;
  }
  __device__ static void wait_for_idle_stages() {
    if (lane() == 0) wait_for_store_reads<0>();
    __syncwarp(); // so every lane may overwrite the stages; and each lane sees what the others have acquired
  }

  // Reads `bytes` bytes of a row: take(offset, data, data_bytes) is called for one h-tile after the other, with its offset in
  // the row; `data` is in shared memory. The loads come after what this warp has acquired. A stage is loaded again only after
  // take() has read it, so that the loads of the first kStages h-tiles precede all stores that take() makes: loads that were
  // dispersed among stores took more of the memory's time. All lanes call this, and each sees the whole h-tile.
  template <typename Take>
  __device__ void read(const std::byte* row, int64_t bytes, const Take& take) {
    begin();
    const auto load = [&](int stage, int64_t offset) {
      if (lane() == 0) begin_load(stage_at(stage), row + offset, bytes_of(offset, bytes), barriers_ + stage);
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages && stage * kStageBytes < bytes; ++stage)
      load(stage, stage * kStageBytes);
    int stage = 0;
#pragma unroll 1
    for (int64_t offset = 0; offset < bytes; offset += kStageBytes, stage = stage + 1 < kStages ? stage + 1 : 0) {
      wait_for_load(barriers_ + stage, next_phase(stage));
      take(offset, static_cast<const std::byte*>(stage_at(stage)), bytes_of(offset, bytes));
      __syncwarp(); // all lanes have read the stage
      if (offset + kStagesBytes < bytes) load(stage, offset + kStagesBytes);
    }
  }

  // Begins to load `bytes` bytes of a row to `offset` in the ring, in pieces of `piece_bytes`, of which there are at most kStages.
  // The loads come after what this warp has acquired. wait_for_piece() follows, once for each piece. All lanes call this.
  __device__ void begin_fill(const std::byte* row, int64_t bytes, int offset, int piece_bytes) {
    begin();
    if (lane() != 0) return;
#pragma unroll 1
    for (int piece = 0; piece * piece_bytes < bytes; ++piece)
      begin_load(stages_ + offset + piece * piece_bytes, row + piece * piece_bytes,
                 static_cast<uint32_t>(min(int64_t{piece_bytes}, bytes - piece * piece_bytes)), barriers_ + piece);
  }
  // All lanes call this, and each sees the whole piece.
  __device__ void wait_for_piece(int piece) {
    wait_for_load(barriers_ + piece, next_phase(piece));
  }
  // Begins to store `bytes` bytes from `offset` in the ring on, which the lanes have stored there, to the addresses that `lanes`
  // pass. finish() ends it. All lanes call this.
  __device__ void begin_store_to_destinations(int offset, int64_t bytes, unsigned lanes, std::byte* to) const {
    fence_shared_before_bulk_copies(); // in each lane: its generic stores come before the bulk copies (PTX, Async proxy), ...
    __syncwarp();                      // ... which lane 0 begins
#pragma unroll 1
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      std::byte* const destination = from_lane(to, lowest_bit(left));
      if (lane() == 0) begin_store(destination, stages_ + offset, static_cast<uint32_t>(bytes));
    }
    if (lane() == 0) end_store_group();
  }

  // Begins a multi-destination copy of `bytes` bytes to the addresses that the lanes pass; a lane that passes NULL has none.
  // finish() ends it. The copy comes after what this warp has acquired. meanwhile() runs while the first loads are in flight. All
  // lanes call this.
  template <typename Meanwhile = Nothing>
  __device__ void begin_copy_to_destinations(const std::byte* from, int64_t bytes, std::byte* to,
                                             const Meanwhile& meanwhile = {}) {
    const unsigned lanes = __ballot_sync(~0u, to != nullptr ? 1 : 0);
    if (lanes == 0) return;
    begin();
    if (lane() == 0)
#pragma unroll 1
      for (int half = 0; half < 2 && half * kHalfBytes < bytes; ++half)
        load_half(half, from, half * kHalfBytes, bytes);
    meanwhile();
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

  // Fills the first half of the ring with zeros for clear(), which must follow with nothing else in between. All lanes call
  // this.
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
  __device__ void begin() {
    if (lane() == 0) wait_for_store_reads<0>(); // earlier stores have read the stages
    __syncwarp(); // so every lane may overwrite the stages; and each lane sees what the others have acquired
    // fence.proxy.async in every lane, of which lane 0 begins all copies: rows that this warp has acquired by generic loads are
    // read in the async proxy (PTX, Proxies and Async proxy). No test notices that it is missing: the copy reads from the L2
    // cache, after the branch that depends on the acquired flag.
    fence_global_before_bulk_copies();
  }
  __device__ static uint32_t bytes_of(int64_t offset, int64_t bytes) {
    return static_cast<uint32_t>(min(int64_t{kStageBytes}, bytes - offset));
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
};

} // namespace epx::cuda
