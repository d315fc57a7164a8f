// SPDX-License-Identifier: Apache-2.0
// A warp quantises and dequantises a row that lies in the ring of its TmaRowPipeline, and bulk copies take it to its places. So a
// row is in flight without registers, each of its blocks has its scale computed once, and a place costs the warp a few
// instructions. Rows are aligned to vectors here; quantised_row.cuh has the form for others.
//
// A part of the row, at most kStages stages of elements, is in the ring at a time. It is quantised in place: codes take at most
// half of the room of elements, so those of a stage, behind the scales, end before the first stage that is still to be read.
//
//   ring, before   | elements of stage 0 | of stage 1 | ...
//   ring, after    | scales | codes of stage 0 | of stage 1 | ...
//
// Lane l has the vectors l, 32 + l, ... of a stage. A block lies in kLanes neighbouring lanes, which find its amax together. As
// many vectors as a block has lanes make a group: each lane keeps the amax of one block of it, and computes the scale of that.
#pragma once

#include "runtime/stages/cuda/rows/quantised_row.cuh"
#include "runtime/stages/cuda/rows/ring_vector.cuh"
#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"

namespace epx::cuda {

// Not inlined: a lane calls it for a few of its blocks.
__device__ __noinline__ inline formats::BlockScale<float> scale_of_block(const WireFormat format, float amax,
                                                                         float encode_scale) {
  return formats::scale_block(format, amax, true, encode_scale);
}

// A row of elements T, in blocks of kBlock, and its codes of `Type`.
template <typename T, typename Type, int kBlock>
class RingRow {
  using Vector = RingVector<T>;

  static constexpr int kStages = TmaRowPipeline::kStages;
  static constexpr int kStageBytes = TmaRowPipeline::kStageBytes;
  static constexpr int kStageElements = kStageBytes / static_cast<int>(sizeof(T));
  static constexpr int64_t kPartElements = kStages * kStageElements;
  static constexpr int kCodesOfVector = Vector::kElements * Type::kBits / 8; // bytes
  static constexpr int kCodesOfStage = kStageElements * Type::kBits / 8;     // bytes
  static constexpr int kVectors = Vector::kOfStage;

  static constexpr int kLanes = kBlock / Vector::kElements; // of a block
  static constexpr int kBlocksOfVectors = kWarp / kLanes;   // that a vector of each lane has
  static constexpr int kGroupVectors = kLanes > kVectors ? kLanes : kVectors;
  static constexpr int kGroupStages = kGroupVectors / kVectors;
  static constexpr int kKept = kGroupVectors / kLanes; // blocks of a group that a lane has the scales of

  static constexpr int kScalesBytes = 512; // before the codes
  static constexpr int kMaxScaleBytes = kBlock == 128 ? 4 : 1;
  static constexpr int kGroups = (kStages + kGroupStages - 1) / kGroupStages;
  static_assert(kGroups * kGroupVectors * kBlocksOfVectors * kMaxScaleBytes <= kScalesBytes);
  static_assert(kScalesBytes + kCodesOfStage <= kStageBytes && 2 * kCodesOfStage <= kStageBytes);
  static_assert(kPartElements % (ScaleLayout::kPerWord * kBlock) == 0);

public:
  // Begins to load what is in the ring first, for quantise().
  __device__ static void begin(TmaRowPipeline& pipeline, const std::byte* row, int64_t hidden) {
    begin_part(pipeline, row, hidden, 0);
  }
  // Quantises the row, behind begin(), to the places of `lanes`. Returns false where an element is not finite: then the places
  // have anything, and nothing waits for a piece. The caller passes encode_scale for NV alone.
  __device__ static bool quantise(TmaRowPipeline& pipeline, const WireFormat& format, const std::byte* row, int64_t hidden,
                                  const float* given_encode_scale, const QuantisedPlaces& to, unsigned lanes) {
    RingRow part{pipeline.stages(), format};
    const QuantisedPlace& own = to.own;
    part.dequantises_ = from_lane(own.scales, lowest_bit(lanes)) == nullptr;
    bool is_begun = true, is_filled = false, is_finite = true;
    if (given_encode_scale != nullptr) {
      part.encode_scale_ = *given_encode_scale;
    } else if (format.has_row_scale()) {
      if (!find_encode_scale(pipeline, row, hidden, part.encode_scale_)) return false;
      is_begun = is_filled = hidden <= kPartElements;
    }
    part.row_scale_ = formats::nv_row_scale(part.encode_scale_);
#pragma unroll 1
    for (int64_t first = 0; first < hidden; first += kPartElements) {
      part.elements_ = static_cast<int>(min(kPartElements, hidden - first));
      if (!is_begun) begin_part(pipeline, row, hidden, first);
      is_begun = false;
      // Codes leave by so many stages: the wire would have nothing to do while all warps quantise their first rows.
      constexpr int kStagesToStore = 4;
      int stored = 0; // stages whose codes have left
#pragma unroll 1
      for (int stage = 0; stage * kStageElements < part.elements_;) {
        is_finite &= part.quantise_group(stage, [&](int loaded) {
          if (!is_filled) pipeline.wait_for_piece(loaded);
        });
        stage += kGroupStages;
        const bool is_last = stage * kStageElements >= part.elements_;
        if (part.dequantises_ || !is_finite || !(is_last || stage - stored >= kStagesToStore)) continue;
        const int codes = min(stage * kStageElements, part.elements_) * Type::kBits / 8 - stored * kCodesOfStage;
        pipeline.begin_store_to_destinations(kScalesBytes + stored * kCodesOfStage, codes, lanes,
                                             own.row + first * Type::kBits / 8 + stored * kCodesOfStage);
        stored = stage;
      }
      if (!is_finite) {
        fence_shared_before_bulk_copies(); // the next bulk loads come after the codes that this lane has stored in the ring
        return false;
      }
      if (part.dequantises_) {
        pipeline.begin_store_to_destinations(0, part.bytes(), lanes, own.row + first * static_cast<int64_t>(sizeof(T)));
        continue;
      }
      const int scales = (part.elements_ + kBlock - 1) / kBlock; // and the fill, which lies behind them
      constexpr int kWord = ScaleLayout::kPerWord;
      to.for_each_layout(lanes, [&](const ScaleLayout& layout, unsigned those) {
        copy_scales(pipeline.stages(), first / kBlock, layout.has_fill() ? (scales + kWord - 1) / kWord * kWord : scales,
                    layout, own.scales, those, NoWeight{});
      });
    }
    if (own.row_scale != nullptr) *own.row_scale = part.row_scale_;
    return true;
  }

  // Dequantises a row in staging to the places of `lanes`. The codes of a part lie at the end of the ring, where each stage of
  // elements ends before the codes that are still to be read.
  __device__ static void dequantise(TmaRowPipeline& pipeline, const WireFormat& format, const QuantisedSource& from,
                                    int64_t hidden, std::byte* own, unsigned lanes) {
    constexpr int kCodesOffset = kStages * (kStageBytes - kCodesOfStage);
    RingRow part{pipeline.stages(), format};
    part.row_scale_ = from.row_scale;
#pragma unroll 1
    for (int64_t first = 0; first < hidden; first += kPartElements) {
      part.elements_ = static_cast<int>(min(kPartElements, hidden - first));
      pipeline.begin_fill(from.row + first * Type::kBits / 8, part.elements_ * Type::kBits / 8, kCodesOffset,
                          kCodesOfStage);
#pragma unroll 1
      for (int stage = 0; stage * kStageElements < part.elements_; stage += kGroupStages)
        part.dequantise_group(stage, kCodesOffset, from.scales + first / kBlock * scale_bytes_of(format),
                              [&](int loaded) { pipeline.wait_for_piece(loaded); });
      pipeline.begin_store_to_destinations(0, part.bytes(), lanes, own + first * static_cast<int64_t>(sizeof(T)));
    }
  }

private:
  __device__ RingRow(std::byte* ring, const WireFormat& format) : ring_(ring), format_(format) {}

  __device__ static int scale_bytes_of(const WireFormat& format) {
    return static_cast<int>(single_element_bytes(format.scales));
  }
  __device__ int64_t bytes() const {
    return elements_ * static_cast<int64_t>(sizeof(T));
  }
  // Begins to load the part of a row that begins at element `first`. The elements that its last stage lacks are 0.
  __device__ static void begin_part(TmaRowPipeline& pipeline, const std::byte* row, int64_t hidden, int64_t first) {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
    const auto bytes = static_cast<int>(min(kPartElements, hidden - first) * kBytes);
    pipeline.begin_fill(row + first * kBytes, bytes, 0, kStageBytes);
    if (bytes % kStageBytes == 0) return;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) // those of this lane, which alone reads them
      if (const int vector = vector_of(bytes / kStageBytes, i) * Vector::kBytes; vector >= bytes)
        Vector{}.store(pipeline.stages() + vector);
    fence_shared_before_bulk_copies(); // later bulk loads come after these zeros
  }
  // Of the vector that this lane has of a stage, in the ring.
  __device__ static int vector_of(int stage, int i) {
    return (stage * kVectors + i) * kWarp + lane();
  }
  __device__ void load(int stage, Vector (&vectors)[kVectors]) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      vectors[i].load(ring_ + vector_of(stage, i) * Vector::kBytes);
  }
  // The lane that keeps what belongs to the block of this lane's vector i of a stage, and its index there.
  __device__ static int keeper_of(int stage_of_group, int i) {
    return (lane() & ~(kLanes - 1)) | ((stage_of_group * kVectors + i) & (kLanes - 1));
  }
  static constexpr int kept_of(int i) {
    return kKept == 1 ? 0 : i / kLanes;
  }
  // The block, in the part, that this lane keeps the scale of.
  __device__ static int kept_block(int first_stage, int kept) {
    const int vector = first_stage * kVectors + kept * kLanes + (lane() & (kLanes - 1));
    return vector * kBlocksOfVectors + lane() / kLanes;
  }
  __device__ bool has_block(int block) const {
    return block * kBlock < elements_;
  }

  // Returns the largest magnitudes of each of a lane's vectors; `largest` becomes that of them and of what it was.
  __device__ static void amax_of_vectors(const Vector (&vectors)[kVectors], uint32_t (&amax)[kVectors], uint32_t& largest) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      amax[i] = vectors[i].amax_of_words();
      largest = Vector::max_of(largest, amax[i]);
    }
  }
  // Returns the largest magnitudes of the blocks of this stage that the lane keeps, if it keeps any of the stage. Lanes halve
  // what they have of several vectors while they exchange it.
  __device__ static void amax_of_blocks(uint32_t (&amax)[kVectors], uint32_t (&kept)[kKept]) {
    static_assert(kVectors == 4);
    if constexpr (Vector::kHasHalves) {
      const auto low_halves = [](uint32_t a, uint32_t b) { return (a & 0xffff) | b << 16; };
      const auto high_halves = [](uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); };
      const auto both = [&](uint32_t a, uint32_t b) { // in a word
        return Vector::max_of_halves(low_halves(a, b), high_halves(a, b));
      };
      const uint32_t even = both(amax[0], amax[2]), odd = both(amax[1], amax[3]);
      const bool is_odd = (lane() & 1) != 0;
      uint32_t two = is_odd ? odd : even;
      two = Vector::max_of_halves(two, __shfl_xor_sync(~0u, is_odd ? even : odd, 1));
      if constexpr (kLanes == 2) {
        kept[0] = two & 0xffff;
        kept[1] = two >> 16;
      } else {
#pragma unroll
        for (int distance = 2; distance < kLanes; distance *= 2)
          two = Vector::max_of_halves(two, __shfl_xor_sync(~0u, two, distance));
        kept[0] = (lane() & 2) != 0 ? two >> 16 : two & 0xffff;
      }
    } else {
      kept[0] = max_of_block(amax, kLanes);
    }
  }
  // Returns whether the lane keeps blocks of a stage of a group.
  __device__ static bool keeps_stage(int stage_of_group) {
    return kGroupStages == 1 || (lane() & (kLanes - 1)) / kVectors == stage_of_group;
  }
  // Returns whether what the lanes pass are magnitudes of finite elements.
  __device__ static bool all_finite(uint32_t magnitudes) {
    return __all_sync(~0u, Vector::largest_of(magnitudes) < Vector::kInfinity ? 1 : 0) != 0;
  }

  // Computes e of a row of NV, whose first part has been begun. A row of one part is in the ring afterwards. Returns false where
  // an element is not finite.
  __device__ static bool find_encode_scale(TmaRowPipeline& pipeline, const std::byte* row, int64_t hidden,
                                           float& encode_scale) {
    RingRow part{pipeline.stages(), {}};
    uint32_t largest = 0;
#pragma unroll 1
    for (int64_t first = 0; first < hidden; first += kPartElements) {
      part.elements_ = static_cast<int>(min(kPartElements, hidden - first));
      if (first > 0) begin_part(pipeline, row, hidden, first);
#pragma unroll 1
      for (int stage = 0; stage * kStageElements < part.elements_; ++stage) {
        pipeline.wait_for_piece(stage);
        Vector vectors[kVectors];
        part.load(stage, vectors);
        uint32_t amax[kVectors];
        amax_of_vectors(vectors, amax, largest);
      }
    }
    encode_scale = formats::nv_encode_scale(Vector::value_of(__reduce_max_sync(~0u, Vector::largest_of(largest))));
    return all_finite(largest);
  }

  // Returns whether all elements are finite.
  template <typename WaitForStage>
  __device__ bool quantise_group(int first_stage, const WaitForStage& wait_for_stage) const {
    const int stages = min(kGroupStages, (elements_ + kStageElements - 1) / kStageElements - first_stage);
    uint32_t kept_amax[kKept] = {}, largest = 0;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      const int stage = first_stage + i;
      wait_for_stage(stage);
      Vector vectors[kVectors];
      load(stage, vectors);
      uint32_t amax[kVectors], of_stage[kKept];
      amax_of_vectors(vectors, amax, largest);
      amax_of_blocks(amax, of_stage);
#pragma unroll
      for (int kept = 0; kept < kKept; ++kept)
        kept_amax[kept] = keeps_stage(i) ? of_stage[kept] : kept_amax[kept];
    }
    const bool is_finite = all_finite(largest);
    float multipliers[kKept], values[kKept];
    uint32_t stored[kKept];
#pragma unroll
    for (int kept = 0; kept < kKept; ++kept) {
      const formats::BlockScale<float> scale = scale_of_block(format_, Vector::value_of(kept_amax[kept]), encode_scale_);
      multipliers[kept] = scale.multiplier;
      stored[kept] = scale.stored;
      values[kept] = formats::scale_value(format_.scales, scale.stored, row_scale_);
    }
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      const int stage = first_stage + i;
      Vector vectors[kVectors];
      load(stage, vectors);
      Codes codes[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float x[Vector::kElements];
        vectors[v].unpack(x);
        codes[v] = encode(x, from_lane(multipliers[kept_of(v)], keeper_of(i, v)));
      }
      __syncwarp(); // all lanes have read the stage, where codes are stored next
      if (!dequantises_) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
          store_codes(ring_ + kScalesBytes + vector_of(stage, v) * kCodesOfVector, codes[v]);
      } else {
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
          store_decoded(stage, v, codes[v], from_lane(values[kept_of(v)], keeper_of(i, v)));
      }
    }
    if (dequantises_) return is_finite;
#pragma unroll
    for (int kept = 0; kept < kKept; ++kept) {
      const int block = kept_block(first_stage, kept);
      const int scale_bytes = scale_bytes_of(format_);
      store_scale(ring_ + block * scale_bytes, scale_bytes, has_block(block) ? stored[kept] : 0);
    }
    return is_finite;
  }

  template <typename WaitForStage>
  __device__ void dequantise_group(int first_stage, int codes_offset, const std::byte* scales,
                                   const WaitForStage& wait_for_stage) const {
    const int stages = min(kGroupStages, (elements_ + kStageElements - 1) / kStageElements - first_stage);
    float values[kKept];
#pragma unroll
    for (int kept = 0; kept < kKept; ++kept) {
      const int block = kept_block(first_stage, kept);
      const int scale_bytes = scale_bytes_of(format_);
      values[kept] =
          has_block(block)
              ? formats::scale_value(format_.scales, load_scale(scales + block * scale_bytes, scale_bytes), row_scale_)
              : 0.0f;
    }
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      const int stage = first_stage + i;
      wait_for_stage(stage);
      Codes codes[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        codes[v] = load_codes(ring_ + codes_offset + vector_of(stage, v) * kCodesOfVector);
      __syncwarp(); // all lanes have read the codes, over which elements are stored next
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        store_decoded(stage, v, codes[v], from_lane(values[kept_of(v)], keeper_of(i, v)));
    }
  }

  // The codes of a vector.
  struct Codes {
    uint32_t words[2];
  };
  __device__ static Codes encode(const float (&x)[Vector::kElements], float multiplier) {
    Codes codes{};
    if constexpr (Type::kBits == 8) {
#pragma unroll
      for (int i = 0; i < Vector::kElements; i += 4)
        codes.words[i / 4] = encode_four<Type>(x + i, multiplier, true);
    } else {
#pragma unroll
      for (int i = 0; i < Vector::kElements; ++i)
        codes.words[0] |= formats::encode_saturating<Type>(x[i] * multiplier) << (4 * i);
      if (multiplier == 0.0f) codes.words[0] = 0;
    }
    return codes;
  }
  __device__ static void decode(const Codes& codes, float scale, float (&x)[Vector::kElements]) {
    if constexpr (Type::kBits == 8) {
#pragma unroll
      for (int i = 0; i < Vector::kElements; i += 2) {
        const float2 two = decode_two<Type>(codes.words[i / 4] >> (8 * (i % 4)) & 0xffff);
        x[i] = two.x * scale;
        x[i + 1] = two.y * scale;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Vector::kElements; ++i)
        x[i] = formats::decode<Type>(codes.words[0] >> (4 * i)) * scale;
    }
  }
  __device__ void store_decoded(int stage, int i, const Codes& codes, float scale) const {
    float x[Vector::kElements];
    decode(codes, scale, x);
    Vector vector;
    vector.pack(x);
    vector.store(ring_ + vector_of(stage, i) * Vector::kBytes);
  }
  __device__ static void store_codes(std::byte* to, const Codes& codes) {
    if constexpr (kCodesOfVector == 8)
      *reinterpret_cast<uint2*>(to) = uint2{codes.words[0], codes.words[1]};
    else if constexpr (kCodesOfVector == 4)
      *reinterpret_cast<uint32_t*>(to) = codes.words[0];
    else
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(codes.words[0]);
  }
  __device__ static Codes load_codes(const std::byte* from) {
    if constexpr (kCodesOfVector == 8) {
      const uint2 words = *reinterpret_cast<const uint2*>(from);
      return {{words.x, words.y}};
    } else if constexpr (kCodesOfVector == 4) {
      return {{*reinterpret_cast<const uint32_t*>(from), 0}};
    } else {
      return {{*reinterpret_cast<const uint16_t*>(from), 0}};
    }
  }

  std::byte* ring_;
  WireFormat format_;
  int elements_ = 0;          // of the part
  bool dequantises_ = false;  // the elements, as a peer would get them, instead of codes
  float encode_scale_ = 1.0f; // of NV
  float row_scale_ = 1.0f;    // of NV
};

struct RingOutcome {
  TmaRowPipeline::State ring;
  bool is_done;
};
template <typename Row>
__device__ __noinline__ RingOutcome quantise_in_ring(const TmaRowPipeline::State ring, const WireFormat format,
                                                     const std::byte* row, int64_t hidden, const float* encode_scale,
                                                     const QuantisedPlaces to, unsigned lanes) {
  TmaRowPipeline pipeline(ring);
  const bool is_done = Row::quantise(pipeline, format, row, hidden, encode_scale, to, lanes);
  return {pipeline.state(), is_done};
}
template <typename Row>
__device__ __noinline__ TmaRowPipeline::State dequantise_in_ring(const TmaRowPipeline::State ring, const WireFormat format,
                                                                 const QuantisedSource from, int64_t hidden, std::byte* own,
                                                                 unsigned lanes) {
  TmaRowPipeline pipeline(ring);
  Row::dequantise(pipeline, format, from, hidden, own, lanes);
  return pipeline.state();
}

// Calls take(std::type_identity<Row>()) with the RingRow of the format.
template <typename T, typename Take>
__device__ __forceinline__ void with_ring_row(const WireFormat& format, const Take& take) {
  if (format.scaling == EPX_SCALING_NV)
    take(std::type_identity<RingRow<T, formats::E2M1, 16>>());
  else if (format.scaling != EPX_SCALING_MX)
    take(std::type_identity<RingRow<T, formats::E4M3, 128>>());
  else if (format.elements == EPX_FLOAT8_E5M2)
    take(std::type_identity<RingRow<T, formats::E5M2, 32>>());
  else
    take(std::type_identity<RingRow<T, formats::E4M3, 32>>());
}

// Returns whether all rows, whose addresses are OR-ed together, can go through the ring.
__device__ inline bool fits_ring(const WireFormat& format, int64_t hidden, uint64_t address_bits) {
  constexpr int64_t kBytes = 16; // of vectors and of bulk copies
  const int64_t elements = kBytes * elements_per_byte(format.elements);
  const bool is_aligned = (hidden & (elements - 1)) == 0 && address_bits % kBytes == 0;
  return __all_sync(~0u, is_aligned ? 1 : 0) != 0;
}

// Begins to quantise a row to the places of `lanes`, all of which have scales, or none. is_in_ring: it fits_ring(), and
// RingRow::begin() has been called.
template <typename T>
__device__ inline void begin_quantise_row_to(TmaRowPipeline& pipeline, const WireFormat& format, const std::byte* row,
                                             int64_t hidden, const float* encode_scale, const QuantisedPlaces& to,
                                             unsigned lanes, bool is_in_ring) {
  if (is_in_ring) {
    bool is_done = false;
    with_ring_row<T>(format, [&](auto of) {
      const RingOutcome outcome =
          quantise_in_ring<typename decltype(of)::type>(pipeline.state(), format, row, hidden, encode_scale, to, lanes);
      pipeline.go_on_from(outcome.ring);
      is_done = outcome.is_done;
    });
    if (is_done) return;
    pipeline.finish(); // what the ring has stored of the row comes first
  }
  const T* const elements = reinterpret_cast<const T*>(row);
  const float e = encode_scale_of<T, false>(format, elements, hidden, encode_scale);
  to.for_each_layout(lanes, [&](const ScaleLayout& layout, unsigned those) {
    quantise_row<T, false>(format, elements, hidden, e, layout, to.own, those);
  });
}

// Begins to quantise a row to the places of the lanes, at least one. Where a place has no scales, the row is dequantised again, to
// what a peer would make of it. pipeline.finish() ends it. meanwhile() runs before anything is stored, while the first loads are
// in flight. All lanes call this.
template <typename T, typename Meanwhile>
__device__ inline void begin_quantise_row(TmaRowPipeline& pipeline, const WireFormat& format, const std::byte* row,
                                          int64_t hidden, const float* encode_scale, const QuantisedPlaces& to,
                                          const Meanwhile& meanwhile) {
  const bool fits = fits_ring(format, hidden, reinterpret_cast<uint64_t>(row) | reinterpret_cast<uint64_t>(to.own.row));
  const auto begin = [&] {
    if (fits) RingRow<T, formats::E4M3, 128>::begin(pipeline, row, hidden); // alike in all formats
  };
  begin();
  meanwhile();
  const unsigned quantised = __ballot_sync(~0u, to.own.scales != nullptr ? 1 : 0);
  unsigned left = __ballot_sync(~0u, to.own.row != nullptr ? 1 : 0);
#pragma unroll 1
  while (left != 0) {
    const unsigned lanes = (left & quantised) != 0 ? left & quantised : left;
    begin_quantise_row_to<T>(pipeline, format, row, hidden, encode_scale, to, lanes, fits);
    left &= ~lanes;
    if (left != 0) begin();
  }
}

// Begins to dequantise a row, which lies in staging, to the places of the lanes, each time its weight. pipeline.finish() ends
// it. All lanes call this.
template <typename T, typename Weight>
__device__ inline void begin_dequantise_row(TmaRowPipeline& pipeline, const WireFormat& format, const QuantisedSource& from,
                                            int64_t hidden, std::byte* own, Weight weight) {
  const unsigned lanes = __ballot_sync(~0u, own != nullptr ? 1 : 0);
  if (lanes == 0) return;
  const uint64_t address_bits = reinterpret_cast<uint64_t>(from.row) | reinterpret_cast<uint64_t>(own);
  const bool is_aligned = fits_ring(format, hidden, address_bits);
  if constexpr (std::is_same_v<Weight, NoWeight>) {
    if (is_aligned) {
      with_ring_row<T>(format, [&](auto of) {
        pipeline.go_on_from(
            dequantise_in_ring<typename decltype(of)::type>(pipeline.state(), format, from, hidden, own, lanes));
      });
      return;
    }
    dequantise_row<T, false>(format, from, hidden, reinterpret_cast<T*>(own), weight, lanes);
  } else if (is_aligned) {
    dequantise_row<T, true>(format, from, hidden, reinterpret_cast<T*>(own), weight, lanes);
  } else {
    dequantise_row<T, false>(format, from, hidden, reinterpret_cast<T*>(own), weight, lanes);
  }
}

} // namespace epx::cuda
