// SPDX-License-Identifier: Apache-2.0
// How the warps of a grid share the tiles of the low-latency (LL) path.
#pragma once

#include <cstdint>

#include "base/device/warp.cuh"
#include "runtime/stages/cuda/kernels.h"
#include "runtime/stages/cuda/protocol/call_session.cuh"

namespace epx::cuda {

// The tiles that one warp sends. Either it takes every step-th tile, or, by a dynamic tile scheduler, the next one that no
// other warp has taken. A warp begins to take its next tile before it works on the one that it has, so that the atomic takes no
// time of its own.
class LlTilesToSend {
public:
  // `step` warps have the first tiles. `taken` is the dynamic tile scheduler's counter in DeviceState; NULL: none.
  __device__ LlTilesToSend(unsigned long long* taken, uint32_t first, uint32_t end, uint32_t step)
      : taken_(taken), tile_(first), end_(end), step_(step) {}

  __device__ bool has_tile() const { return tile_ < end_; }
  __device__ uint32_t tile() const { return tile_; }
  // A warp that has a tile calls both of these, the first one before it works on the tile and the second one afterwards.
  __device__ void begin_next() {
    if (taken_ != nullptr && lane() == 0) number_ = static_cast<uint32_t>(atomicAdd(taken_, 1ull));
  }
  __device__ void finish_next() {
    if (taken_ == nullptr) {
      tile_ += step_;
      return;
    }
    const uint32_t number = from_lane(number_, 0);
    if (lane() == 0 && number == end_ - 1)
      atomicExch(taken_, 0ull); // there are as many numbers as tiles; for the next call
    tile_ = step_ + number;
  }

private:
  unsigned long long* taken_; // NULL: no dynamic tile scheduler
  uint32_t tile_, end_, step_;
  uint32_t number_ = 0; // in lane 0, between begin_next() and finish_next()
};

// Shares the tiles among `num_warps` warps of each block from `first_block` on, an even number.
//
// - Where few tiles are to be sent, all warps send and receive, and the first tiles are received by other warps than they are
//   sent by.
// - Where there are many, the first blocks of a large grid send, by a dynamic tile scheduler, since some get less of the wire
//   than others; all others receive (LlSenders).
// - Otherwise, the first half of the warps of each block send, and the others receive from the beginning: stores to peers hold
// a
//   warp up while the wire is busy, and rows that have arrived would wait meanwhile. In dispatch the first half receives the
//   last tiles afterwards (to_receive_late).
//
// In the last two cases `num_warps` warps of each block before `first_block`, which have done something else, receive too; in
// the first case they must not (has_helpers).
class LlWorkPartition {
public:
  // Every step-th tile from the first one on, up to the end. There may be none.
  struct Tiles {
    uint32_t first, end, step;
  };
  struct Place {
    uint32_t warp, block, num_blocks;
  };

  // For the warp at `place`. With `has_many`, a test hook, the first blocks send as where there are many tiles, however few
  // there are, if there is a tile to send and senders.blocks is not 0.
  __host__ __device__ constexpr LlWorkPartition(const Place& place, int num_warps, int first_block, uint32_t tiles_to_send,
                                                const LlSenders& senders, bool has_many)
      : warp_(place.warp), block_(place.block), half_(static_cast<uint32_t>(num_warps) / 2),
        first_block_(static_cast<uint32_t>(first_block)), blocks_(place.num_blocks - first_block_),
        sender_blocks_(senders.blocks), split_(tiles_to_send > half_ * blocks_ ? Split::warps : Split::none) {
    if (sender_blocks_ > 0 && tiles_to_send > 0 && (tiles_to_send >= senders.min_tiles || has_many)) split_ = Split::blocks;
  }
  // For the calling warp.
  __device__ LlWorkPartition(const CallSession& call, int num_warps, int first_block, uint32_t tiles_to_send,
                             const LlSenders& senders)
      : LlWorkPartition({threadIdx.x / kWarp, blockIdx.x, gridDim.x}, num_warps, first_block, tiles_to_send, senders,
                        call.forces_many_tokens()) {}

  // Returns whether there are blocks before `first_block`, and they receive too.
  __host__ __device__ constexpr bool has_helpers() const { return split_ != Split::none && first_block_ > 0; }

  // Returns whether warps of the block send.
  __host__ __device__ constexpr bool block_sends() const {
    return !is_helper() && (split_ != Split::blocks || block() < sender_blocks_);
  }
  // The warp sends these, or, by a dynamic tile scheduler, the first of these, and then what it takes.
  __host__ __device__ constexpr Tiles tiles_to_send(uint32_t tiles) const {
    const uint32_t blocks = takes_tiles() ? sender_blocks_ : blocks_;
    const uint32_t warps = split_ == Split::warps ? half_ : 2 * half_; // of each of these blocks
    return {block() < blocks && warp_ < warps ? warp_ * blocks + block() : tiles, tiles, warps * blocks};
  }
  __host__ __device__ constexpr bool takes_tiles() const { return split_ == Split::blocks; }
  __device__ LlTilesToSend to_send(const CallSession& call, uint32_t tiles) const {
    const Tiles own = tiles_to_send(tiles);
    return {takes_tiles() ? &call.state().send_tiles_taken : nullptr, own.first, own.end, own.step};
  }

  __host__ __device__ constexpr Tiles to_receive(uint32_t tiles) const {
    if (split_ == Split::none)
      return {(is_in_first_half() ? warp_ + half_ : warp_ - half_) * blocks_ + block(), tiles, 2 * half_ * blocks_};
    const bool by_blocks = split_ == Split::blocks;
    const uint32_t blocks = by_blocks ? blocks_ - sender_blocks_ : blocks_;
    const uint32_t receivers = (by_blocks ? 2 * half_ : half_) * blocks; // that have nothing else to do
    const uint32_t step = receivers + 2 * half_ * first_block_;
    if (is_helper()) return {receivers + warp_ * first_block_ + block_, tiles, step};
    if (by_blocks) return {block() < sender_blocks_ ? tiles : warp_ * blocks + block() - sender_blocks_, tiles, step};
    return {is_in_first_half() ? tiles : (warp_ - half_) * blocks + block(), tiles, step};
  }
  // The same, but where the first half of the warps sends, it receives the last 5/16 of the tiles afterwards, which arrive
  // about then. Where `tiles` is only an upper bound, `expected` is the number of tiles that is likely.
  __host__ __device__ constexpr Tiles to_receive_late(uint32_t tiles, uint32_t expected) const {
    if (split_ != Split::warps) return to_receive(tiles);
    const uint32_t late = expected / 16 * 11 < tiles ? expected / 16 * 11 : tiles;
    if (is_helper() || !is_in_first_half()) return to_receive(late);
    return {late + warp_ * blocks_ + block(), tiles, half_ * blocks_};
  }
  __host__ __device__ constexpr Tiles to_receive_late(uint32_t tiles) const { return to_receive_late(tiles, tiles); }

private:
  // Which warps of the blocks from first_block_ on send; the others receive from the beginning.
  enum class Split {
    none,  // all, and all receive afterwards
    warps, // the first half of each block
    blocks // all of the first sender_blocks_ blocks, by a dynamic tile scheduler
  };

  __host__ __device__ constexpr bool is_helper() const { return block_ < first_block_; }
  __host__ __device__ constexpr uint32_t block() const { return block_ - first_block_; }
  __host__ __device__ constexpr bool is_in_first_half() const { return warp_ < half_; }

  uint32_t warp_, block_;
  uint32_t half_, first_block_, blocks_, sender_blocks_;
  Split split_;
};

} // namespace epx::cuda
