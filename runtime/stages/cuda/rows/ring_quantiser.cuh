// SPDX-License-Identifier: Apache-2.0
// A warp quantises and dequantises a row that lies in the ring of its TmaRowPipeline, and bulk copies take it to its places. So a
// row is in flight without registers, its scales are computed once for all places, and a place costs the warp a few
// instructions. Rows are aligned to vectors here; quantised_row.cuh has the form for others.
//
// A part of the row, at most kStages stages of elements, is in the ring at a time. It is quantised in place: codes take at most
// half of the room of elements, so those of a stage, behind the scales, end before the first stage that is still to be read.
//
//   ring, before   | elements of stage 0 | of stage 1 | ...
//   ring, after    | scales | codes of stage 0 | of stage 1 | ...
//
#pragma once

#include "runtime/stages/cuda/rows/quantised_row.cuh"
#include "runtime/stages/cuda/rows/quantised_stage.cuh"
#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"

namespace epx::cuda {

// A row that is cut into stages, each a QuantisedStage.
template <typename Stage>
class RingRow {
  using Vector = typename Stage::Vector;

  static constexpr int kStages = TmaRowPipeline::kStages;
  static constexpr int kStageBytes = TmaRowPipeline::kStageBytes;
  static constexpr int64_t kElementBytes = kStageBytes / Stage::kElements;
  static constexpr int64_t kPartElements = kStages * Stage::kElements;
  static constexpr int kPieceStages = 4; // that are loaded together, and whose codes leave together

  static constexpr int kScalesBytes = 512; // before the codes
  static_assert(kStages * Stage::kBlocks * Stage::kMaxScaleBytes <= kScalesBytes);
  static_assert(kScalesBytes + Stage::kCodesBytes <= kStageBytes && 2 * Stage::kCodesBytes <= kStageBytes);
  static_assert(Stage::kBytes == kStageBytes && Stage::kBlocks % ScaleLayout::kPerWord == 0);

public:
  // Begins to load what is in the ring first, for quantise().
  __device__ static void begin(TmaRowPipeline& pipeline, const std::byte* row, int64_t hidden) {
    begin_part(pipeline, row, hidden, 0);
  }
  // Quantises the row, behind begin(), to the places of `lanes`. Returns false where an element is not finite: then the places
  // have anything, and nothing waits for a piece. given_encode_scale: of NV; NULL: the row's own.
  __device__ static bool quantise(TmaRowPipeline& pipeline, const WireFormat& format, const std::byte* row, int64_t hidden,
                                  const float* given_encode_scale, const QuantisedPlaces& to, unsigned lanes) {
    RingRow part{pipeline.stages(), format};
    const QuantisedPlace& own = to.own;
    part.dequantises_ = from_lane(own.scales, lowest_bit(lanes)) == nullptr;
    bool is_begun = true, is_filled = false, is_finite = true;
    if constexpr (Stage::kHasRowScale) {
      if (given_encode_scale != nullptr) {
        part.encode_scale_ = *given_encode_scale;
      } else {
        if (!find_encode_scale(pipeline, row, hidden, part.encode_scale_)) return false;
        is_begun = is_filled = hidden <= kPartElements;
      }
      part.row_scale_ = formats::nv_row_scale(part.encode_scale_);
    }
#pragma unroll 1
    for (int64_t first = 0; first < hidden; first += kPartElements) {
      part.elements_ = static_cast<int>(min(kPartElements, hidden - first));
      if (!is_begun) begin_part(pipeline, row, hidden, first);
      is_begun = false;
      uint32_t largest = 0;
      int stored = 0; // stages whose codes have left
#pragma unroll 1
      for (int stage = 0; stage < part.stages();) {
        if (!is_filled) wait_for_stage(pipeline, stage);
        part.quantise_stage(stage, largest);
        ++stage;
        // The wire would have nothing to do while all warps quantise whole rows, their first ones.
        if (stage < part.stages() && stage - stored < kPieceStages) continue;
        is_finite &= Stage::all_finite(largest);
        if (part.dequantises_ || !is_finite) continue;
        const int codes = min(stage * Stage::kElements, part.elements_) * Stage::kBits / 8 - stored * Stage::kCodesBytes;
        pipeline.begin_store_to_destinations(kScalesBytes + stored * Stage::kCodesBytes, codes, lanes,
                                             own.row + first * Stage::kBits / 8 + stored * Stage::kCodesBytes);
        stored = stage;
      }
      if (!is_finite) {
        fence_shared_before_bulk_copies(); // the next bulk loads come after the codes that this lane has stored in the ring
        return false;
      }
      if (part.dequantises_)
        pipeline.begin_store_to_destinations(0, part.bytes(), lanes, own.row + first * kElementBytes);
      else
        part.begin_store_scales(pipeline, first / Stage::kBlock, to, lanes);
    }
    if (own.row_scale != nullptr) *own.row_scale = part.row_scale_;
    return true;
  }

  // Dequantises a row in staging to the places of `lanes`. The codes of a part lie at the end of the ring, where each stage of
  // elements ends before the codes that are still to be read.
  __device__ static void dequantise(TmaRowPipeline& pipeline, const WireFormat& format, const QuantisedSource& from,
                                    int64_t hidden, std::byte* own, unsigned lanes) {
    constexpr int kCodesOffset = kStages * (kStageBytes - Stage::kCodesBytes);
    RingRow part{pipeline.stages(), format};
    part.row_scale_ = from.row_scale;
#pragma unroll 1
    for (int64_t first = 0; first < hidden; first += kPartElements) {
      part.elements_ = static_cast<int>(min(kPartElements, hidden - first));
      pipeline.begin_fill(from.row + first * Stage::kBits / 8, part.elements_ * Stage::kBits / 8, kCodesOffset,
                          kPieceStages * Stage::kCodesBytes);
      const std::byte* const scales = from.scales + first / Stage::kBlock * scale_bytes_of(format);
      typename Stage::Scales next = part.load_scales(0, scales);
#pragma unroll 1
      for (int stage = 0; stage < part.stages(); ++stage) {
        const typename Stage::Scales of_stage = next;
        next = part.load_scales(stage + 1, scales); // is in flight meanwhile
        wait_for_stage(pipeline, stage);
        part.dequantise_stage(stage, kCodesOffset, of_stage);
      }
      pipeline.begin_store_to_destinations(0, part.bytes(), lanes, own + first * kElementBytes);
    }
  }

private:
  __device__ RingRow(std::byte* ring, const WireFormat& format) : ring_(ring), format_(format) {}

  __device__ static int scale_bytes_of(const WireFormat& format) {
    return static_cast<int>(single_element_bytes(format.scales));
  }
  __device__ int64_t bytes() const {
    return elements_ * kElementBytes;
  }
  __device__ int stages() const {
    return (elements_ + Stage::kElements - 1) / Stage::kElements;
  }
  // Begins to load the part of a row that begins at element `first`. The elements that its last stage lacks are 0.
  __device__ static void begin_part(TmaRowPipeline& pipeline, const std::byte* row, int64_t hidden, int64_t first) {
    const auto bytes = static_cast<int>(min(kPartElements, hidden - first) * kElementBytes);
    pipeline.begin_fill(row + first * kElementBytes, bytes, 0, kPieceStages * kStageBytes);
    if (bytes % kStageBytes == 0) return;
#pragma unroll
    for (int i = 0; i < Stage::kVectors; ++i) // those of this lane, which alone reads them
      if (const int vector = Stage::vector_of(bytes / kStageBytes, i) * Vector::kBytes; vector >= bytes)
        Vector{}.store(pipeline.stages() + vector);
    fence_shared_before_bulk_copies(); // later bulk loads come after these zeros
  }
  __device__ static void wait_for_stage(TmaRowPipeline& pipeline, int stage) {
    if (stage % kPieceStages == 0) pipeline.wait_for_piece(stage / kPieceStages);
  }

  __device__ bool has_block(int block) const {
    return block * Stage::kBlock < elements_;
  }
  __device__ void load(int stage, Vector (&vectors)[Stage::kVectors]) const {
#pragma unroll
    for (int i = 0; i < Stage::kVectors; ++i)
      vectors[i].load(ring_ + Stage::vector_of(stage, i) * Vector::kBytes);
    __syncwarp(); // all lanes have read the stage, where codes are stored next
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
      for (int stage = 0; stage < part.stages(); ++stage) {
        wait_for_stage(pipeline, stage);
        Vector vectors[Stage::kVectors];
        part.load(stage, vectors);
#pragma unroll
        for (int i = 0; i < Stage::kBlocksOfLane; ++i)
          largest = Vector::max_of(largest, Stage::amax_in_block(vectors, i));
      }
    }
    encode_scale = formats::nv_encode_scale(Vector::value_of(__reduce_max_sync(~0u, Vector::largest_of(largest))));
    return Stage::all_finite(largest);
  }

  // Quantises a stage. `largest` becomes the largest magnitude of what it was and of the lane's elements.
  __device__ void quantise_stage(int stage, uint32_t& largest) const {
    Vector vectors[Stage::kVectors];
    load(stage, vectors);
    const typename Stage::Quantised quantised = Stage::quantise(format_, encode_scale_, vectors, largest);
    if (dequantises_) {
      store_decoded(stage, quantised);
      return;
    }
#pragma unroll
    for (int i = 0; i < Stage::kVectors; ++i)
      Stage::store_codes(ring_ + kScalesBytes + Stage::vector_of(stage, i) * Stage::kCodesOfVector, quantised.codes[i]);
    const int scale_bytes = scale_bytes_of(format_);
#pragma unroll
    for (int i = 0; i < Stage::kBlocksOfLane; ++i) {
      const int block = Stage::block_of(stage, i);
      if (Stage::is_first_of_block())
        store_scale(ring_ + block * scale_bytes, scale_bytes, has_block(block) ? quantised.scales.stored[i] : 0);
    }
  }

  // Begins to store the part's scales, of which block `first_block` of the row has the first, to the places of `lanes`. Where they
  // lie behind each other and are aligned, bulk copies take them to one place, or to any number if they are many; else the warp is
  // faster.
  __device__ void begin_store_scales(const TmaRowPipeline& pipeline, int64_t first_block, const QuantisedPlaces& to,
                                     unsigned lanes) const {
    constexpr int kWord = ScaleLayout::kPerWord;
    constexpr int kFewScaleBytes = 2 * kWarp * static_cast<int>(sizeof(uint32_t)); // which the warp stores in two rounds
    const int scales = (elements_ + Stage::kBlock - 1) / Stage::kBlock;
    const int bytes = scales * scale_bytes_of(format_);
    to.for_each_layout(lanes, [&](const ScaleLayout& layout, unsigned those) {
      std::byte* const own = to.own.scales + layout.place_offset(first_block);
      const bool has_place = (those >> lane() & 1) != 0;
      const bool is_aligned = !has_place || (reinterpret_cast<uint64_t>(own) | static_cast<unsigned>(bytes)) % 16 == 0;
      const bool pays = (those & (those - 1)) == 0 || bytes > kFewScaleBytes;
      if (pays && layout.layout == EPX_SCALES_ROWS && __all_sync(~0u, is_aligned ? 1 : 0) != 0)
        pipeline.begin_store_to_destinations(0, bytes, those, own);
      else // and the fill, which lies behind them
        copy_scales(pipeline.stages(), first_block, layout.has_fill() ? (scales + kWord - 1) / kWord * kWord : scales,
                    layout, to.own.scales, those, NoWeight{});
    });
  }

  __device__ typename Stage::Scales load_scales(int stage, const std::byte* scales) const {
    typename Stage::Scales loaded;
    const int scale_bytes = scale_bytes_of(format_);
#pragma unroll
    for (int i = 0; i < Stage::kBlocksOfLane; ++i) {
      const int block = Stage::block_of(stage, i);
      loaded.stored[i] = has_block(block) ? load_scale(scales + block * scale_bytes, scale_bytes) : 0;
    }
    return loaded;
  }
  __device__ void dequantise_stage(int stage, int codes_offset, const typename Stage::Scales& scales) const {
    typename Stage::Quantised quantised;
    quantised.scales = scales;
#pragma unroll
    for (int i = 0; i < Stage::kVectors; ++i)
      quantised.codes[i] = Stage::load_codes(ring_ + codes_offset + Stage::vector_of(stage, i) * Stage::kCodesOfVector);
    __syncwarp(); // all lanes have read the codes, over which elements are stored next
    store_decoded(stage, quantised);
  }
  __device__ void store_decoded(int stage, const typename Stage::Quantised& quantised) const {
#pragma unroll
    for (int i = 0; i < Stage::kVectors; ++i)
      Stage::decode(format_, row_scale_, quantised, i).store(ring_ + Stage::vector_of(stage, i) * Vector::kBytes);
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
    with_quantised_stage<T>(format, [&](auto of) {
      const RingOutcome outcome = quantise_in_ring<RingRow<typename decltype(of)::type>>(pipeline.state(), format, row,
                                                                                         hidden, encode_scale, to, lanes);
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
    if (fits) RingRow<QuantisedStage<T, formats::E4M3, 128>>::begin(pipeline, row, hidden); // alike in all formats
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
      with_quantised_stage<T>(format, [&](auto of) {
        pipeline.go_on_from(
            dequantise_in_ring<RingRow<typename decltype(of)::type>>(pipeline.state(), format, from, hidden, own, lanes));
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
