// SPDX-License-Identifier: Apache-2.0
// Calls the local permutation for the tests, with scribbled outputs.
#pragma once

#include "epx/epx_moe.h"
#include "tests/moe/tensors.h"

namespace epx::test {

template <typename Index>
struct RowMap {
  Tensor<Index> counts;    // [E]
  Tensor<Index> offsets;   // [E + 1]
  Tensor<int32_t> row_map; // [T, K]

  int64_t num_rows() const { return offsets[counts.count()]; }
};

template <typename Index, typename Count = Index>
RowMap<Count> run_row_map(const Tensor<Index>& topk_idx, int64_t num_experts, int32_t alignment) {
  RowMap<Count> map = {scribbled<Count>({num_experts}), scribbled<Count>({num_experts + 1}),
                       scribbled<int32_t>({topk_idx.size(0), topk_idx.size(1)})};
  epx_moe_row_map_args args = {};
  args.struct_size = sizeof(args);
  args.topk_idx = topk_idx.get();
  args.alignment = alignment;
  args.counts = map.counts.get();
  args.offsets = map.offsets.get();
  args.row_map = map.row_map.get();
  require_ok(epx_moe_row_map(&args), "epx_moe_row_map");
  return map;
}

template <typename T, typename Weight>
struct Permuted {
  Tensor<T> rows;             // [N, H]
  Tensor<Weight> row_weights; // [N], or [0] without topk_weights
};

template <typename T, typename Weight = float>
Permuted<T, Weight> run_permute(const Tensor<int32_t>& row_map, const Tensor<T>& tokens, int64_t num_rows,
                                const Tensor<Weight>* topk_weights = nullptr) {
  Permuted<T, Weight> permuted = {scribbled<T>({num_rows, tokens.size(1)}),
                                  scribbled<Weight>({topk_weights != nullptr ? num_rows : 0})};
  epx_moe_permute_args args = {};
  args.struct_size = sizeof(args);
  args.row_map = row_map.get();
  args.tokens = tokens.get();
  args.rows = permuted.rows.get();
  if (topk_weights != nullptr) {
    args.topk_weights = topk_weights->get();
    args.row_weights = permuted.row_weights.get();
  }
  require_ok(epx_moe_permute(&args), "epx_moe_permute");
  return permuted;
}

template <typename Real>
Tensor<Real> run_unpermute(const Tensor<int32_t>& row_map, const Tensor<Real>& rows,
                           const Tensor<Real>* topk_weights = nullptr) {
  auto tokens = scribbled<Real>({row_map.size(0), rows.size(1)});
  epx_moe_unpermute_args args = {};
  args.struct_size = sizeof(args);
  args.row_map = row_map.get();
  args.rows = rows.get();
  args.topk_weights = topk_weights != nullptr ? topk_weights->get() : nullptr;
  args.tokens = tokens.get();
  require_ok(epx_moe_unpermute(&args), "epx_moe_unpermute");
  return tokens;
}

} // namespace epx::test
