// SPDX-License-Identifier: Apache-2.0
// Rows sorted by expert on one rank, and back. Arguments are checked by whoever calls, except what only the data shows: bad
// indices and row maps are refused here, before anything is written.
#pragma once

#include <cstdint>

#include "epx/epx_moe.h"
#include "moe/permute/row_map.h"
#include "moe/tensors.h"

namespace epx::moe {

// Writes counts[E], offsets[E + 1] and row_map[T, K].
void make_row_map(Integers topk_idx, int64_t num_tokens, int64_t top_k, int64_t num_experts, int64_t alignment,
                  Integers counts, Integers offsets, int32_t* row_map);

// Throws for a row >= N or < -1, and for one that two routes have.
void validate(const RowMap& map);

// to[row of (t, k)] = from[t] for items of item_bytes bytes. `pads` is of all other rows of `to`.
void scatter_tokens(const RowMap& map, const void* from, void* to, int64_t item_bytes, epx_pads pads);

// to[row of (t, k)] = from[t, k] likewise.
void scatter_routes(const RowMap& map, const void* from, void* to, int64_t item_bytes, epx_pads pads);

// tokens[t] = sum over k of weights[t, k] * rows[row of (t, k)] in k order; weights may be NULL.
template <typename T>
void sum_rows(const RowMap& map, const T* rows, const T* weights, int64_t hidden, T* tokens);

// values[t, k] = row_values[row of (t, k)], 0 where there is none.
template <typename T>
void gather_routes(const RowMap& map, const T* row_values, T* values);

// grad_rows[row of (t, k)] = weights[t, k] * grad_tokens[t]; every other row becomes zero.
template <typename T>
void scatter_weighted(const RowMap& map, const T* grad_tokens, const T* weights, int64_t hidden, T* grad_rows);

// grad_weights[t, k] = <grad_tokens[t], rows[row of (t, k)]>, summed as epx_combine_bwd sums.
template <typename T>
void dot_rows(const RowMap& map, const T* grad_tokens, const T* rows, int64_t hidden, T* grad_weights);

} // namespace epx::moe
