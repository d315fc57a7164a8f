// SPDX-License-Identifier: Apache-2.0
// Operators whose tensors are copied where they are not contiguous in row-major order. In eager mode python/epx/torch refuses such
// tensors with a sentence. Under torch.compile Inductor chooses the strides of what it computes (it pads rows for the alignment of
// matrix products), and PyTorch 2.11 heeds no requirement of an operator that has an effect.
#pragma once

#include <optional>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace epx_torch {

inline torch::stable::Tensor row_major(const torch::stable::Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline std::optional<torch::stable::Tensor> row_major(const std::optional<torch::stable::Tensor>& tensor) {
  return tensor ? std::optional(row_major(*tensor)) : std::nullopt;
}

template <typename T>
T row_major(T value) {
  return value;
}

// RowMajor<&op>::call is the operator `op`, which writes into none of its arguments. Copies live until it returns, and PyTorch
// gives their memory to work on the same stream alone.
template <auto op>
struct RowMajor;

template <typename Result, typename... Args, Result (*op)(Args...)>
struct RowMajor<op> {
  static Result call(Args... args) { return op(row_major(args)...); }
};

} // namespace epx_torch
