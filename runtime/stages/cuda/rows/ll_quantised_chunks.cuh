// SPDX-License-Identifier: Apache-2.0
// The chunks of quantised rows on the low-latency (LL) path: each is the wire row of a part of the elements, with its scales
// (ll_part_elements), so that whoever has a chunk can store it, or dequantise it, without the others.
//
// In registers a chunk is as it travels. What is quantised or dequantised passes through shared memory. A call of few tokens takes
// as long as its instructions, which come from a cold cache: so sizes are 32-bit numbers and shifts, since a division by a number
// that is known at run time alone is a hundred instructions.
#pragma once

#include <bit>
#include <cstring>

#include "runtime/stages/cuda/rows/ll_chunks.cuh"
#include "runtime/stages/cuda/rows/quantised_row.cuh"
#include "runtime/stages/cuda/rows/quantised_stage.cuh"

namespace epx::cuda {

// Quantises elements, whose codes are vectors, to aligned addresses. Returns false where one is not finite: then these have
// anything. It is not inlined, so that its instructions lie together. All lanes call this.
template <typename Stage>
__device__ __noinline__ bool quantise_by_stages(const WireFormat format, const std::byte* from, int elements,
                                                float encode_scale, std::byte* codes, std::byte* scales) {
  using Vector = typename Stage::Vector;
  const auto load = [&](int stage, Vector(&vectors)[Stage::kVectors]) {
#pragma unroll
    for (int i = 0; i < Stage::kVectors; ++i) {
      const int vector = Stage::vector_of(stage, i);
      vectors[i] = {};
      if (vector * Vector::kElements < elements) vectors[i].load(from + vector * Vector::kBytes);
    }
  };
  const int scale_bytes = static_cast<int>(single_element_bytes(format.scales));
  uint32_t largest = 0;
  Vector next[Stage::kVectors];
  load(0, next);
#pragma unroll 1
  for (int stage = 0; stage * Stage::kElements < elements; ++stage) {
    Vector vectors[Stage::kVectors];
    memcpy(vectors, next, sizeof(vectors));
    load(stage + 1, next); // is in flight meanwhile
    const typename Stage::Quantised quantised = Stage::quantise(format, encode_scale, vectors, largest);
#pragma unroll
    for (int i = 0; i < Stage::kVectors; ++i)
      if (const int vector = Stage::vector_of(stage, i); vector * Vector::kElements < elements)
        Stage::store_codes(codes + vector * Stage::kCodesOfVector, quantised.codes[i]);
#pragma unroll
    for (int i = 0; i < Stage::kBlocksOfLane; ++i)
      if (const int block = Stage::block_of(stage, i); Stage::is_first_of_block() && block * Stage::kBlock < elements)
        store_scale(scales + block * scale_bytes, scale_bytes, quantised.scales.stored[i]);
  }
  return Stage::all_finite(largest);
}

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
    if (tensors_.scales != nullptr) return load_part(token, part);
    __syncwarp(); // all lanes have read what was there
    if (args_.dtype == EPX_FLOAT32) {
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
  static constexpr int kWordBytes = sizeof(uint32_t);
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
    if (tensors_.recv_scales == nullptr) {
      dequantise_part(row, part, chunk, lanes);
      return;
    }
#pragma unroll 1
    for (unsigned left = lanes; left != 0; left &= left - 1)
      store_chunk<kUnaligned>(args_.recv_tokens + from_lane(row, lowest_bit(left)) * row_bytes() + codes_of(part.first),
                              part.code_bytes, chunk);
    store_scales(row, part, chunk, lanes);
    if (tensors_.recv_row_scales == nullptr || part.first != 0) return;
    const int vector = part.row_scale / kVectorBytes;
    const auto row_scale = std::bit_cast<float>(from_lane(words_of(chunk, vector / kWarp).words[0], vector % kWarp));
    if (row >= 0) tensors_.recv_row_scales[row] = row_scale;
  }

  // A lane's vector of a chunk.
  struct Words {
    uint32_t words[4];
  };
  __device__ static Words words_of(const LlChunk& chunk, int index) {
    Words vector{};
#pragma unroll
    for (int i = 0; i < LlChunk::kVectors; ++i)
#pragma unroll
      for (int word = 0; word < 4; ++word)
        if (i == index) vector.words[word] = chunk.words[4 * i + word];
    return vector;
  }
  __device__ static void set_vector(LlChunk& chunk, int index, const Words& vector) {
#pragma unroll
    for (int i = 0; i < LlChunk::kVectors; ++i)
#pragma unroll
      for (int word = 0; word < 4; ++word)
        if (i == index) chunk.words[4 * i + word] = vector.words[word];
  }
  // A lane has scales in one of its vectors at most: a chunk has fewer vectors of them than a warp has lanes.
  struct ScaleVector {
    int index;
    int first; // byte, of the part's scales; beyond their end: the lane has none
  };
  __device__ static ScaleVector scale_vector_of(const Part& part) {
    const int begin = part.scales / kVectorBytes;
    const int from_begin = (lane() - begin) & (kWarp - 1);
    return {(begin + from_begin) / kWarp, from_begin * kVectorBytes};
  }

  // Returns a word of the part's scales, in each lane the one that it passes.
  __device__ static uint32_t scale_word_of(const LlChunk& chunk, const Part& part, int index) {
    const Words own = words_of(chunk, scale_vector_of(part).index);
    const int keeper = (part.scales / kVectorBytes + index / 4) & (kWarp - 1);
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const uint32_t kept = from_lane(own.words[i], keeper); index % 4 == i) word = kept;
    return word;
  }
  // Stores the scales of a part, and behind the last part the fill, which is 0. Each lane stores a word to all places; one byte after
  // the other where words are not whole, not aligned, or in columns.
  __device__ void store_scales(int64_t row, const Part& part, const LlChunk& chunk, unsigned lanes) const {
    const ScaleLayout& layout = tensors_.recv_layout;
    const int shift = scale_bytes() == kWordBytes ? 2 : 0, total = part.scale_count * scale_bytes();
    std::byte* const place = row >= 0 ? tensors_.recv_scales + layout.row_offset(row) : nullptr;
#pragma unroll 1
    for (int first = 0; first < total; first += kWarp * kWordBytes) {
      const int byte = first + lane() * kWordBytes;
      const int bytes = min(total - byte, kWordBytes); // that are scales; 0 or less: the lane has no word
      uint32_t word = scale_word_of(chunk, part, byte / kWordBytes);
      if (bytes < kWordBytes) word &= bytes > 0 ? (1u << (8 * bytes)) - 1 : 0;
      const int64_t offset = layout.place_offset(scales_before(part) + (byte >> shift));
      const bool is_word = bytes <= 0 || bytes == kWordBytes || layout.has_fill();
      const bool is_aligned = reinterpret_cast<uint64_t>(place) % kWordBytes == 0; // so are offsets of words in a row
      const bool by_words =
          shift != 0 || (layout.layout != EPX_SCALES_COLUMNS && __all_sync(~0u, is_word && is_aligned ? 1 : 0) != 0);
#pragma unroll 1
      for (unsigned left = lanes; left != 0; left &= left - 1) {
        std::byte* const to = from_lane(place, lowest_bit(left)) + offset;
        if (by_words) {
          if (bytes > 0) *reinterpret_cast<uint32_t*>(to) = word;
        } else {
          const int64_t step = layout.place_offset(1);
#pragma unroll 1
          for (int i = 0; i < (layout.has_fill() && bytes > 0 ? ScaleLayout::kPerWord : bytes); ++i)
            to[i * step] = static_cast<std::byte>(word >> (8 * i));
        }
      }
    }
  }

  // Loads a part that comes quantised.
  __device__ LlChunk load_part(int64_t token, const Part& part) const {
    const int64_t first_scale = token * tensors_.recv_layout.num_scales + scales_before(part);
    const std::byte* const scales = tensors_.scales + first_scale * scale_bytes();
    const ScaleVector own = scale_vector_of(part);
    Words words{}; // in flight with the codes
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const int first = own.first + word * kWordBytes;
      words.words[word] = load_scale_word(scales + first, part.scale_count * scale_bytes() - first);
    }
    const float row_scale = format_.has_row_scale() ? tensors_.row_scales[token] : 0.0f;
    LlChunk chunk = load_chunk<kUnaligned>(args_.tokens + token * row_bytes() + codes_of(part.first), part.code_bytes);
    if (own.first < part.scale_count * scale_bytes()) set_vector(chunk, own.index, words);
    const int vector = part.row_scale / kVectorBytes;
    if (format_.has_row_scale() && lane() == vector % kWarp)
      set_vector(chunk, vector / kWarp, {{std::bit_cast<uint32_t>(row_scale), 0, 0, 0}});
    return chunk;
  }
  // Loads four bytes, of which there are `bytes`.
  __device__ static uint32_t load_scale_word(const std::byte* from, int bytes) {
    if (bytes >= kWordBytes && reinterpret_cast<uint64_t>(from) % kWordBytes == 0)
      return *reinterpret_cast<const uint32_t*>(from);
    uint32_t word = 0;
#pragma unroll 1
    for (int i = 0; i < min(bytes, kWordBytes); ++i)
      word |= static_cast<uint32_t>(from[i]) << (8 * i);
    return word;
  }
  template <typename T>
  __device__ void quantise_part(int64_t token, const Part& part) const {
    const auto* const row = reinterpret_cast<const T*>(args_.tokens) + token * args_.hidden;
    const float e = encode_scale_of<T, !kUnaligned>(format_, row, args_.hidden, tensors_.encode_scale);
    const T* const elements = row + part.first;
    std::byte* const scales = scratch_ + part.scales;
    bool is_done = false;
    if constexpr (!kUnaligned)
      with_quantised_stage<T>(format_, [&](auto of) {
        is_done = quantise_by_stages<typename decltype(of)::type>(format_, reinterpret_cast<const std::byte*>(elements),
                                                                  part.elements, e, scratch_, scales);
      });
    float* const row_scale = format_.has_row_scale() ? row_scale_of(part) : nullptr;
    if (is_done) {
      if (row_scale != nullptr && lane() == 0) *row_scale = formats::nv_row_scale(e);
      return;
    }
    __syncwarp();                      // lanes write what others have written
    constexpr unsigned kFirstLane = 1; // whose place it is
    quantise_row<T, false>(format_, elements, part.elements, e,
                           ScaleLayout{EPX_SCALES_ROWS, scale_bytes(), part.scale_count, 1},
                           lane() == 0 ? QuantisedPlace{scratch_, scales, row_scale} : QuantisedPlace{}, kFirstLane);
  }

  __device__ void dequantise_part(int64_t row, const Part& part, const LlChunk& chunk, unsigned lanes) const {
    __syncwarp(); // all lanes have read what was there
    store_chunk<false>(scratch_, part.bytes, chunk);
    __syncwarp(); // each lane sees what the others have stored
    const float row_scale = format_.has_row_scale() ? *row_scale_of(part) : 0.0f;
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
