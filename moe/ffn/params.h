// SPDX-License-Identifier: Apache-2.0
// The parameters of the grouped FFN, or their gradients, as tensors of any dtype.
#pragma once

#include <cstdint>

#include "epx/epx.h"

namespace epx::moe {

// One parameter of all experts, in host or device memory; `data` is NULL where it is not given, or has no elements.
struct ParamTensor {
  void* data = nullptr;
  int64_t stride = 0; // elements from expert to expert
  epx_dtype dtype = EPX_DTYPE_UNSET;

  explicit operator bool() const { return data != nullptr; }

  // The elements of one expert, of the dtype of T; NULL where there is no parameter.
  template <typename T>
  T* of(int expert) const {
    return data != nullptr ? static_cast<T*>(data) + expert * stride : nullptr;
  }
};

struct ParamTensors {
  ParamTensor gate, up, down;                // [F, H], [F, H], [H, F] of each expert
  ParamTensor gate_bias, up_bias, down_bias; // [F], [F], [H]
  bool is_stacked = false;                   // gate and up are the halves of one weight, [2F, H]
};

} // namespace epx::moe
