// Rows of elements, one warp at a time: copies, conversions, and the arithmetic that the contract fixes. Each has two forms:
// through a RowStream where rows are aligned to 16 bytes, and a plain one for the rest.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "runtime/stages/cuda/row_stream.cuh"
#include "runtime/stages/cuda/warp.cuh"

namespace epx::cuda {

template <typename Unit>
__device__ inline void spread_units(const std::byte* from, int64_t bytes, unsigned lanes, std::byte* to) {
  constexpr int kDepth = 4; // loads under way at a time
  const auto* source = reinterpret_cast<const Unit*>(from);
  const int64_t units = bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t first = 0; first < units; first += kDepth * kWarp) { // the same in all lanes
    Unit values[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
      if (const int64_t unit = first + i * kWarp + lane(); unit < units) values[i] = source[unit];
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      auto* const target = reinterpret_cast<Unit*>(from_lane(to, __ffs(static_cast<int>(left)) - 1));
#pragma unroll
      for (int i = 0; i < kDepth; ++i)
        if (const int64_t unit = first + i * kWarp + lane(); unit < units) target[unit] = values[i];
    }
  }
}

// A warp copies `bytes` bytes to the places that its lanes name; NULL: none. Read once; by the widest unit that all ends and
// the size allow.
__device__ inline void spread_row(const std::byte* from, int64_t bytes, std::byte* to) {
  const unsigned lanes = __ballot_sync(~0u, to != nullptr ? 1 : 0);
  if (lanes == 0) return;
  const uint64_t bits = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(bytes);
  if (__all_sync(~0u, bits % 16 == 0 ? 1 : 0) != 0)
    spread_units<uint4>(from, bytes, lanes, to);
  else if (__all_sync(~0u, bits % 4 == 0 ? 1 : 0) != 0)
    spread_units<uint32_t>(from, bytes, lanes, to);
  else if (__all_sync(~0u, bits % 2 == 0 ? 1 : 0) != 0)
    spread_units<uint16_t>(from, bytes, lanes, to);
  else
    spread_units<uint8_t>(from, bytes, lanes, to);
}

// The same, begun only where bulk copies can do it: stream.finish() ends it.
__device__ inline void begin_to_spread_row(RowStream& stream, const std::byte* from, int64_t bytes, std::byte* to) {
  const uint64_t bits = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(bytes);
  if (__all_sync(~0u, bits % 16 == 0 ? 1 : 0) != 0)
    stream.spread(from, bytes, to);
  else
    spread_row(from, bytes, to);
}

__device__ inline void zero_row(std::byte* to, int64_t bytes) {
  if ((reinterpret_cast<uint64_t>(to) | static_cast<uint64_t>(bytes)) % 16 == 0) {
    for (int64_t i = lane(); i < bytes / 16; i += kWarp)
      reinterpret_cast<uint4*>(to)[i] = uint4{0, 0, 0, 0};
    return;
  }
  for (int64_t i = lane(); i < bytes; i += kWarp)
    to[i] = std::byte{0};
}

// Tests: what staging holds once it has been used.
__device__ inline void poison_row(std::byte* row, int64_t bytes) {
  __syncwarp(); // all lanes have read it
  for (int64_t i = lane(); i < bytes; i += kWarp)
    row[i] = std::byte{0x5a};
}

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(__half x) {
  return __half2float(x);
}
__device__ inline float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// A lane works on runs of kRun elements: lane l has elements [8 l, 8 l + 8) of each stretch of 256.
constexpr int kRun = 8;
constexpr int kStretch = kRun * kWarp;

template <typename T>
struct alignas(16) Run {
  T values[kRun];
};

// Elements [h, h + kRun) of a row of `hidden`; 0 beyond its end.
template <typename T>
__device__ inline Run<T> load_run(const T* row, int64_t h, int64_t hidden) {
  if (h + kRun <= hidden && reinterpret_cast<uint64_t>(row + h) % 16 == 0) return *reinterpret_cast<const Run<T>*>(row + h);
  Run<T> run;
  for (int i = 0; i < kRun; ++i)
    run.values[i] = h + i < hidden ? row[h + i] : T(0.0f);
  return run;
}

template <typename T>
__device__ inline void store_run(T* row, int64_t h, int64_t hidden, const Run<T>& run) {
  if (h + kRun <= hidden && reinterpret_cast<uint64_t>(row + h) % 16 == 0) {
    *reinterpret_cast<Run<T>*>(row + h) = run;
    return;
  }
  for (int i = 0; i < kRun && h + i < hidden; ++i)
    row[h + i] = run.values[i];
}

template <typename T>
__device__ inline Run<T> rounded(const float (&values)[kRun]) {
  Run<T> run;
  for (int i = 0; i < kRun; ++i)
    run.values[i] = from_float<T>(values[i]);
  return run;
}

// Rows of which some address has these bits set.
template <typename T>
__device__ inline bool can_be_streamed(uint64_t address_bits, int64_t hidden) {
  return address_bits % 16 == 0 && hidden % kRun == 0;
}

// A stretch of elements in a piece of a row: the lane's run of it, if the row is that long. Calls
// serve(stretch, element of the row, run).
template <typename T>
constexpr int kStretchesOfPiece = RowStream::kPieceBytes / static_cast<int>(kStretch * sizeof(T));
template <typename T, typename Serve>
__device__ inline void for_each_run(const std::byte* piece, uint32_t piece_bytes, int64_t offset, const Serve& serve) {
#pragma unroll
  for (int stretch = 0; stretch < kStretchesOfPiece<T>; ++stretch) {
    const uint32_t at = static_cast<uint32_t>(stretch * kStretch + lane() * kRun) * sizeof(T);
    if (at < piece_bytes)
      serve(stretch, (offset + at) / static_cast<int64_t>(sizeof(T)), *reinterpret_cast<const Run<T>*>(piece + at));
  }
}

// ---- Scaled copies ----

template <typename T>
__device__ inline Run<T> scaled(float factor, const Run<T>& run) {
  float values[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i)
    values[i] = __fmul_rn(factor, to_float(run.values[i]));
  return rounded<T>(values);
}

template <typename T>
__device__ inline void store_scaled(const Run<T>& run, int64_t h, int64_t hidden, unsigned lanes, T* to, float weight) {
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    const int place = __ffs(static_cast<int>(left)) - 1;
    store_run(from_lane(to, place), h, hidden, scaled(from_lane(weight, place), run));
  }
}

// For each lane that names a place: that row = round(its weight * from). A place may be `from` itself.
template <typename T>
__device__ inline void spread_scaled(RowStream& stream, const T* from, int64_t hidden, T* to, float weight) {
  const unsigned lanes = __ballot_sync(~0u, to != nullptr ? 1 : 0);
  if (lanes == 0) return;
  if (!can_be_streamed<T>(reinterpret_cast<uint64_t>(from), hidden)) {
    for (int64_t first = 0; first < hidden; first += kStretch) { // the same in all lanes
      const int64_t h = first + lane() * kRun;
      store_scaled(load_run(from, h, hidden), h, hidden, lanes, to, weight);
    }
    return;
  }
  stream.read(
      1, hidden * static_cast<int64_t>(sizeof(T)), [&](int) { return reinterpret_cast<const std::byte*>(from); },
      [&](int, int64_t offset, const std::byte* piece, uint32_t piece_bytes) {
        for (int stretch = 0; stretch < kStretchesOfPiece<T>; ++stretch) { // the same in all lanes
          const uint32_t at = static_cast<uint32_t>(stretch * kStretch + lane() * kRun) * sizeof(T);
          Run<T> run{};
          if (at < piece_bytes) run = *reinterpret_cast<const Run<T>*>(piece + at);
          store_scaled(run, (offset + at) / static_cast<int64_t>(sizeof(T)), hidden, lanes, to, weight);
        }
      });
}

// ---- Products ----

// The fixed tree of epx_combine_bwd: 256 accumulators, j = h mod 256, of which this lane has the eight of its runs; then adjacent
// pairs. The result is in every lane.
__device__ inline float sum_of_tree(float (&acc)[kRun]) {
#pragma unroll
  for (int left = kRun / 2; left > 0; left /= 2)
#pragma unroll
    for (int i = 0; i < left; ++i)
      acc[i] = __fadd_rn(acc[2 * i], acc[2 * i + 1]);
  float sum = acc[0];
  for (int distance = 1; distance < kWarp; distance *= 2)
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
  return sum;
}

template <typename T>
__device__ inline void add_products(float (&acc)[kRun], const Run<T>& a, const Run<T>& b, int count) {
#pragma unroll
  for (int i = 0; i < kRun; ++i)
    if (i < count) // an absent element takes no step
      acc[i] = __fmaf_rn(to_float(a.values[i]), to_float(b.values[i]), acc[i]);
}

// Returns the product of grad and x, by the fixed tree; and to = round(weight * grad), or the same bits if !is_weighted. `to` may
// be `grad` itself.
template <typename T>
__device__ inline float scale_and_multiply(RowStream& stream, const T* grad, const T* x, int64_t hidden, T* to,
                                           bool is_weighted, float weight) {
  float acc[kRun] = {};
  if (!can_be_streamed<T>(reinterpret_cast<uint64_t>(grad) | reinterpret_cast<uint64_t>(x), hidden)) {
    for (int64_t h = lane() * kRun; h < hidden; h += kStretch) {
      const Run<T> run = load_run(grad, h, hidden);
      add_products(acc, run, load_run(x, h, hidden), static_cast<int>(min(int64_t{kRun}, hidden - h)));
      store_run(to, h, hidden, is_weighted ? scaled(weight, run) : run);
    }
    return sum_of_tree(acc);
  }
  Run<T> runs[kStretchesOfPiece<T>];
  stream.read(
      2, hidden * static_cast<int64_t>(sizeof(T)),
      [&](int row) { return reinterpret_cast<const std::byte*>(row == 0 ? grad : x); },
      [&](int row, int64_t offset, const std::byte* piece, uint32_t piece_bytes) {
        for_each_run<T>(piece, piece_bytes, offset, [&](int stretch, int64_t h, const Run<T>& run) {
          if (row == 0) {
            runs[stretch] = run;
            return;
          }
          add_products(acc, runs[stretch], run, kRun);
          store_run(to, h, hidden, is_weighted ? scaled(weight, runs[stretch]) : runs[stretch]);
        });
      });
  return sum_of_tree(acc);
}

// ---- Sums ----

// Rows to be summed in order, each times a weight or as it is. `inner`: consecutive rows that are summed among themselves,
// and rounded to T, before they enter the sum as one.
template <typename T>
struct Terms {
  WarpList<const T*> rows;
  WarpList<float> weights;
  uint64_t weighted = 0;      // a bit for each row
  uint64_t inner = 0;         // a bit for each row
  uint64_t ends_of_inner = 0; // a bit for the last of consecutive inner rows
  uint64_t address_bits = 0;  // set in the address of any row

  __device__ int size() const { return rows.size(); }
  __device__ void append(const T* row, bool is_weighted = false, float weight = 1.0f) {
    if (is_weighted) weighted |= uint64_t{1} << size();
    address_bits |= reinterpret_cast<uint64_t>(row);
    rows.append(row);
    weights.append(weight);
  }
};

// One step of a sum: acc = fma(weight, x, acc), or acc + x without a weight.
template <typename T>
__device__ inline void add_run(float (&acc)[kRun], const Run<T>& run, bool weighted, float weight) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const float x = to_float(run.values[i]);
    acc[i] = weighted ? __fmaf_rn(weight, x, acc[i]) : __fadd_rn(acc[i], x);
  }
}

// The sum of terms so far, of one run.
template <bool kHasInner, typename T>
class RunSum {
public:
  __device__ void add(const Terms<T>& terms, int term, float weight, const Run<T>& run) {
    const bool weighted = (terms.weighted >> term & 1) != 0;
    if constexpr (kHasInner) {
      if ((terms.inner >> term & 1) != 0) {
        add_run(inner_, run, weighted, weight);
        if ((terms.ends_of_inner >> term & 1) != 0) add_run(acc_, rounded<T>(inner_), false, 1.0f);
        return;
      }
    }
    add_run(acc_, run, weighted, weight);
  }
  __device__ Run<T> get() const { return rounded<T>(acc_); }

private:
  float acc_[kRun] = {};
  float inner_[kHasInner ? kRun : 1] = {}; // each sum has one group of inner rows at most
};

template <bool kHasInner, typename T>
__device__ __noinline__ void sum_plain_rows(const Terms<T> terms, T* to, int64_t hidden) {
  for (int64_t first = 0; first < hidden; first += kStretch) { // the same in all lanes
    const int64_t h = first + lane() * kRun;
    RunSum<kHasInner, T> sum;
    for (int term = 0; term < terms.size(); ++term) {
      const T* const row = terms.rows[term];
      sum.add(terms, term, terms.weights[term], load_run(row, h, hidden));
    }
    store_run(to, h, hidden, sum.get());
  }
}

// to = round(the sum of terms), by the contract's rules. One warp; `to` is none of the rows. kHasInner: some may be inner.
template <bool kHasInner, typename T>
__device__ inline void sum_rows(RowStream& stream, const Terms<T>& terms, T* to, int64_t hidden) {
  const int64_t bytes = hidden * static_cast<int64_t>(sizeof(T));
  if (terms.size() == 0) {
    zero_row(reinterpret_cast<std::byte*>(to), bytes);
    return;
  }
  if (!can_be_streamed<T>(terms.address_bits, hidden)) {
    sum_plain_rows<kHasInner>(terms, to, hidden);
    return;
  }
  RunSum<kHasInner, T> sums[kStretchesOfPiece<T>];
  stream.read(
      terms.size(), bytes, [&](int term) { return reinterpret_cast<const std::byte*>(terms.rows[term]); },
      [&](int term, int64_t offset, const std::byte* piece, uint32_t piece_bytes) {
        const float weight = terms.weights[term];
        for_each_run<T>(piece, piece_bytes, offset, [&](int stretch, int64_t h, const Run<T>& run) {
          if (term == 0) sums[stretch] = {};
          sums[stretch].add(terms, term, weight, run);
          if (term + 1 == terms.size()) store_run(to, h, hidden, sums[stretch].get());
        });
      });
}

} // namespace epx::cuda
