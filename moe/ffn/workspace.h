// SPDX-License-Identifier: Apache-2.0
// The workspace of the grouped FFN on CUDA. Its size is known to every build, so this header needs no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "base/dtypes.h"
#include "moe/cuda/launch_target.h"
#include "moe/ffn/ffn.h"
#include "moe/gemm/gemm_workspace.h"

namespace epx::moe {

// Hands out parts of the workspace, or only counts their bytes when there is none.
class Workspace {
public:
  explicit Workspace(std::byte* memory) : memory_(memory) {}

  void* take(int64_t rows, int64_t columns, epx_dtype dtype) {
    const std::optional<int64_t> bytes = checked_bytes_of_rows(dtype, rows, columns);
    if (!bytes || *bytes > kMaxBytes)
      fail(EPX_ERROR_INVALID_ARGUMENT, "the workspace for {} rows of {} elements has more bytes than an int64 can count",
           rows, columns);
    return take_bytes(static_cast<size_t>(*bytes));
  }
  // What the products of a call take for tensor cores; NULL where they do not fit.
  void* take_for_products(const FfnShape& shape, epx_dtype dtype, int64_t rows) {
    if (!fits_tensor_cores(dtype, shape.hidden, shape.inner, rows)) return nullptr;
    return take_bytes(tensor_core_workspace_bytes(shape.num_experts));
  }
  size_t bytes() const { return bytes_; }

private:
  static constexpr int64_t kMaxBytes = std::numeric_limits<int64_t>::max() / 16; // parts of a call add up without overflow

  void* take_bytes(size_t bytes) {
    void* const part = memory_ != nullptr ? memory_ + bytes_ : nullptr;
    bytes_ += round_up_workspace(bytes);
    return part;
  }

  std::byte* memory_;
  size_t bytes_ = 0;
};

struct ForwardBuffers {
  ForwardBuffers(const FfnShape& shape, epx_dtype dtype, int64_t rows, bool has_pre_act, Workspace& workspace)
      : h(workspace.take(rows, shape.inner, dtype)),
        pre_act(has_pre_act ? nullptr : workspace.take(rows, shape.pre_act(), dtype)),
        for_products(workspace.take_for_products(shape, dtype, rows)) {}

  void* h;            // [N, F]
  void* pre_act;      // NULL when the caller has one
  void* for_products; // NULL where they do not fit tensor cores
};

struct BackwardBuffers {
  BackwardBuffers(const FfnShape& shape, epx_dtype dtype, int64_t rows, Workspace& workspace)
      : h(workspace.take(rows, shape.inner, dtype)), grad_h(workspace.take(rows, shape.inner, dtype)),
        grad_pre_act(workspace.take(rows, shape.pre_act(), dtype)),
        for_products(workspace.take_for_products(shape, dtype, rows)) {}

  void* h;            // [N, F]
  void* grad_h;       // [N, F]
  void* grad_pre_act; // [N, 2F] or [N, F]
  void* for_products;
};

inline size_t ffn_fwd_bytes(const FfnShape& shape, epx_dtype dtype, int64_t num_rows, bool has_pre_act) {
  Workspace workspace(nullptr);
  const ForwardBuffers buffers(shape, dtype, num_rows, has_pre_act, workspace);
  return workspace.bytes();
}

inline size_t ffn_bwd_bytes(const FfnShape& shape, epx_dtype dtype, int64_t num_rows) {
  Workspace workspace(nullptr);
  const BackwardBuffers buffers(shape, dtype, num_rows, workspace);
  return workspace.bytes();
}

} // namespace epx::moe
