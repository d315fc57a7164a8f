// SPDX-License-Identifier: Apache-2.0
// The slices of ragged_all_to_all, for host and device: what the two ranks of a slice tell each other, when it moves, and how
// rows pass through staging.
//
// The rank whose integers describe a slice is its *author*; the other one is its *peer*. Whichever way the rows go, the author
// tells its size and both offsets, and the peer the size that it has in recv_sizes. So each knows what the other knows, and both
// decide alike whether the slice moves.
//
// Rows for an output that peers cannot reach pass through the receiver's staging, which is an image of a part of the output at
// a time: round r has bytes [r, r + 1) * the size of the image.
#pragma once

#include <cstdint>
#include <limits>

#include "base/host_device.h"
#include "runtime/layout/window_layout.h"

namespace epx {

// What lies in slice_records, by field. The author stores the first three in the window of the peer, and the peer the last.
enum class SliceField : int { size, input_offset, output_offset, recv_size };

constexpr int32_t kNoSize = -1;     // of a size that is negative, or more than any tensor has rows
constexpr int32_t kLeavesHere = -2; // of a slice that leaves the author's tensor
constexpr int32_t kNoOffset = -1;

enum class SliceFault : int { none, sizes_differ, leaves_author, leaves_peer };

struct SliceRecord {
  int32_t size, input_offset, output_offset, recv_size;
};

// Where a slice's rows are read, and where they land.
struct MovingSlice {
  int32_t rows; // 0: it does not move
  int32_t from, to;
};

// Returns entry `index` of an int32 or int64 array.
EPX_HOST_DEVICE inline int64_t integer_at(const void* integers, bool are_64, int64_t index) {
  return are_64 ? static_cast<const int64_t*>(integers)[index] : static_cast<const int32_t*>(integers)[index];
}

EPX_HOST_DEVICE inline int32_t told_size(int64_t size) {
  return size < 0 || size > std::numeric_limits<int32_t>::max() ? kNoSize : static_cast<int32_t>(size);
}
// What the author tells. `rows`: of its tensor.
EPX_HOST_DEVICE inline int32_t told_size_of_author(int64_t size, int64_t input_offset, int64_t rows) {
  if (size <= 0) return told_size(size);
  if (input_offset < 0 || input_offset > rows - size) return kLeavesHere;
  return static_cast<int32_t>(size);
}
EPX_HOST_DEVICE inline int32_t told_offset(int64_t offset) {
  return offset < 0 || offset > std::numeric_limits<int32_t>::max() ? kNoOffset : static_cast<int32_t>(offset);
}

// What a rank tells of slice i of its own, and of the i-th that it expects. Call is RaggedAllToAllCall.
template <typename Call>
EPX_HOST_DEVICE SliceRecord told_record(const Call& call, int64_t i) {
  const auto integer = [&](const void* integers) { return integer_at(integers, call.integers_are_64, i); };
  const int64_t input_offset = integer(call.input_offsets);
  const int64_t rows = call.is_transposed ? call.output_rows : call.operand_rows;
  return {told_size_of_author(integer(call.send_sizes), input_offset, rows), told_offset(input_offset),
          told_offset(integer(call.output_offsets)), told_size(integer(call.recv_sizes))};
}

// `peer_rows`: of the peer's tensor.
EPX_HOST_DEVICE inline SliceFault fault_of(const SliceRecord& slice, int64_t peer_rows) {
  if (slice.size == kLeavesHere) return SliceFault::leaves_author;
  if (slice.size != slice.recv_size || slice.size < 0) return SliceFault::sizes_differ;
  if (slice.size == 0) return SliceFault::none;
  const bool leaves = slice.output_offset < 0 || slice.output_offset > peer_rows - slice.size;
  return leaves ? SliceFault::leaves_peer : SliceFault::none;
}

EPX_HOST_DEVICE inline MovingSlice moving_slice(const SliceRecord& slice, SliceFault fault, bool is_transposed) {
  if (fault != SliceFault::none) return {};
  return is_transposed ? MovingSlice{slice.size, slice.output_offset, slice.input_offset}
                       : MovingSlice{slice.size, slice.input_offset, slice.output_offset};
}

// Returns the byte offset of a field of slice j between the owner of the window and `peer`, in records of `record_bytes`. Where
// there are two halves, `half` selects one.
EPX_HOST_DEVICE inline int64_t slice_record_offset(const WindowLayout& layout, int num_ranks, int peer, SliceField field,
                                                   int64_t j, int64_t record_bytes, int64_t half = 0) {
  const int64_t of_pair = EPX_MAX_SLICES / num_ranks;
  const int64_t of_half = int64_t{kNumSliceFields} * EPX_MAX_SLICES;
  return layout.slice_records.offset +
         (half * of_half + (peer * int64_t{kNumSliceFields} + static_cast<int>(field)) * of_pair + j) * record_bytes;
}

// The part of an output that staging has in a round, in bytes.
struct SliceImage {
  int64_t begin, end;
};
EPX_HOST_DEVICE inline SliceImage slice_image(int64_t image_bytes, int64_t round) {
  return {round * image_bytes, (round + 1) * image_bytes};
}
EPX_HOST_DEVICE inline int64_t slice_rounds(int64_t output_bytes, int64_t image_bytes) {
  return (output_bytes + image_bytes - 1) / image_bytes;
}

// A slice's bytes in an image.
struct SliceBytes {
  int64_t from, to; // in the tensor that is read, and in the output
  int64_t bytes;
};
EPX_HOST_DEVICE inline SliceBytes bytes_in(const MovingSlice& slice, int64_t row_bytes, const SliceImage& image) {
  const int64_t from = slice.from * row_bytes, to = slice.to * row_bytes, end = to + slice.rows * row_bytes;
  const int64_t first = to > image.begin ? to : image.begin;
  const int64_t last = end < image.end ? end : image.end;
  return {from + (first - to), first, last > first ? last - first : 0};
}
// Kernels store the next image into staging while they copy the last one, so that an image is half of it.
EPX_HOST_DEVICE inline int64_t slice_image_bytes(const WindowLayout& layout) {
  return layout.scatter_rows.bytes / 2;
}
constexpr SliceImage kWholeOutput{0, std::numeric_limits<int64_t>::max()};

} // namespace epx
