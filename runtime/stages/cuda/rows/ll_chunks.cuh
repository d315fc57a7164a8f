// SPDX-License-Identifier: Apache-2.0
// What a chunk of a row on the low-latency (LL) path is made of, and what a receiver makes of it: a policy of LlRows, that a row
// format chooses (row_format.cuh). Here are the chunks of rows that are copied; ll_quantised_chunks.cuh has those of rows that
// are quantised.
#pragma once

#include "runtime/layout/window_layout.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/ll_row.cuh"
#include "runtime/stages/stages.h"

namespace epx::cuda {

// Says where a chunk of a row or of its sidecar lies.
struct ChunkRange {
  uint32_t chunk; // index in staging
  bool is_sidecar;
  int64_t row_bytes; // of a sidecar or a plain row
  int64_t first;     // byte of the row or sidecar; element of a quantised row
  int bytes;         // that travel
};

// Copies rows, and sidecars.
template <bool kUnaligned>
class PlainChunks {
public:
  __device__ PlainChunks(const DispatchCall& args, std::byte* /*scratch*/)
      : row_bytes_(epx::row_bytes(args.dtype, args.hidden)) {}

  // Whether LlRows copies chunks of rows as it copies those of sidecars.
  static constexpr bool kAreCopied = true;
  static constexpr bool kIsUnaligned = kUnaligned;

  __device__ int64_t row_bytes() const { return row_bytes_; }
  __device__ uint32_t count() const { return static_cast<uint32_t>(ll_chunks_of(row_bytes_)); }
  __device__ ChunkRange range_at(uint32_t chunk) const { return range_at(chunk, row_bytes_); }
  __device__ static ChunkRange range_at(uint32_t chunk, int64_t row_bytes) {
    const int64_t first = static_cast<int64_t>(chunk) * kLlChunkBytes;
    return {chunk, false, row_bytes, first, static_cast<int>(min(row_bytes - first, int64_t{kLlChunkBytes}))};
  }
  __device__ static LlChunk load(const std::byte* rows, int64_t row, const ChunkRange& range) {
    return load_chunk<kUnaligned>(rows + row * range.row_bytes + range.first, range.bytes);
  }
  __device__ __forceinline__ static void store(std::byte* rows, int64_t row, const ChunkRange& range,
                                               const LlChunk& chunk) {
    store_chunk<kUnaligned>(rows + row * range.row_bytes + range.first, range.bytes, chunk);
  }

private:
  int64_t row_bytes_;
};

} // namespace epx::cuda
