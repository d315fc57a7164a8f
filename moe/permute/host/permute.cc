// SPDX-License-Identifier: Apache-2.0
#include "moe/permute/permute.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

namespace epx::moe {
namespace {

template <typename Visit>
void for_each_route(const RowMap& map, Visit&& visit) {
  for (int64_t t = 0; t < map.num_tokens; ++t)
    for (int64_t k = 0; k < map.top_k; ++k)
      if (const int32_t row = map.rows[t * map.top_k + k]; row >= 0) visit(t, k, static_cast<int64_t>(row));
}

void zero_rows_without_route(const RowMap& map, std::byte* to, int64_t row_bytes) {
  std::vector<bool> is_target(map.num_rows);
  for_each_route(map, [&](int64_t, int64_t, int64_t row) { is_target[row] = true; });
  for (int64_t row = 0; row < map.num_rows; ++row)
    if (!is_target[row]) std::fill_n(to + row * row_bytes, row_bytes, std::byte{0});
}

// Copies item_of(t, k) of `from` to the row of each route.
template <typename ItemOf>
void scatter(const RowMap& map, const void* from, void* to, int64_t item_bytes, epx_pads pads, ItemOf&& item_of) {
  auto* const rows = static_cast<std::byte*>(to);
  const auto* const items = static_cast<const std::byte*>(from);
  if (pads == EPX_PADS_ZERO) zero_rows_without_route(map, rows, item_bytes);
  for_each_route(map, [&](int64_t t, int64_t k, int64_t row) {
    std::memcpy(rows + row * item_bytes, items + item_of(t, k) * item_bytes, static_cast<size_t>(item_bytes));
  });
}

// The fixed tree of epx_combine_bwd: 256 accumulators, then adjacent pairs.
template <typename T>
T dot_by_tree(std::span<const T> a, std::span<const T> b) {
  constexpr size_t kAccumulators = 256;
  std::array<T, kAccumulators> acc{};
  for (size_t h = 0; h < a.size(); ++h)
    acc[h % kAccumulators] = std::fma(a[h], b[h], acc[h % kAccumulators]);
  for (size_t left = kAccumulators / 2; left > 0; left /= 2)
    for (size_t i = 0; i < left; ++i)
      acc[i] = acc[2 * i] + acc[2 * i + 1];
  return acc[0];
}

} // namespace

void make_row_map(Integers topk_idx, int64_t num_tokens, int64_t top_k, int64_t num_experts, int64_t alignment,
                  Integers counts, Integers offsets, int32_t* row_map) {
  const int64_t routes = num_tokens * top_k;
  std::vector<int64_t> next(num_experts + 1); // first the routes of each expert, then the next row of its zone
  for (int64_t i = 0; i < routes; ++i) {
    const int64_t expert = topk_idx[i];
    if (expert < -1 || expert >= num_experts)
      fail(EPX_ERROR_INVALID_ARGUMENT, "topk_idx[{}, {}] is {}; it must be an expert, 0..{}, or -1", i / top_k, i % top_k,
           expert, num_experts - 1);
    if (expert >= 0) ++next[expert];
  }
  int64_t rows = 0;
  for (int64_t e = 0; e < num_experts; ++e)
    rows += (next[e] + alignment - 1) / alignment * alignment;
  if (rows > std::numeric_limits<int32_t>::max())
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} rows are needed, more than an int32 can count", rows);

  int64_t first = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t demand = next[e];
    counts.set(e, demand);
    offsets.set(e, first);
    next[e] = first;
    first += (demand + alignment - 1) / alignment * alignment;
  }
  offsets.set(num_experts, first);
  for (int64_t i = 0; i < routes; ++i) {
    const int64_t expert = topk_idx[i];
    row_map[i] = expert >= 0 ? static_cast<int32_t>(next[expert]++) : -1;
  }
}

void validate(const RowMap& map) {
  std::vector<bool> is_taken(map.num_rows);
  for (int64_t t = 0; t < map.num_tokens; ++t) {
    for (int64_t k = 0; k < map.top_k; ++k) {
      const int32_t row = map.rows[t * map.top_k + k];
      if (row < -1 || row >= map.num_rows)
        fail(EPX_ERROR_INVALID_ARGUMENT, "row_map[{}, {}] is {}; there are {} rows (-1 means none)", t, k, row,
             map.num_rows);
      if (row < 0) continue;
      if (is_taken[row])
        fail(EPX_ERROR_INVALID_ARGUMENT, "row_map[{}, {}] is {}, as is an entry before it; each row belongs to one route",
             t, k, row);
      is_taken[row] = true;
    }
  }
}

void scatter_tokens(const RowMap& map, const void* from, void* to, int64_t item_bytes, epx_pads pads) {
  scatter(map, from, to, item_bytes, pads, [](int64_t t, int64_t) { return t; });
}

void scatter_routes(const RowMap& map, const void* from, void* to, int64_t item_bytes, epx_pads pads) {
  scatter(map, from, to, item_bytes, pads, [&](int64_t t, int64_t k) { return t * map.top_k + k; });
}

template <typename T>
void sum_rows(const RowMap& map, const T* rows, const T* weights, int64_t hidden, T* tokens) {
  std::fill_n(tokens, map.num_tokens * hidden, T{0});
  for_each_route(map, [&](int64_t t, int64_t k, int64_t row) {
    const T* const from = rows + row * hidden;
    T* const acc = tokens + t * hidden;
    if (weights == nullptr) {
      for (int64_t h = 0; h < hidden; ++h)
        acc[h] += from[h];
    } else {
      const T weight = weights[t * map.top_k + k];
      for (int64_t h = 0; h < hidden; ++h)
        acc[h] = std::fma(weight, from[h], acc[h]);
    }
  });
}

template <typename T>
void gather_routes(const RowMap& map, const T* row_values, T* values) {
  std::fill_n(values, map.num_tokens * map.top_k, T{0});
  for_each_route(map, [&](int64_t t, int64_t k, int64_t row) { values[t * map.top_k + k] = row_values[row]; });
}

template <typename T>
void scatter_weighted(const RowMap& map, const T* grad_tokens, const T* weights, int64_t hidden, T* grad_rows) {
  if (weights == nullptr) {
    scatter_tokens(map, grad_tokens, grad_rows, row_bytes(kDtypeOf<T>, hidden), EPX_PADS_ZERO);
    return;
  }
  zero_rows_without_route(map, reinterpret_cast<std::byte*>(grad_rows), row_bytes(kDtypeOf<T>, hidden));
  for_each_route(map, [&](int64_t t, int64_t k, int64_t row) {
    const T weight = weights[t * map.top_k + k];
    for (int64_t h = 0; h < hidden; ++h)
      grad_rows[row * hidden + h] = weight * grad_tokens[t * hidden + h];
  });
}

template <typename T>
void dot_rows(const RowMap& map, const T* grad_tokens, const T* rows, int64_t hidden, T* grad_weights) {
  std::fill_n(grad_weights, map.num_tokens * map.top_k, T{0});
  const auto size = static_cast<size_t>(hidden);
  for_each_route(map, [&](int64_t t, int64_t k, int64_t row) {
    grad_weights[t * map.top_k + k] = dot_by_tree<T>({grad_tokens + t * hidden, size}, {rows + row * hidden, size});
  });
}

template void sum_rows(const RowMap&, const float*, const float*, int64_t, float*);
template void sum_rows(const RowMap&, const double*, const double*, int64_t, double*);
template void gather_routes(const RowMap&, const float*, float*);
template void gather_routes(const RowMap&, const double*, double*);
template void scatter_weighted(const RowMap&, const float*, const float*, int64_t, float*);
template void scatter_weighted(const RowMap&, const double*, const double*, int64_t, double*);
template void dot_rows(const RowMap&, const float*, const float*, int64_t, float*);
template void dot_rows(const RowMap&, const double*, const double*, int64_t, double*);

} // namespace epx::moe
