// SPDX-License-Identifier: Apache-2.0
// QuantisedSums is the policy of Gather for partial sums that travel quantised from float32 (BLOCK128, MX). The sum of this
// rank's own rows is quantised and dequantised, as those of its peers. Own rows come through a row reader, and the peers' sums
// straight into registers, of which they take few.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/stages/cuda/gather/gather_rows.cuh"
#include "runtime/stages/cuda/rows/quantised_fragment.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"

namespace epx::cuda {

// The position of a lane's first fragment in the first h-tile of a part of a row.
__device__ inline uint32_t first_position() {
  return static_cast<uint32_t>(lane() * kFragment);
}

// Returns the codes of a sum at position h of a part.
template <typename T, int kFragments>
__device__ inline QuantisedFragments<kFragments> quantise_sums(const WirePart& part, uint32_t h,
                                                               FragmentSums<T, kFragments>& sums) {
  if (part.left(h - first_position()) < kFragments * kWarpTile) { // the same in all lanes
#pragma unroll
    for (int i = 0; i < kFragments; ++i)
#pragma unroll
      for (int element = 0; element < kFragment; ++element)
        if (i * kWarpTile + element >= part.left(h)) sums.acc[i][element] = 0.0f; // a reader leaves it undefined
  }
  return quantise_fragments(part.format(), sums.acc);
}

// A policy of sum_h_tile, as RowPartials: the terms behind the inner ones are rows in staging, which the peers have quantised. The
// loads of the next one are in flight while one is added.
template <typename T, int kFragments>
class QuantisedPartials {
public:
  template <int>
  using Own = QuantisedFragments<kFragments>;

  __device__ QuantisedPartials(const WirePart& part, const SumTerms<T>& terms) : part_(part), terms_(terms) {
    if (terms.num_inner < terms.size()) load_next(terms.num_inner, h_);
  }

  __device__ void round(FragmentSums<T, kFragments>& sums, QuantisedFragments<kFragments>& own) const {
    own = quantise_sums(part_, h_, sums);
  }
  __device__ void add(FragmentSums<T, kFragments>& sums, const QuantisedFragments<kFragments>& own) const {
    add_quantised(part_.format(), own, sums.acc);
  }
  template <typename AddTerm>
  __device__ void add_peer(FragmentSums<T, kFragments>& sums, int term, const AddTerm& /*add_term*/) {
    const QuantisedFragments<kFragments> peer = next_;
    if (const bool is_last = term + 1 == terms_.size(); !is_last || part_.left(h_ - first_position()) > kHTile)
      load_next(is_last ? terms_.num_inner : term + 1, is_last ? h_ + kHTile : h_);
    add_quantised(part_.format(), peer, sums.acc);
  }
  // The position in the h-tile that is summed.
  __device__ uint32_t h() const { return h_; }
  __device__ void advance() { h_ += kHTile; }

private:
  static constexpr int kHTile = kFragments * kWarpTile;

  __device__ void load_next(int term, uint32_t h) {
    next_ = part_.load<kFragments>(reinterpret_cast<const std::byte*>(terms_.rows[static_cast<unsigned>(term)]), h);
  }

  const WirePart& part_;
  const SumTerms<T>& terms_;
  uint32_t h_ = first_position();
  QuantisedFragments<kFragments> next_{};
};

// Sums the rows of a reader. To a row in staging: the terms are own rows, and the codes of their sum are stored. To a row of T: the
// sum of the terms is stored.
template <bool kIsAligned, typename Reader, typename T, typename To>
__device__ __forceinline__ void sum_by_reader(Reader& reader, const SumTerms<T>& terms, const WirePart& part, To* to) {
  constexpr int kFragments = Reader::kWarpTiles;
  const auto add_term = [&](auto& sums, int term, auto step) { add_next(reader, terms, sums, term, step); };
  const auto has_h_tile = [&](uint32_t h) { return part.left(h - first_position()) > 0; }; // the same in all lanes
  if constexpr (std::is_same_v<To, std::byte>) {
#pragma unroll 1
    for (uint32_t h = first_position(); has_h_tile(h); h += Reader::kHTile) {
      auto sums = sum_h_tile<false, false, kFragments>(terms, add_term);
      part.store(to, h, quantise_sums(part, h, sums));
    }
  } else {
    QuantisedPartials<T, kFragments> partials(part, terms);
    T* target = to + first_position();
#pragma unroll 1
    for (; has_h_tile(partials.h()); partials.advance(), target += Reader::kHTile) {
      const auto sums = sum_h_tile<true, false, kFragments>(terms, add_term, partials);
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        if constexpr (!kIsAligned)
          store_elements(target + i * kWarpTile, 0, part.left(partials.h()) - i * kWarpTile, sums.rounded(i));
        else if (i * kWarpTile < part.left(partials.h()))
          store_vector(target + i * kWarpTile, sums.rounded(i));
      }
    }
  }
  reader.end();
}

// Also for aligned rows, if there are too many for a list. `num_rows`: those of this rank, which come first.
template <typename T, typename To>
__device__ __noinline__ void sum_unaligned_by_reader(std::byte* shared, const SumTerms<T> terms, int num_rows,
                                                     const WirePart part, To* to) {
  RowReader<T, false> reader(shared, part.size());
  begin_terms(reader, terms, num_rows);
  sum_by_reader<false>(reader, terms, part, to);
}

template <typename T>
class QuantisedSums {
public:
  static constexpr bool kTakesExact = false, kTakesRankMajor = true;

  __device__ explicit QuantisedSums(const MovementCall& call) : call_(call) {}

  // A part of a row in staging is found from its begin on.
  __device__ RowSplits staged(const RowSplits& split) const { return {split.index, split.count, 0, call_.hidden}; }
  __device__ void send(TmaRowPipeline& pipeline, const SumTerms<T>& terms, T* to, const RowSplits& split) const {
    sum_terms(pipeline, terms, terms.size(), split, reinterpret_cast<std::byte*>(to));
  }
  __device__ void sum(TmaRowPipeline& pipeline, const SumTerms<T>& terms, T* to, const RowSplits& split) const {
    if (terms.size() == 0)
      zero_row(reinterpret_cast<std::byte*>(to), split.size * static_cast<int64_t>(sizeof(T)));
    else
      sum_terms(pipeline, terms, terms.num_inner, split, to);
  }
  __device__ void scribble(const GatherRows<T>& rows, int64_t token, const RowSplits& split) const {
    rows.scribble_staging(token, split, [&](std::byte* row) { part_of(split).scribble(row); });
  }

private:
  __device__ WirePart part_of(const RowSplits& split) const {
    return {call_.format, call_.hidden, split.first, split.size};
  }

  template <typename To>
  __device__ __forceinline__ void sum_terms(TmaRowPipeline& pipeline, const SumTerms<T>& terms, int num_rows,
                                            const RowSplits& split, To* to) const {
    const WirePart part = part_of(split);
    std::byte* const shared = pipeline.begin_generic();
    const bool is_aligned = is_vectorizable(terms.address_bits | reinterpret_cast<uint64_t>(to), split.size);
    using ListReader = ShortTileReader<T>;
    if constexpr (ListReader::kTakesType) {
      if (is_aligned && num_rows <= kWarp && split.size < ListReader::kMaxHidden) {
        ListReader reader(shared, terms.rows.own(0), num_rows, split.size);
        sum_by_reader<true>(reader, terms, part, to);
        return;
      }
    } else if (is_aligned) {
      RowReader<T, true> reader(shared, split.size);
      begin_terms(reader, terms, num_rows);
      sum_by_reader<true>(reader, terms, part, to);
      return;
    }
    sum_unaligned_by_reader(shared, terms, num_rows, part, to);
  }

  const MovementCall& call_;
};

} // namespace epx::cuda
