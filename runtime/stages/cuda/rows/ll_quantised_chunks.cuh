// SPDX-License-Identifier: Apache-2.0
// The chunks of quantised rows on the low-latency (LL) path: each is the wire row of a part of the elements, with its scales
// (ll_part_elements), so that whoever has a chunk can store it, or dequantise it, without the others.
//
// In registers a chunk is as it travels; its parts are made and taken in shared memory. A call of few tokens takes as long as its
// instructions, which come from a cold cache: so sizes are 32-bit numbers and shifts, since a division by a number that is known at
// run time alone is a hundred instructions.
#pragma once

#include "runtime/stages/cuda/rows/ll_chunks.cuh"
#include "runtime/stages/cuda/rows/quantised_row.cuh"

namespace epx::cuda {

template <bool kUnaligned>
class QuantisedChunks {
public:
  // `scratch` is shared memory of the warp, kLlChunkBytes.
  __device__ QuantisedChunks(const DispatchCall& args, std::byte* scratch)
      : args_(args), tensors_(args.format_tensors), format_(args.format), scratch_(scratch) {}

  static constexpr bool kAreCopied = false;
  static constexpr bool kIsUnaligned = kUnaligned;

  // Of the codes.
  __device__ int64_t row_bytes() const { return codes_of(args_.hidden); }
  __device__ uint32_t count() const {
    return (static_cast<uint32_t>(args_.hidden) + part_elements() - 1) / part_elements();
  }
  __device__ ChunkRange range_at(uint32_t chunk) const {
    const int first = static_cast<int>(chunk * part_elements());
    return {chunk, false, 0, first, part_from(first).bytes};
  }

  // Loads a chunk of a token of this rank as it travels: rows come quantised, or are quantised here. All lanes call this.
  __device__ LlChunk load(int64_t token, const ChunkRange& range) const {
    const Part part = part_from(static_cast<int>(range.first));
    __syncwarp(); // all lanes have read what was there
    if (tensors_.scales != nullptr) {
      copy_part(token, part);
    } else if (args_.dtype == EPX_FLOAT32) {
      quantise_part<float>(token, part);
    } else if (args_.dtype == EPX_FLOAT16) {
      quantise_part<__half>(token, part);
    } else {
      quantise_part<__nv_bfloat16>(token, part);
    }
    __syncwarp(); // each lane sees what the others have stored
    return load_chunk<false>(scratch_, range.bytes);
  }

  // Stores a chunk into the row of the receive tensors that each lane passes; -1: none. All lanes call this.
  __device__ void store(int64_t row, const ChunkRange& range, const LlChunk& chunk) const {
    store_by_value(*this, row, range, chunk);
  }

private:
  // A part of the elements, and where it lies in its chunk, as in a WireRow: bytes.
  struct Part {
    int first; // element
    int elements;
    int scale_count;
    int code_bytes;
    int row_scale;
    int scales;
    int bytes; // of all
  };

  __device__ uint32_t part_elements() const { return static_cast<uint32_t>(ll_part_elements(format_)); }
  __device__ Part part_from(int first) const {
    Part part{};
    part.first = first;
    part.elements = min(args_.hidden - first, static_cast<int>(part_elements()));
    part.scale_count = (part.elements + format_.block() - 1) >> format_.block_shift();
    part.code_bytes = codes_of(part.elements); // H of packed rows is even
    part.row_scale = (part.code_bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
    part.scales = part.row_scale + (format_.has_row_scale() ? kVectorBytes : 0);
    part.bytes = part.scales + part.scale_count * scale_bytes();
    return part;
  }
  static constexpr int kVectorBytes = sizeof(uint4);
  // 1 where a byte has two elements, else 0.
  __device__ int is_packed() const { return format_.elements == EPX_FLOAT4_E2M1 ? 1 : 0; }
  __device__ int codes_of(int elements) const { return elements >> is_packed(); }
  __device__ int scale_bytes() const { return format_.scales == EPX_FLOAT32 ? 4 : 1; }
  // Where the scales of a row that come before those of the part end, in scales.
  __device__ int64_t scales_before(const Part& part) const { return part.first >> format_.block_shift(); }
  __device__ float* row_scale_of(const Part& part) const { return reinterpret_cast<float*>(scratch_ + part.row_scale); }

  // It is not inlined, since several places call it and a cold instruction cache takes longer than a call; and it takes
  // copies, since what a function has by its address lies in local memory.
  __device__ __noinline__ static void store_by_value(const QuantisedChunks chunks, int64_t row, const ChunkRange range,
                                                     const LlChunk chunk) {
    const unsigned lanes = __ballot_sync(~0u, row >= 0 ? 1 : 0);
    if (lanes != 0) chunks.store_in_lanes(row, chunks.part_from(static_cast<int>(range.first)), chunk, lanes);
  }
  __device__ void store_in_lanes(int64_t row, const Part& part, const LlChunk& chunk, unsigned lanes) const {
    __syncwarp(); // all lanes have read what was there
    store_chunk<false>(scratch_, part.bytes, chunk);
    __syncwarp(); // each lane sees what the others have stored
    const float row_scale = format_.has_row_scale() ? *row_scale_of(part) : 0.0f;
    if (tensors_.recv_scales == nullptr) {
      dequantise_part(row, part, row_scale, lanes);
      return;
    }
#pragma unroll 1
    for (unsigned left = lanes; left != 0; left &= left - 1)
      store_chunk<kUnaligned>(args_.recv_tokens + from_lane(row, lowest_bit(left)) * row_bytes() + codes_of(part.first),
                              part.code_bytes, chunk);
    store_scales(row, part, lanes);
    if (tensors_.recv_row_scales != nullptr && row >= 0 && part.first == 0) tensors_.recv_row_scales[row] = row_scale;
  }

  __device__ void copy_part(int64_t token, const Part& part) const {
    const std::byte* const row = args_.tokens + token * row_bytes();
    store_chunk<false>(scratch_, part.code_bytes, load_chunk<kUnaligned>(row + codes_of(part.first), part.code_bytes));
    const int bytes = scale_bytes();
    const std::byte* const scales =
        tensors_.scales + (token * tensors_.recv_layout.num_scales + scales_before(part)) * bytes;
    for (int i = lane(); i < part.scale_count; i += kWarp)
      store_scale(scratch_ + part.scales + i * bytes, bytes, load_scale(scales + i * bytes, bytes));
    if (format_.has_row_scale() && lane() == 0) *row_scale_of(part) = tensors_.row_scales[token];
  }
  template <typename T>
  __device__ void quantise_part(int64_t token, const Part& part) const {
    const auto* const row = reinterpret_cast<const T*>(args_.tokens) + token * args_.hidden;
    const float e = encode_scale_of<T, !kUnaligned>(format_, row, args_.hidden, tensors_.encode_scale);
    const ScaleLayout layout{EPX_SCALES_ROWS, scale_bytes(), part.scale_count, 1};
    const QuantisedPlace place{scratch_, scratch_ + part.scales, format_.has_row_scale() ? row_scale_of(part) : nullptr};
    constexpr unsigned kFirstLane = 1; // whose place it is
    quantise_row<T, !kUnaligned>(format_, row + part.first, part.elements, e, layout,
                                 lane() == 0 ? place : QuantisedPlace{}, kFirstLane);
  }

  // Stores the scales of a part, and behind the last part the fill, which is 0.
  __device__ void store_scales(int64_t row, const Part& part, unsigned lanes) const {
    const ScaleLayout& layout = tensors_.recv_layout;
    const int fill = layout.has_fill() ? -part.scale_count & (ScaleLayout::kPerWord - 1) : 0;
    if (lane() < fill) scratch_[part.scales + part.scale_count + lane()] = std::byte{0};
    __syncwarp();
    copy_scales(scratch_ + part.scales, scales_before(part), part.scale_count + fill, layout,
                row >= 0 ? tensors_.recv_scales + layout.row_offset(row) : nullptr, lanes, NoWeight{});
  }
  __device__ void dequantise_part(int64_t row, const Part& part, float row_scale, unsigned lanes) const {
    if (args_.recv_dtype == EPX_FLOAT32)
      dequantise_part_as<float>(row, part, row_scale, lanes);
    else if (args_.recv_dtype == EPX_FLOAT16)
      dequantise_part_as<__half>(row, part, row_scale, lanes);
    else
      dequantise_part_as<__nv_bfloat16>(row, part, row_scale, lanes);
  }
  template <typename T>
  __device__ void dequantise_part_as(int64_t row, const Part& part, float row_scale, unsigned lanes) const {
    T* const to = row >= 0 ? reinterpret_cast<T*>(args_.recv_tokens) + row * args_.hidden + part.first : nullptr;
    dequantise_row<T, !kUnaligned>(format_, {scratch_, scratch_ + part.scales, row_scale}, part.elements, to, NoWeight{},
                                   lanes);
  }

  const DispatchCall& args_;
  const FormatTensors& tensors_;
  const WireFormat format_;
  std::byte* scratch_;
};

} // namespace epx::cuda
