// SPDX-License-Identifier: Apache-2.0
// Tiles of kTileRows rows of one expert; the last tile of a zone is filled up with zero rows in scratch memory. Each
// product so has the same shape whatever the number of rows, which is what makes a row's result independent of the others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "moe/ffn/ffn.h"
#include "moe/ffn/host/gemm/gemm.h"

namespace epx::moe {

struct Tile {
  int expert = 0;
  int64_t first_row = 0;
  int64_t num_rows = 0; // 1..kTileRows
};

// Walks the tiles of all experts, in row order.
class TileScheduler {
public:
  TileScheduler(const Zones& zones, int num_experts) : zones_(zones), num_experts_(num_experts) {}

  bool next(Tile& tile) {
    while (expert_ < num_experts_ && done_ >= zones_.counts[expert_]) {
      ++expert_;
      done_ = 0;
    }
    if (expert_ == num_experts_) return false;
    tile = {expert_, zones_.offsets[expert_] + done_, std::min(kTileRows, zones_.counts[expert_] - done_)};
    done_ += tile.num_rows;
    return true;
  }

private:
  const Zones& zones_;
  int num_experts_;
  int expert_ = 0;
  int64_t done_ = 0; // rows of this expert
};

// kTileRows rows of `width` elements in scratch memory.
template <typename T>
class TileBuffer {
public:
  explicit TileBuffer(int64_t width) : width_(width), values_(kTileRows * width) {}

  T* data() { return values_.data(); }
  T* row(int64_t r) { return values_.data() + r * width_; }

  void clear() { std::fill(values_.begin(), values_.end(), T{0}); }
  // Every row becomes `row`, or zero.
  void fill(const T* row_or_null) {
    if (row_or_null == nullptr) return clear();
    for (int64_t r = 0; r < kTileRows; ++r)
      std::copy_n(row_or_null, width_, row(r));
  }
  // The tile's rows of `from`, whose rows are `stride` apart; zero beyond them.
  void load(const Tile& tile, const T* from, int64_t stride) {
    for (int64_t r = 0; r < tile.num_rows; ++r)
      std::copy_n(from + (tile.first_row + r) * stride, width_, row(r));
    std::fill(values_.begin() + tile.num_rows * width_, values_.end(), T{0});
  }
  void store(const Tile& tile, T* to, int64_t stride) {
    for (int64_t r = 0; r < tile.num_rows; ++r)
      std::copy_n(row(r), width_, to + (tile.first_row + r) * stride);
  }
  void scale_rows(const Tile& tile, const T* row_weights) {
    for (int64_t r = 0; r < tile.num_rows; ++r)
      for (int64_t i = 0; i < width_; ++i)
        row(r)[i] *= row_weights[tile.first_row + r];
  }
  void add_rows_to(const Tile& tile, T* sum) {
    for (int64_t r = 0; r < tile.num_rows; ++r)
      for (int64_t i = 0; i < width_; ++i)
        sum[i] += row(r)[i];
  }

private:
  int64_t width_;
  std::vector<T> values_;
};

// The tile's rows of `from`, in place when they fill a tile.
template <typename T>
const T* full_tile(const Tile& tile, const T* from, int64_t width, TileBuffer<T>& scratch) {
  if (tile.num_rows == kTileRows) return from + tile.first_row * width;
  scratch.load(tile, from, width);
  return scratch.data();
}

} // namespace epx::moe
