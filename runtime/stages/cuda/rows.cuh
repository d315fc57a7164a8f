// Rows of elements, one warp at a time: copies, conversions, and the arithmetic that the contract fixes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

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

__device__ inline void copy_row(std::byte* to, const std::byte* from, int64_t bytes) {
  spread_row(from, bytes, lane() == 0 ? to : nullptr);
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

// Elements [h, h + kRun) of a row as they lie in memory. Vector rows are aligned to 16 bytes, and `hidden` is a multiple of kRun:
// then a load is one instruction or two, whose result nobody touches before it is needed, so that many are under way.
template <typename T, bool kVector>
struct Loaded {
  Run<T> run;
  __device__ void load(const T* row, int64_t h, int64_t hidden) { run = load_run(row, h, hidden); }
  __device__ Run<T> get() const { return run; }
};
template <typename T>
struct Loaded<T, true> {
  static constexpr int kWords = sizeof(Run<T>) / sizeof(uint4);
  uint4 words[kWords];
  __device__ void load(const T* row, int64_t h, int64_t hidden) {
    if (h < hidden) {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        words[i] = reinterpret_cast<const uint4*>(row + h)[i];
    }
  }
  __device__ Run<T> get() const {
    Run<T> run;
    memcpy(&run, words, sizeof(run));
    return run;
  }
};

// Whether rows whose addresses have these bits set between them are vector rows.
__device__ inline bool are_vector_rows(uint64_t address_bits, int64_t hidden) {
  return address_bits % 16 == 0 && hidden % kRun == 0;
}

template <bool kVector, typename T>
__device__ __noinline__ void spread_scaled_rows(const T* from, int64_t hidden, unsigned lanes, T* to, float weight) {
  constexpr int kWide = kVector ? 2 : 1;                               // stretches under way at a time
  for (int64_t first = 0; first < hidden; first += kWide * kStretch) { // the same in all lanes
    const int64_t h = first + lane() * kRun;
    Loaded<T, kVector> row[kWide];
#pragma unroll
    for (int wide = 0; wide < kWide; ++wide)
      row[wide].load(from, h + wide * kStretch, hidden);
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      const int place = __ffs(static_cast<int>(left)) - 1;
      const float factor = from_lane(weight, place);
      T* const target = from_lane(to, place);
#pragma unroll
      for (int wide = 0; wide < kWide; ++wide) {
        const Run<T> run = row[wide].get();
        float scaled[kRun];
        for (int i = 0; i < kRun; ++i)
          scaled[i] = __fmul_rn(factor, to_float(run.values[i]));
        store_run(target, h + wide * kStretch, hidden, rounded<T>(scaled));
      }
    }
  }
}

// For each lane that names a place: that row = round(its weight * from). A place may be `from` itself.
template <typename T>
__device__ inline void spread_scaled(const T* from, int64_t hidden, T* to, float weight) {
  const unsigned lanes = __ballot_sync(~0u, to != nullptr ? 1 : 0);
  if (lanes == 0) return;
  if (are_vector_rows(reinterpret_cast<uint64_t>(from), hidden))
    spread_scaled_rows<true>(from, hidden, lanes, to, weight);
  else
    spread_scaled_rows<false>(from, hidden, lanes, to, weight);
}

// This lane's part: the sum of its 8 accumulators.
template <bool kVector, typename T>
__device__ __noinline__ float sum_of_products(const T* a, const T* b, int64_t hidden) {
  constexpr int kWide = !kVector ? 1 : sizeof(T) == 2 ? 4 : 2; // stretches under way at a time, of both rows
  float acc[kRun] = {};
  for (int64_t h = lane() * kRun; h < hidden; h += kWide * kStretch) {
    Loaded<T, kVector> x[kWide], y[kWide];
#pragma unroll
    for (int wide = 0; wide < kWide; ++wide) {
      x[wide].load(a, h + wide * kStretch, hidden);
      y[wide].load(b, h + wide * kStretch, hidden);
    }
#pragma unroll
    for (int wide = 0; wide < kWide; ++wide) {
      const int64_t begin = h + wide * kStretch;
      if (begin >= hidden) break;
      const Run<T> x_run = x[wide].get(), y_run = y[wide].get();
#pragma unroll
      for (int i = 0; i < kRun; ++i)
        if (kVector || begin + i < hidden) // an absent element takes no step
          acc[i] = __fmaf_rn(to_float(x_run.values[i]), to_float(y_run.values[i]), acc[i]);
    }
  }
#pragma unroll
  for (int left = kRun / 2; left > 0; left /= 2)
#pragma unroll
    for (int i = 0; i < left; ++i)
      acc[i] = __fadd_rn(acc[2 * i], acc[2 * i + 1]);
  return acc[0];
}

// The fixed tree of epx_combine_bwd: 256 accumulators, j = h mod 256, then adjacent pairs. The result is in every lane.
template <typename T>
__device__ inline float dot_rows(const T* a, const T* b, int64_t hidden) {
  const bool are_vectors = are_vector_rows(reinterpret_cast<uint64_t>(a) | reinterpret_cast<uint64_t>(b), hidden);
  float sum = are_vectors ? sum_of_products<true>(a, b, hidden) : sum_of_products<false>(a, b, hidden);
  for (int distance = 1; distance < kWarp; distance *= 2)
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
  return sum;
}

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
  __device__ void append(const T* row) {
    address_bits |= reinterpret_cast<uint64_t>(row);
    rows.append(row);
    weights.append(1.0f);
  }
  __device__ void append(const T* row, float weight) {
    weighted |= uint64_t{1} << size();
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

template <bool kHasInner, bool kVector, typename T>
__device__ __noinline__ void sum_terms(const Terms<T> terms, T* to, int64_t hidden) {
  constexpr int kDepth = kVector ? 4 : 2;                  // rows under way at a time
  constexpr int kWide = kVector && sizeof(T) == 2 ? 2 : 1; // stretches of each
  const int size = terms.size();
  for (int64_t first = 0; first < hidden; first += kWide * kStretch) { // the same in all lanes
    const int64_t h = first + lane() * kRun;
    float acc[kWide][kRun] = {};
    float inner[kWide][kRun] = {};
    for (int begin = 0; begin < size; begin += kDepth) {
      Loaded<T, kVector> runs[kDepth][kWide];
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (begin + i >= size) break;
        const T* const row = terms.rows[begin + i];
#pragma unroll
        for (int wide = 0; wide < kWide; ++wide)
          runs[i][wide].load(row, h + wide * kStretch, hidden);
      }
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        const int term = begin + i;
        if (term >= size) break;
        const float weight = terms.weights[term];
        const bool weighted = (terms.weighted >> term & 1) != 0;
        const bool is_inner = kHasInner && (terms.inner >> term & 1) != 0;
        const bool ends_inner = (terms.ends_of_inner >> term & 1) != 0;
#pragma unroll
        for (int wide = 0; wide < kWide; ++wide) {
          const Run<T> run = runs[i][wide].get();
          if (!is_inner) {
            add_run(acc[wide], run, weighted, weight);
            continue;
          }
          add_run(inner[wide], run, weighted, weight);
          if (!ends_inner) continue;
          add_run(acc[wide], rounded<T>(inner[wide]), false, 1.0f);
#pragma unroll
          for (float& x : inner[wide])
            x = 0.0f;
        }
      }
    }
#pragma unroll
    for (int wide = 0; wide < kWide; ++wide)
      store_run(to, h + wide * kStretch, hidden, rounded<T>(acc[wide]));
  }
}

// to = round(the sum of terms), by the contract's rules. One warp; `to` is none of the rows. kHasInner: some may be inner.
template <bool kHasInner, typename T>
__device__ inline void sum_rows(const Terms<T>& terms, T* to, int64_t hidden) {
  if (are_vector_rows(terms.address_bits, hidden))
    sum_terms<kHasInner, true>(terms, to, hidden);
  else
    sum_terms<kHasInner, false>(terms, to, hidden);
}

} // namespace epx::cuda
