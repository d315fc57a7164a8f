// SPDX-License-Identifier: Apache-2.0
// What travels by rail for a rank's partial sum of a token: a policy of RowForwarder and HomeSums, as PlainSums and QuantisedSums
// are of Gather.
//   kTakesExact                    whether it is for calls in precision exact, too, where the rows themselves travel
//   row_bytes()                    from one row to the next beside the rails
//   send(pipeline, terms, to)      stores the sum of this rank's rows in a row beside the rails
//   send_identity(to)              stores a row there that changes no sum
//   sum(pipeline, terms, to)       stores the sum of rows that lie beside the rails in a row of T
#pragma once

#include "runtime/layout/rail_layout.h"
#include "runtime/stages/cuda/gather/quantised_sums.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"

namespace epx::cuda {

// A row of T travels.
template <typename T>
class PlainRailSums {
public:
  using Element = T;
  static constexpr bool kTakesExact = true;

  __device__ explicit PlainRailSums(const MovementCall& call) : hidden_(call.hidden) {}

  __device__ int64_t row_bytes() const { return hidden_ * static_cast<int64_t>(sizeof(T)); }
  __device__ void send(TmaRowPipeline& pipeline, const SumTerms<T>& terms, std::byte* to) const {
    sum(pipeline, terms, reinterpret_cast<T*>(to));
  }
  // -0 is the identity of addition in every rounding to nearest: x + -0 is x, and fma(w, -0, x) is x for each finite w >= 0. A
  // row of +0 would turn a sum of -0, as an underflow can leave it, into +0.
  __device__ void send_identity(std::byte* to) const {
    for (int64_t h = lane(); h < hidden_; h += kWarp)
      reinterpret_cast<T*>(to)[h] = T(-0.0f);
  }
  __device__ void sum(TmaRowPipeline& pipeline, const SumTerms<T>& terms, T* to) const {
    sum_rows<false>(pipeline, terms, to, hidden_);
  }

private:
  int64_t hidden_;
};

// A WireRow travels (BLOCK128, MX).
template <typename T>
class QuantisedRailSums {
public:
  using Element = T;
  static constexpr bool kTakesExact = false;

  __device__ explicit QuantisedRailSums(const MovementCall& call) : call_(call), sums_(call) {}

  __device__ int64_t row_bytes() const { return rail_row_bytes(call_.format, call_.dtype, call_.hidden); }
  __device__ void send(TmaRowPipeline& pipeline, const SumTerms<T>& terms, std::byte* to) const {
    sums_.send(pipeline, terms, reinterpret_cast<T*>(to), whole());
  }
  // A sum of these rows begins with +0, and no product that is added makes it -0: so +0 changes none.
  __device__ void send_identity(std::byte* to) const { zero_row(to, row_bytes()); }
  __device__ void sum(TmaRowPipeline& pipeline, const SumTerms<T>& terms, T* to) const {
    sums_.sum(pipeline, terms, to, whole());
  }

private:
  __device__ RowSplits whole() const { return {0, 1, 0, call_.hidden}; }

  const MovementCall& call_;
  QuantisedSums<T> sums_;
};

} // namespace epx::cuda
