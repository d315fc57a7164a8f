// SPDX-License-Identifier: Apache-2.0
// A row reader brings rows into the registers of a warp that computes with them, through a ring of shared memory stages that
// cp.async fills: many bytes are in flight without registers, and a lane that copies its own fragments needs no barrier. A
// stage is one buffer of the ring; what fills it is an h-tile, that is the same kHTile elements of one row.
#pragma once

#include <cstdint>

#include "base/device/async_copy.cuh"
#include "base/device/fragment.cuh"
#include "base/device/warp.cuh"
#include "runtime/stages/cuda/rows/fragments.cuh"
#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"

namespace epx::cuda {

// The ring of a warp's row reader, in the shared memory of its TMA row pipeline, which must be idle meanwhile.
constexpr int kReaderStages = 6;
constexpr int kReaderStageBytes = 2048;

// Rows that are aligned to 16 bytes and have a multiple of kFragment elements: a lane copies the fragments that it reads.
//
// Other rows: an h-tile is shorter than a stage, which takes all aligned granules of 16 bytes that have bytes of the h-tile. A
// lane reads one granule more than its fragment fills (2 with 16-bit elements, 3 with float), and shifts them. Up to 15 bytes
// in front of a row are read, which belong to the row's allocation, since allocations are aligned to more; nothing beyond the
// row's end is read.
template <typename T, bool kIsAligned>
class RowReader {
public:
  static constexpr int kWarpTiles = kIsAligned ? kReaderStageBytes / static_cast<int>(kWarpTile * sizeof(T))
                                               : (kReaderStageBytes - 1) / static_cast<int>(kWarpTile * sizeof(T));
  static constexpr int kHTile = kWarpTiles * kWarpTile;
  using Fragments = Fragment<T>[kWarpTiles];

  // What the warp computes with a row; the list of rows lies behind the ring.
  struct alignas(16) Row {
    const T* from;
    T* to;
    float weight;
  };

  // `shared` is TmaRowPipeline::begin_generic(). The rows have `hidden` elements. Reading begins `lead` elements before the
  // first, so that fragments of an unaligned destination can be stored as vectors; 0 if aligned.
  __device__ RowReader(std::byte* shared, int64_t hidden, int lead = 0)
      : ring_(in_register(shared)), end_((hidden + lead) * static_cast<int64_t>(sizeof(T))),
        lead_bytes_(lead * static_cast<int>(sizeof(T))) {
    static_assert(kReaderStages * kReaderStageBytes + kMaxRows * sizeof(Row) <= TmaRowPipeline::kStagesBytes);
  }

  // The number of h-tiles of a row.
  __device__ int h_tiles() const { return static_cast<int>((end_ + kHTileBytes - 1) / kHTileBytes); }

  // Sets one of at most 64 rows. begin() must follow.
  __device__ void set(int row, const Row& value) { rows()[row] = value; }
  // Begins to read the first `num_rows` rows: h-tile 0 of every row, then h-tile 1, and so on. The reads come after what this
  // warp has acquired. All lanes call begin(), next() and end().
  __device__ void begin(int num_rows) {
    __syncwarp(); // the list is complete
    num_rows_ = num_rows;
    whole_loads_left_ = kIsAligned ? static_cast<int>(end_ / kHTileBytes) * num_rows : 0;
    other_loads_left_ = h_tiles() * num_rows - whole_loads_left_;
#pragma unroll 1
    for (back_ = 0; back_ < (kReaderStages - 1) * kReaderStageBytes; back_ += kReaderStageBytes)
      load_next();
  }
  // Sets the weight alone, also after begin(); a barrier of the warp must follow.
  __device__ void set_weight(int row, float weight) {
    rows()[row].weight = weight;
  }
  // The list as it was set.
  __device__ const Row& operator[](int row) const {
    return rows()[row];
  }

  // Takes the next h-tile, which is one of row `row`: the lane's fragments of it. Beyond the row's ends they are undefined.
  __device__ void next(int row, Fragments& fragments) {
    load_next();
    wait_for_async_copies<kReaderStages - 1>();
    const std::byte* const stage = ring_ + front_;
    if constexpr (kIsAligned) {
#pragma unroll
      for (int warp_tile = 0; warp_tile < kWarpTiles; ++warp_tile)
        fragments[warp_tile] = load_vector<T>(stage + offset_of_fragment<T>(warp_tile));
    } else {
      const int shift = misalignment(begin_of(rows()[row]));
      __syncwarp(); // all lanes' copies are complete
#pragma unroll
      for (int warp_tile = 0; warp_tile < kWarpTiles; ++warp_tile)
        fragments[warp_tile] = load_shifted(stage + offset_of_fragment<T>(warp_tile), shift);
      __syncwarp(); // all lanes have read the stage
    }
    back_ = front_;
    front_ = front_ + kReaderStageBytes < kReaderStages * kReaderStageBytes ? front_ + kReaderStageBytes : 0;
  }

  // Ends the reading; the pipeline may be used again. `fence.proxy.async` orders the generic accesses of the stages before the
  // bulk copies that overwrite them (PTX, Async proxy).
  __device__ void end() {
    fence_shared_before_bulk_copies();
    __syncwarp(); // all lanes have read the list and the stages
  }

private:
  static constexpr int kMaxRows = 2 * kWarp;
  static constexpr int kFragmentBytes = sizeof(Fragment<T>), kWarpTileBytes = kWarp * kFragmentBytes;
  static constexpr int kHTileBytes = kWarpTiles * kWarpTileBytes;

  __device__ Row* rows() const {
    return reinterpret_cast<Row*>(ring_ + kReaderStages * kReaderStageBytes);
  }
  __device__ static int misalignment(const std::byte* address) {
    return static_cast<int>(reinterpret_cast<uint64_t>(address) % kAsyncCopyBytes);
  }
  __device__ const std::byte* begin_of(const Row& row) const {
    return reinterpret_cast<const std::byte*>(row.from) - lead_bytes_;
  }

  // Begins the next load. There is one group of copies for each stage, empty when there is nothing more to load.
  __device__ void load_next() {
    if (whole_loads_left_ > 0) {
      --whole_loads_left_;
#pragma unroll
      for (int at = 0; at < kFragmentBytes; at += kAsyncCopyBytes)
        begin_async_copies<kWarpTiles, kWarpTileBytes>(own(back_) + at, own_next() + at);
    } else if (other_loads_left_ > 0) {
      --other_loads_left_;
      if constexpr (kIsAligned)
        load_last_fragments();
      else
        load_granules();
    }
    end_async_copy_group();
    if (++next_row_ != num_rows_) return;
    next_row_ = 0;
    next_offset_ += kHTileBytes;
  }
  // The lane's first fragment in the stage, and in the row and h-tile that are loaded next.
  __device__ std::byte* own(int stage) const {
    return ring_ + stage + lane() * kFragmentBytes;
  }
  __device__ const std::byte* own_next() const {
    return reinterpret_cast<const std::byte*>(rows()[next_row_].from) + next_offset_ + lane() * kFragmentBytes;
  }
  __device__ void load_last_fragments() {
    std::byte* const to = own(back_);
    const std::byte* const from = own_next();
#pragma unroll 1
    for (int at = 0; next_offset_ + lane() * kFragmentBytes + at < end_; at += kWarpTileBytes)
      begin_async_copies<kFragmentBytes / kAsyncCopyBytes, kAsyncCopyBytes>(to + at, from + at);
  }
  __device__ void load_granules() {
    const std::byte* const begin = begin_of(rows()[next_row_]);
    const std::byte* const row = begin + lead_bytes_;
    const std::byte* const end = begin + end_;
    const std::byte* const first = begin + next_offset_ - misalignment(begin);
#pragma unroll 1
    for (int at = lane() * kAsyncCopyBytes; at <= kHTileBytes; at += kWarp * kAsyncCopyBytes) {
      const std::byte* const from = first + at;
      const int64_t left = from + kAsyncCopyBytes <= row ? 0 : end - from;
      const auto bytes = static_cast<uint32_t>(max(int64_t{0}, min(left, int64_t{kAsyncCopyBytes})));
      begin_async_copy(ring_ + back_ + at, from, bytes);
    }
  }

  // Loads the fragment that begins `shift` bytes behind `from`.
  __device__ static Fragment<T> load_shifted(const std::byte* from, int shift) {
    constexpr int kWords = sizeof(Fragment<T>) / sizeof(uint32_t), kExtra = kAsyncCopyBytes / sizeof(uint32_t);
    uint32_t words[kWords + kExtra];
#pragma unroll
    for (int i = 0; i < kWords + kExtra; i += kExtra) {
      const uint4 granule = *reinterpret_cast<const uint4*>(from + i * sizeof(uint32_t));
      memcpy(words + i, &granule, sizeof(granule));
    }
    // Shifts by constant distances, since registers have no index.
#pragma unroll
    for (int i = 0; i + 2 < kWords + kExtra; ++i)
      words[i] = (shift & 8) != 0 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i + 1 < kWords + kExtra; ++i)
      words[i] = (shift & 4) != 0 ? words[i + 1] : words[i];
    Fragment<T> fragment;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      fragment.words[i] = __funnelshift_r(words[i], words[i + 1], static_cast<uint32_t>(shift % 4 * 8));
    return fragment;
  }

  std::byte* ring_;
  int64_t end_; // bytes from the begin of a row's first fragment to the row's end
  int lead_bytes_;
  int64_t next_offset_ = 0; // of the h-tile that is loaded next, in its row
  int next_row_ = 0;        // the row of that h-tile
  int num_rows_ = 0;
  int whole_loads_left_ = 0; // loads of whole h-tiles of aligned rows, which come first
  int other_loads_left_ = 0; // loads that come after those
  int back_ = 0;             // offset of the stage that the next load fills: the one that was taken last
  int front_ = 0;            // offset of the stage of the oldest h-tile that has not been taken
};

// The number of a lane's fragments in an h-tile of a list reader. A long h-tile takes fewer instructions per element for
// addresses, loops and waits, but more registers, and only rows that consist of long h-tiles are read by them.
constexpr int kShortTile = 4, kLongTile = 7;

// A row reader for aligned rows of 16-bit elements. The list of up to 32 rows lies in registers: lane i has the i-th. By long
// h-tiles it reads the rows of one sum after the other, without draining the ring in between.
template <typename T, int kTile>
class ListReader {
public:
  static constexpr int kWarpTiles = kTile;
  static constexpr int kHTile = kWarpTiles * kWarpTile;
  static constexpr bool kHasWholeTiles = kTile == kLongTile; // the last short h-tile of a row may have fewer elements
  static constexpr bool kManySums = kHasWholeTiles;
  static constexpr int kStages = kHasWholeTiles ? 5 : 7;
  static constexpr int kRingBytes = kStages * kHTile * static_cast<int>(sizeof(T));

  static constexpr bool kTakesType = sizeof(T) == 2;
  static constexpr int64_t kMaxHidden = 1 << 30; // an int numbers the bytes of shorter rows

  // `shared` is TmaRowPipeline::begin_generic() of a pipeline whose ring has kRingBytes. Begins to read as
  // RowReader::begin() does; the lane passes a row, or anything if there are fewer. The rows have `hidden` elements, which
  // takes() takes and whose bytes an int numbers.
  __device__ ListReader(std::byte* shared, const T* own_row, int num_rows, int64_t hidden)
      : ring_(in_register(shared) + lane() * kFragmentBytes), own_row_(reinterpret_cast<const std::byte*>(own_row)),
        row_bytes_(bytes_of(hidden)), num_rows_(num_rows), loads_left_(h_tiles(hidden) * num_rows),
        next_offset_(lane() * kFragmentBytes) {
    static_assert(!kManySums);
    __syncwarp(); // the reads come after what this warp has acquired
    fill_ring();
  }

  // The rows of `num_sums` sums from `first_sum` on: lane s has the number of rows of sum s, and lane s * room + i the i-th of
  // them.
  struct Sums {
    const T* own_row;
    int own_size;
    int room;
    int first_sum;
    int num_sums;
  };
  // Begins to read the rows of the first sum likewise, then those of the next one, and so on.
  __device__ ListReader(std::byte* shared, const Sums& sums, int64_t hidden)
      : ring_(in_register(shared) + lane() * kFragmentBytes), own_row_(reinterpret_cast<const std::byte*>(sums.own_row)),
        row_bytes_(bytes_of(hidden)), sums_{sums.own_size, sums.room, sums.first_sum - 1, sums.first_sum + sums.num_sums,
                                            h_tiles(hidden)} {
    static_assert(kManySums);
    __syncwarp(); // as above
    begin_next_sum();
    fill_ring();
  }

  // Returns whether aligned rows of `hidden` elements are read by such h-tiles.
  __host__ __device__ static constexpr bool takes(int64_t hidden) {
    return kTakesType && hidden % (kHasWholeTiles ? kHTile : kFragment) == 0;
  }
  __device__ static int h_tiles(int64_t hidden) {
    return (static_cast<int>(hidden) + (kHasWholeTiles ? 0 : kHTile - 1)) / kHTile;
  }

  // Waits for the next h-tile. fragment() returns the lane's fragments of it until the next call; beyond the row's end they are
  // undefined.
  __device__ void next() {
    load_next();
    wait_for_async_copies<kStages - 1>();
    back_ = front_;
    front_ = front_ + kHTileBytes < kStages * kHTileBytes ? front_ + kHTileBytes : 0;
  }
  __device__ Fragment<T> fragment(int warp_tile) const {
    return load_vector<T>(ring_ + back_ + warp_tile * kWarpTileBytes);
  }

  // See RowReader::end(). All lanes' stores come before what a lane signals afterwards.
  __device__ void end() {
    fence_shared_before_bulk_copies();
    __syncwarp();
  }

private:
  static constexpr int kFragmentBytes = sizeof(Fragment<T>), kWarpTileBytes = kWarp * kFragmentBytes;
  static constexpr int kHTileBytes = kWarpTiles * kWarpTileBytes;

  __device__ static int bytes_of(int64_t hidden) { return static_cast<int>(hidden) * static_cast<int>(sizeof(T)); }
  __device__ void fill_ring() {
    static_assert(kTakesType && kRingBytes % 128 == 0 && kRingBytes >= TmaRowPipeline::kStagesBytes);
    // Short h-tiles need no larger ring than a pipeline has for its own stages.
    static_assert(kHasWholeTiles || kRingBytes == TmaRowPipeline::kStagesBytes);
#pragma unroll 1
    for (back_ = 0; back_ < (kStages - 1) * kHTileBytes; back_ += kHTileBytes)
      load_next();
  }
  // Begins the next load, into the stage that was taken last; see RowReader::load_next().
  __device__ void load_next() {
    if (loads_left_ > 0) { // the same in all lanes
      --loads_left_;
      const std::byte* const row = from_lane(own_row_, first_lane() + next_row_);
      if constexpr (kHasWholeTiles) {
        begin_async_copies<kWarpTiles, kWarpTileBytes>(ring_ + back_, row + next_offset_);
      } else {
#pragma unroll
        for (int at = 0; at < kHTileBytes; at += kWarpTileBytes)
          if (next_offset_ + at < row_bytes_)
            begin_async_copies<1, kWarpTileBytes>(ring_ + back_ + at, row + next_offset_ + at);
      }
    }
    end_async_copy_group();
    if (++next_row_ != num_rows_) return;
    next_row_ = 0;
    next_offset_ += kHTileBytes;
    if constexpr (kManySums)
      if (loads_left_ == 0) begin_next_sum();
  }
  // Goes on to the next sum that has rows, if there is one.
  __device__ void begin_next_sum() {
    num_rows_ = 0;
#pragma unroll 1
    while (num_rows_ == 0 && ++sums_.next < sums_.end)
      num_rows_ = from_lane(sums_.own_size, sums_.next);
    loads_left_ = sums_.h_tiles * num_rows_;
    next_offset_ = lane() * kFragmentBytes;
  }
  // The lane that has the first row of the sum whose rows are loaded next.
  __device__ int first_lane() const {
    if constexpr (kManySums)
      return sums_.next * sums_.room;
    else
      return 0;
  }

  std::byte* ring_; // the lane's first fragment in the first stage
  const std::byte* own_row_;
  int row_bytes_;
  int num_rows_ = 0; // of the sum whose rows are loaded next
  int loads_left_ = 0;
  int next_row_ = 0;
  int next_offset_ = 0;      // of the lane's first fragment of the h-tile that is loaded next, in its row
  int back_ = 0, front_ = 0; // see RowReader
  struct {
    int own_size, room, next, end, h_tiles;
  } sums_{}; // with kManySums
};
template <typename T>
using LongTileReader = ListReader<T, kLongTile>;
template <typename T>
using ShortTileReader = ListReader<T, kShortTile>;

} // namespace epx::cuda
