// SPDX-License-Identifier: Apache-2.0
// Calls the local permutation for the tests, with scribbled outputs.
#pragma once

#include <type_traits>

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
  args.cuda = place_of_call(epx_moe_row_map_workspace, &args);
  require_ok(epx_moe_row_map(&args), "epx_moe_row_map");
  finish_call();
  return map;
}

template <typename T, typename Weight>
struct Permuted {
  Tensor<T> rows;             // [N, H]
  Tensor<Weight> row_weights; // [N], or [0] without topk_weights
};

template <typename T, typename Weight = float>
Permuted<T, Weight> run_permute(const Tensor<int32_t>& row_map, const Tensor<T>& tokens, int64_t num_rows,
                                const Tensor<Weight>* topk_weights = nullptr, epx_pads pads = EPX_PADS_ZERO) {
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
  args.pads = pads;
  args.cuda = place_of_call(epx_moe_permute_workspace, &args);
  require_ok(epx_moe_permute(&args), "epx_moe_permute");
  finish_call();
  return permuted;
}

template <typename T>
Tensor<T> run_unpermute(const Tensor<int32_t>& row_map, const Tensor<T>& rows,
                        const Tensor<RealOf<T>>* topk_weights = nullptr) {
  if constexpr (std::is_same_v<T, double>) {
    if (on_cuda()) { // there is no float64
      const auto weights = topk_weights != nullptr ? converted<float>(*topk_weights) : Tensor<float>();
      return converted<double>(
          run_unpermute(row_map, converted<float>(rows), topk_weights != nullptr ? &weights : nullptr));
    }
  }
  auto tokens = scribbled<T>({row_map.size(0), rows.size(1)});
  epx_moe_unpermute_args args = {};
  args.struct_size = sizeof(args);
  args.cuda = place_of_call();
  args.row_map = row_map.get();
  args.rows = rows.get();
  args.topk_weights = topk_weights != nullptr ? topk_weights->get() : nullptr;
  args.tokens = tokens.get();
  require_ok(epx_moe_unpermute(&args), "epx_moe_unpermute");
  finish_call();
  return tokens;
}

template <typename T>
struct Gradients {
  Tensor<T> of_rows;                 // or of tokens
  Tensor<RealOf<T>> of_topk_weights; // [T, K], or [0] where they are not wanted
};

template <typename T>
Gradients<double> widened(const Gradients<T>& gradients) {
  return {converted<double>(gradients.of_rows), converted<double>(gradients.of_topk_weights)};
}

// of_rows is grad_tokens[T, H] here.
template <typename T>
Gradients<T> run_permute_bwd(const Tensor<int32_t>& row_map, const Tensor<T>& grad_rows,
                             const Tensor<RealOf<T>>* grad_row_weights = nullptr) {
  if constexpr (std::is_same_v<T, double>) {
    if (on_cuda()) {
      const auto weights = grad_row_weights != nullptr ? converted<float>(*grad_row_weights) : Tensor<float>();
      return widened(
          run_permute_bwd(row_map, converted<float>(grad_rows), grad_row_weights != nullptr ? &weights : nullptr));
    }
  }
  const bool is_weighted = grad_row_weights != nullptr;
  Gradients<T> gradients = {scribbled<T>({row_map.size(0), grad_rows.size(1)}),
                            is_weighted ? scribbled<RealOf<T>>({row_map.size(0), row_map.size(1)}) : Tensor<RealOf<T>>()};
  epx_moe_permute_bwd_args args = {};
  args.struct_size = sizeof(args);
  args.cuda = place_of_call();
  args.row_map = row_map.get();
  args.grad_rows = grad_rows.get();
  args.grad_row_weights = is_weighted ? grad_row_weights->get() : nullptr;
  args.grad_tokens = gradients.of_rows.get();
  args.grad_topk_weights = is_weighted ? gradients.of_topk_weights.get() : nullptr;
  require_ok(epx_moe_permute_bwd(&args), "epx_moe_permute_bwd");
  finish_call();
  return gradients;
}

// `rows` has N rows; its values are used when the gradient of the weights is wanted.
template <typename T>
Gradients<T> run_unpermute_bwd(const Tensor<int32_t>& row_map, const Tensor<T>& grad_tokens, const Tensor<T>& rows,
                               const Tensor<RealOf<T>>* topk_weights, bool wants_weights) {
  if constexpr (std::is_same_v<T, double>) {
    if (on_cuda()) {
      const auto weights = topk_weights != nullptr ? converted<float>(*topk_weights) : Tensor<float>();
      return widened(run_unpermute_bwd(row_map, converted<float>(grad_tokens), converted<float>(rows),
                                       topk_weights != nullptr ? &weights : nullptr, wants_weights));
    }
  }
  Gradients<T> gradients = {scribbled<T>({rows.size(0), rows.size(1)}),
                            wants_weights ? scribbled<RealOf<T>>({row_map.size(0), row_map.size(1)}) : Tensor<RealOf<T>>()};
  epx_moe_unpermute_bwd_args args = {};
  args.struct_size = sizeof(args);
  args.row_map = row_map.get();
  args.grad_tokens = grad_tokens.get();
  args.rows = wants_weights ? rows.get() : nullptr;
  args.topk_weights = topk_weights != nullptr ? topk_weights->get() : nullptr;
  args.grad_rows = gradients.of_rows.get();
  args.grad_topk_weights = wants_weights ? gradients.of_topk_weights.get() : nullptr;
  args.cuda = place_of_call(epx_moe_unpermute_bwd_workspace, &args);
  require_ok(epx_moe_unpermute_bwd(&args), "epx_moe_unpermute_bwd");
  finish_call();
  return gradients;
}

} // namespace epx::test
