// SPDX-License-Identifier: Apache-2.0
// One warp copies, scales and sums rows of elements, and computes dot products of two, with the arithmetic that the contract
// fixes. Each operation has a form for rows that are aligned to 16 bytes, and one for other rows. Aligned rows are copied, and
// scaled, through a TmaRowPipeline. Sums, dot products of aligned rows, and copies and scaled copies of unaligned rows read
// through a RowReader, or a ListReader; other forms use plain loads and stores.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/device/fragment.cuh"
#include "base/device/warp.cuh"
#include "runtime/stages/cuda/rows/fragments.cuh"
#include "runtime/stages/cuda/rows/row_reader.cuh"
#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"

namespace epx::cuda {

template <typename Unit>
__device__ inline void copy_units_to_destinations(const std::byte* from, int64_t bytes, unsigned lanes, std::byte* to) {
  constexpr int kDepth = 4; // loads in flight at a time
  const auto* source = reinterpret_cast<const Unit*>(from);
  const int64_t units = bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t first = 0; first < units; first += kDepth * kWarp) { // the same in all lanes
    Unit values[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
      if (const int64_t unit = first + i * kWarp + lane(); unit < units) values[i] = source[unit];
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      auto* const target = reinterpret_cast<Unit*>(from_lane(to, lowest_bit(left)));
#pragma unroll
      for (int i = 0; i < kDepth; ++i)
        if (const int64_t unit = first + i * kWarp + lane(); unit < units) target[unit] = values[i];
    }
  }
}

// Returns whether rows of `row_bytes` bytes at these addresses, OR-ed together, cannot be moved by 16-byte vectors.
__host__ __device__ inline bool is_unaligned(uint64_t address_bits, int64_t row_bytes) {
  return (address_bits | static_cast<uint64_t>(row_bytes)) % sizeof(uint4) != 0;
}

// Multi-destination copy: a warp loads `bytes` bytes once and stores them to the address that each lane passes; a lane that
// passes NULL has none. It uses the widest unit that all addresses and the size allow.
__device__ __noinline__ inline void copy_row_to_destinations(const std::byte* from, int64_t bytes, std::byte* to) {
  const unsigned lanes = __ballot_sync(~0u, to != nullptr ? 1 : 0);
  if (lanes == 0) return;
  const uint64_t bits = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(bytes);
  if (__all_sync(~0u, bits % 16 == 0 ? 1 : 0) != 0)
    copy_units_to_destinations<uint4>(from, bytes, lanes, to);
  else if (__all_sync(~0u, bits % 4 == 0 ? 1 : 0) != 0)
    copy_units_to_destinations<uint32_t>(from, bytes, lanes, to);
  else if (__all_sync(~0u, bits % 2 == 0 ? 1 : 0) != 0)
    copy_units_to_destinations<uint16_t>(from, bytes, lanes, to);
  else
    copy_units_to_destinations<uint8_t>(from, bytes, lanes, to);
}

// Stores those elements of a lane's fragment that the row has. If !kIsAligned, fragments begin where the vectors of `to` do,
// and the first and the last one may have fewer elements.
template <bool kIsAligned, typename T>
__device__ inline void store_fragment(T* to, int64_t h, int64_t hidden, const Fragment<T>& fragment) {
  if (kIsAligned ? h < hidden : h >= 0 && h + kFragment <= hidden)
    store_vector(to + h, fragment);
  else if (!kIsAligned)
    store_elements(to, h, hidden, fragment);
}

// How many elements lie between the last address before `to` that is aligned to 16 bytes, and `to`.
template <typename T>
__device__ inline int lead_of(const T* to) {
  return static_cast<int>(reinterpret_cast<uint64_t>(to) % kAsyncCopyBytes / sizeof(T));
}

// to = change(from), by vectors of `to` although neither row is aligned. `to` may be `from` itself. `shared`: see RowReader.
template <typename T, typename Change>
__device__ inline void change_unaligned_row(std::byte* shared, const T* from, int64_t hidden, T* to, const Change& change) {
  using Reader = RowReader<T, false>;
  const int lead = lead_of(to);
  Reader reader(shared, hidden, lead);
  if (lane() == 0) reader.set(0, {from, nullptr, 0.0f});
  reader.begin(1);
#pragma unroll 1
  for (int h_tile = 0; h_tile < reader.h_tiles(); ++h_tile) {
    typename Reader::Fragments fragments;
    reader.next(0, fragments);
#pragma unroll
    for (int i = 0; i < Reader::kWarpTiles; ++i) {
      const int64_t h = int64_t{h_tile} * Reader::kHTile + i * kWarpTile + lane() * kFragment - lead;
      store_fragment<false>(to, h, hidden, change(fragments[i]));
    }
  }
  reader.end();
}

// Does what copy_row_to_destinations() does, by vectors where addresses and size are even. `stages`: those of the warp's
// pipeline.
__device__ __noinline__ inline void copy_unaligned_row_to_destinations(std::byte* stages, const std::byte* from,
                                                                       int64_t bytes, std::byte* to) {
  using Unit = __half;
  const uint64_t bits = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(bytes);
  if (__all_sync(~0u, bits % sizeof(Unit) == 0 ? 1 : 0) == 0) {
    copy_row_to_destinations(from, bytes, to);
    return;
  }
  TmaRowPipeline::wait_for_idle_stages();
  for (unsigned left = __ballot_sync(~0u, to != nullptr ? 1 : 0); left != 0; left &= left - 1)
    change_unaligned_row(stages, reinterpret_cast<const Unit*>(from), bytes / static_cast<int64_t>(sizeof(Unit)),
                         reinterpret_cast<Unit*>(from_lane(to, lowest_bit(left))),
                         [](const Fragment<Unit>& fragment) { return fragment; });
}

// Copies a row likewise, through bulk copies where the alignment allows them; these are only begun, and pipeline.finish() ends
// them. meanwhile() runs while the first loads are in flight; without a destination it may run or not.
template <typename Meanwhile = Nothing>
__device__ inline void begin_copy_row_to_destinations(TmaRowPipeline& pipeline, const std::byte* from, int64_t bytes,
                                                      std::byte* to, const Meanwhile& meanwhile = {}) {
  const uint64_t address_bits = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
  if (__all_sync(~0u, is_unaligned(address_bits, bytes) ? 0 : 1) != 0) {
    pipeline.begin_copy_to_destinations(from, bytes, to, meanwhile);
  } else {
    meanwhile();
    copy_unaligned_row_to_destinations(pipeline.stages(), from, bytes, to);
  }
}

__device__ __noinline__ inline void zero_row(std::byte* to, int64_t bytes) {
  if (!is_unaligned(reinterpret_cast<uint64_t>(to), bytes)) {
    for (int64_t i = lane(); i < bytes / 16; i += kWarp)
      reinterpret_cast<uint4*>(to)[i] = uint4{0, 0, 0, 0};
    return;
  }
  for (int64_t i = lane(); i < bytes; i += kWarp)
    to[i] = std::byte{0};
}

// Tests overwrite staging with this once it has been used.
__device__ inline void scribble_row(std::byte* row, int64_t bytes) {
  __syncwarp(); // all lanes have read it
  for (int64_t i = lane(); i < bytes; i += kWarp)
    row[i] = std::byte{0x5a};
}

// ---- Scaled copies ----

template <typename T>
__device__ inline Fragment<T> scaled(float factor, const Fragment<T>& fragment) {
  float x[kFragment];
  unpack(fragment, x);
#pragma unroll
  for (float& value : x)
    value = __fmul_rn(factor, value);
  return pack<T>(x);
}

// The lanes' destinations from the last to the first one, which may be `from` itself. `stages`: those of the warp's pipeline.
template <typename T>
__device__ __noinline__ void scale_unaligned_row_to_destinations(std::byte* stages, const T* from, int64_t hidden,
                                                                 unsigned lanes, T* to, float weight) {
  TmaRowPipeline::wait_for_idle_stages();
  for (unsigned left = lanes; left != 0; left &= ~(1u << highest_bit(left))) {
    const int target_lane = highest_bit(left);
    const float factor = from_lane(weight, target_lane);
    change_unaligned_row(stages, from, hidden, from_lane(to, target_lane),
                         [factor](const Fragment<T>& fragment) { return scaled(factor, fragment); });
  }
}

// For each lane whose `to` is not NULL: to = round(the lane's weight * from). The first `to` may be `from` itself.
template <typename T>
__device__ inline void scale_row_to_destinations(TmaRowPipeline& pipeline, const T* from, int64_t hidden, T* to,
                                                 float weight) {
  const unsigned lanes = __ballot_sync(~0u, to != nullptr ? 1 : 0);
  if (lanes == 0) return;
  const uint64_t bits = reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to);
  if (__all_sync(~0u, is_vectorizable(bits, hidden) ? 1 : 0) == 0) {
    scale_unaligned_row_to_destinations(pipeline.stages(), from, hidden, lanes, to, weight);
    return;
  }
  constexpr int kWarpTiles = TmaRowPipeline::kStageBytes / static_cast<int>(kWarp * sizeof(Fragment<T>));
  pipeline.read(reinterpret_cast<const std::byte*>(from), hidden * static_cast<int64_t>(sizeof(T)),
                [&](int64_t offset, const std::byte* data, uint32_t data_bytes) {
                  Fragment<T> fragments[kWarpTiles];
#pragma unroll
                  for (int i = 0; i < kWarpTiles; ++i)
                    fragments[i] = load_vector<T>(data + offset_of_fragment<T>(i));
#pragma unroll 1
                  for (unsigned left = lanes; left != 0; left &= left - 1) {
                    const int target_lane = lowest_bit(left);
                    const float factor = from_lane(weight, target_lane);
                    std::byte* const target = reinterpret_cast<std::byte*>(from_lane(to, target_lane)) + offset;
#pragma unroll
                    for (int i = 0; i < kWarpTiles; ++i)
                      if (const uint32_t at = offset_of_fragment<T>(i); at < data_bytes)
                        store_vector(target + at, scaled(factor, fragments[i]));
                  }
                });
}

// ---- Products ----

// acc += a * b in the first `count` elements; an absent element takes no step.
template <typename T>
__device__ inline void add_products(float (&acc)[kFragment], const Fragment<T>& a, const Fragment<T>& b,
                                    int count = kFragment) {
  float x[kFragment], y[kFragment];
  unpack(a, x);
  unpack(b, y);
#pragma unroll
  for (int i = 0; i < kFragment; ++i)
    if (i < count) acc[i] = __fmaf_rn(x[i], y[i], acc[i]);
}

// Returns the dot product of grad and x, by the fixed tree (reduce_tree); and to = round(weight * grad), or the same bits if
// !is_weighted. `to` may be `grad` itself.
template <typename T>
__device__ __noinline__ float scale_and_multiply_elements(const T* grad, const T* x, int64_t hidden, T* to,
                                                          bool is_weighted, float weight) {
  float acc[kFragment] = {};
  for (int64_t h = lane() * kFragment; h < hidden; h += kWarpTile) {
    const Fragment<T> fragment = load_elements(grad, h, hidden);
    add_products(acc, fragment, load_elements(x, h, hidden), static_cast<int>(min(int64_t{kFragment}, hidden - h)));
    store_elements(to, h, hidden, is_weighted ? scaled(weight, fragment) : fragment);
  }
  __syncwarp(); // all lanes have read grad, which the caller may overwrite next
  return reduce_tree(acc);
}

// The same for the first `count` of the rows x of the lanes: lane i passes x_i, its weight and where the scaled gradient goes,
// and gets the product. The gradient's row is read once beside all of them. The `to` of one lane may be `grad` itself.
// `shared`: see RowReader. Nothing waits for the loads of the weights before the reading has begun.
constexpr int kMaxProducts = 6; // as many as registers hold the accumulators of
template <typename T>
__device__ inline float scale_and_multiply(std::byte* shared, const T* grad, const T* x, int count, int64_t hidden, T* to,
                                           bool is_weighted, float weight) {
  using Reader = RowReader<T, true>;
  Reader reader(shared, hidden);
  if (lane() < count) reader.set(1 + lane(), {x, to, 0.0f});
  if (lane() == 0) reader.set(0, {grad, nullptr, 0.0f});
  reader.begin(1 + count);
  if (lane() < count) reader.set_weight(1 + lane(), weight);
  __syncwarp(); // the weights are there
  float acc[kMaxProducts][kFragment] = {};
#pragma unroll 1
  for (int h_tile = 0; h_tile < reader.h_tiles(); ++h_tile) {
    typename Reader::Fragments grads, fragments;
    reader.next(0, grads);
    const int64_t h = int64_t{h_tile} * Reader::kHTile + lane() * kFragment;
    const bool is_whole = int64_t{h_tile + 1} * Reader::kHTile <= hidden;
#pragma unroll
    for (int i = 0; i < kMaxProducts; ++i) {
      if (i >= count) break;
      reader.next(1 + i, fragments);
      const auto target = reader[1 + i]; // a copy: a store to target.to might change the list, as far as the compiler knows
      T* const to_h = target.to + h;
      if (is_whole && is_weighted) { // no branches
#pragma unroll
        for (int warp_tile = 0; warp_tile < Reader::kWarpTiles; ++warp_tile) {
          add_products(acc[i], grads[warp_tile], fragments[warp_tile]);
          store_vector(to_h + warp_tile * kWarpTile, scaled(target.weight, grads[warp_tile]));
        }
        continue;
      }
#pragma unroll
      for (int warp_tile = 0; warp_tile < Reader::kWarpTiles; ++warp_tile) {
        if (h + warp_tile * kWarpTile >= hidden) continue;
        add_products(acc[i], grads[warp_tile], fragments[warp_tile]);
        store_vector(to_h + warp_tile * kWarpTile,
                     is_weighted ? scaled(target.weight, grads[warp_tile]) : grads[warp_tile]);
      }
    }
  }
  reader.end();
  float own_product = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxProducts; ++i) {
    if (i >= count) break;
    if (const float product = reduce_tree(acc[i]); lane() == i) own_product = product;
  }
  return own_product;
}

// ---- Sums ----

// These rows are summed in order, each multiplied by its weight. The first num_inner rows are this rank's own: they are summed
// among themselves and rounded to T, and this partial sum enters the sum of the others before the own_position-th of those.
template <typename T>
struct SumTerms {
  WarpList<const T*> rows;
  WarpList<float> weights;
  int num_inner = 0;
  int own_position = 0;
  uint64_t address_bits = 0; // low 4 bits 0: all rows are aligned; their addresses, or their base and size, OR-ed together

  __device__ int size() const { return rows.size(); }
  __device__ void append(const T* row, float weight = 1.0f) {
    address_bits |= reinterpret_cast<uint64_t>(row);
    rows.append(row);
    weights.append(weight);
  }
};

using FirstStep = std::true_type;
using NextStep = std::false_type;

// Takes one step of a sum, acc = fma(weight, x, acc), where acc is 0 in the first step. A sum without weights passes 1, and
// 1 * x + acc equals x + acc.
template <typename T, bool kIsFirst = false>
__device__ inline void add_word(float* acc, uint32_t word, float weight, std::bool_constant<kIsFirst> /*step*/ = {}) {
  float x[kElementsPerWord<T>];
  unpack_word<T>(word, x);
#pragma unroll
  for (int i = 0; i < kElementsPerWord<T>; ++i)
    acc[i] = __fmaf_rn(weight, x[i], kIsFirst ? 0.0f : acc[i]);
}

// The sum so far of a lane's fragments, at the same elements of all rows.
template <typename T, int kFragments>
struct FragmentSums {
  float acc[kFragments][kFragment] = {};

  template <typename Step>
  __device__ void add(int i, const Fragment<T>& fragment, float weight, Step step) {
#pragma unroll
    for (int word = 0; word < kFragment / kElementsPerWord<T>; ++word)
      add_word<T>(acc[i] + word * kElementsPerWord<T>, fragment.words[word], weight, step);
  }
  template <typename Step>
  __device__ void add(const Fragment<T> (&fragments)[kFragments], float weight, Step step) {
#pragma unroll
    for (int i = 0; i < kFragments; ++i)
      add(i, fragments[i], weight, step);
  }
  __device__ Fragment<T> rounded(int i) const {
    return pack<T>(acc[i]);
  }
};

// How partial sums enter a sum: those of peers are rows, as those of this rank are, and this rank's own one is rounded to T as
// theirs have been. sum_h_tile() takes another policy where they travel otherwise.
template <typename T>
struct RowPartials {
  template <int kFragments>
  using Own = Fragment<T>[kFragments];

  template <int kFragments>
  __device__ static void round(const FragmentSums<T, kFragments>& sums, Own<kFragments>& own) {
#pragma unroll
    for (int i = 0; i < kFragments; ++i)
      own[i] = sums.rounded(i);
  }
  template <int kFragments>
  __device__ static void add(FragmentSums<T, kFragments>& sums, const Own<kFragments>& own) {
    sums.add(own, 1.0f, NextStep());
  }
  // `term` is one of a peer.
  template <typename Sums, typename AddTerm>
  __device__ static void add_peer(Sums& sums, int term, const AddTerm& add_term) {
    add_term(sums, term, NextStep());
  }
};

// Returns the sum of the terms, of which there is at least one, at a lane's fragments of an h-tile, before it is rounded.
// add_term(sums, term, step) takes the step of a term, one term after the other. Without kHasInner, num_inner is 0. With
// kHasFirstStep the first step has code of its own, which spares setting the accumulators to 0; where kernels have more kinds
// of sums, it made them no faster.
template <bool kHasInner, bool kHasFirstStep, int kFragments, typename T, typename AddTerm,
          typename Partials = const RowPartials<T>>
__device__ __forceinline__ auto sum_h_tile(const SumTerms<T>& terms, const AddTerm& add_term, Partials&& partials = {}) {
  static_assert(!(kHasInner && kHasFirstStep));
  FragmentSums<T, kFragments> sums;
  if constexpr (kHasFirstStep) add_term(sums, 0, FirstStep());
  typename std::remove_reference_t<Partials>::template Own<kHasInner ? kFragments : 1> inner = {};
  if constexpr (kHasInner) {
#pragma unroll 1
    for (int term = 0; term < terms.num_inner; ++term)
      add_term(sums, term, NextStep());
    if (terms.num_inner > 0) {
      partials.round(sums, inner);
      sums = {};
    }
  }
#pragma unroll 1
  for (int term = kHasFirstStep ? 1 : terms.num_inner;; ++term) {
    if constexpr (kHasInner)
      if (terms.num_inner > 0 && term - terms.num_inner == terms.own_position) partials.add(sums, inner);
    if (term == terms.size()) break;
    partials.add_peer(sums, term, add_term);
  }
  return sums;
}

// Adds the next h-tile of a reader, which is one of the term's row, with the term's weight.
template <bool kIsAligned, typename T, typename Sums, typename Step>
__device__ __forceinline__ void add_next(RowReader<T, kIsAligned>& reader, const SumTerms<T>& /*terms*/, Sums& sums,
                                         int term, Step step) {
  typename RowReader<T, kIsAligned>::Fragments fragments;
  reader.next(term, fragments);
  sums.add(fragments, reader[term].weight, step);
}
template <int kTile, typename T, typename Sums, typename Step>
__device__ __forceinline__ void add_next(ListReader<T, kTile>& reader, const SumTerms<T>& terms, Sums& sums, int term,
                                         Step step) {
  reader.next();
  const float weight = from_lane(terms.weights.own(0), term);
#pragma unroll
  for (int i = 0; i < kTile; ++i)
    sums.add(i, reader.fragment(i), weight, step);
}

// Begins to read the first `num_rows` rows of the terms.
template <bool kIsAligned, typename T>
__device__ __forceinline__ void begin_terms(RowReader<T, kIsAligned>& reader, const SumTerms<T>& terms, int num_rows) {
#pragma unroll
  for (int first = 0; first <= kWarp; first += kWarp)
    if (terms.rows.has_own(first)) reader.set(first + lane(), {terms.rows.own(first), nullptr, terms.weights.own(first)});
  reader.begin(num_rows);
}

template <bool kHasInner, bool kIsAligned, typename T>
__device__ __forceinline__ void sum_fragments(std::byte* shared, const SumTerms<T> terms, T* to, int64_t hidden) {
  using Reader = RowReader<T, kIsAligned>;
  const int lead = kIsAligned ? 0 : lead_of(to);
  Reader reader(shared, hidden, lead);
  begin_terms(reader, terms, terms.size());
#pragma unroll 1
  for (int h_tile = 0; h_tile < reader.h_tiles(); ++h_tile) {
    const auto sums = sum_h_tile<kHasInner, false, Reader::kWarpTiles>(
        terms, [&](auto& of_terms, int term, auto step) { add_next(reader, terms, of_terms, term, step); });
#pragma unroll
    for (int i = 0; i < Reader::kWarpTiles; ++i) {
      const int64_t h = int64_t{h_tile} * Reader::kHTile + i * kWarpTile + lane() * kFragment - lead;
      store_fragment<kIsAligned>(to, h, hidden, sums.rounded(i));
    }
  }
  reader.end();
}

// This does the same for the rows that are the next ones of a ListReader.
template <bool kHasInner, bool kHasFirstStep, typename Reader, typename T>
__device__ __forceinline__ void sum_listed_rows(Reader& reader, const SumTerms<T>& terms, T* to, int64_t hidden) {
  constexpr int kFragments = Reader::kWarpTiles;
  T* target = to + lane() * kFragment;
  const T* const end = to + hidden;
#pragma unroll 1
  for (int h_tile = Reader::h_tiles(hidden); h_tile > 0; --h_tile, target += Reader::kHTile) {
    const auto sums = sum_h_tile<kHasInner, kHasFirstStep, kFragments>(
        terms, [&](auto& of_terms, int term, auto step) { add_next(reader, terms, of_terms, term, step); });
#pragma unroll
    for (int i = 0; i < kFragments; ++i)
      if (Reader::kHasWholeTiles || target + i * kWarpTile < end) store_vector(target + i * kWarpTile, sums.rounded(i));
  }
}

template <bool kHasInner, typename T>
__device__ __noinline__ void sum_unaligned_fragments(std::byte* shared, const SumTerms<T> terms, T* to, int64_t hidden) {
  sum_fragments<kHasInner, false>(shared, terms, to, hidden);
}

template <bool kHasInner, bool kByList, typename T>
__device__ __forceinline__ void sum_aligned_rows(std::byte* shared, const SumTerms<T>& terms, T* to, int64_t hidden) {
  if constexpr (kByList) {
    using Reader = ShortTileReader<T>;
    if (Reader::takes(hidden) && terms.size() <= kWarp) {
      Reader reader(shared, terms.rows.own(0), terms.size(), hidden);
      sum_listed_rows<kHasInner, false>(reader, terms, to, hidden);
      reader.end();
      return;
    }
  }
  sum_fragments<kHasInner, true>(shared, terms, to, hidden);
}

// to = round(the sum of terms), by the contract's rules. One warp computes it; `to` is none of the rows. With kByList a
// ShortTileReader reads the rows where takes(hidden) is true and there are at most 32 of them.
template <bool kHasInner, bool kByList = false, typename T>
__device__ inline void sum_rows(TmaRowPipeline& pipeline, const SumTerms<T>& terms, T* to, int64_t hidden) {
  if (terms.size() == 0)
    zero_row(reinterpret_cast<std::byte*>(to), hidden * static_cast<int64_t>(sizeof(T)));
  else if (is_vectorizable(terms.address_bits | reinterpret_cast<uint64_t>(to), hidden))
    sum_aligned_rows<kHasInner, kByList>(pipeline.begin_generic(), terms, to, hidden);
  else
    sum_unaligned_fragments<kHasInner>(pipeline.begin_generic(), terms, to, hidden);
}

} // namespace epx::cuda
