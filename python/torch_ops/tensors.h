// SPDX-License-Identifier: Apache-2.0
// Tensors of PyTorch's stable ABI as epx_tensor, and new ones.
#pragma once

#include <initializer_list>
#include <optional>
#include <span>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <epx/epx.h>

#include "registry.h"

namespace epx_torch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline constexpr int64_t kAnySize = -1;

// A view of a tensor that must be contiguous, in the group's memory, of this shape and of one of these dtypes. Refuses with a
// sentence that names the argument.
epx_tensor view(const char* name, const Tensor& tensor, const Place& place, std::initializer_list<int64_t> shape,
                std::initializer_list<ScalarType> dtypes);

// A view of a contiguous tensor [N, ...] of any dtype in the group's memory as [N, bytes of a row].
epx_tensor view_as_bytes(const char* name, const Tensor& rows, const Place& place);

// PyTorch's dtype. Refuses one that it does not have.
ScalarType scalar_type(const char* name, epx_dtype dtype);

// An uninitialised contiguous tensor in the group's memory.
Tensor new_tensor(const Place& place, std::initializer_list<int64_t> shape, ScalarType dtype);
Tensor new_tensor(const Place& place, std::span<const int64_t> shape, ScalarType dtype);
// Likewise on the host.
Tensor new_host_tensor(std::initializer_list<int64_t> shape, ScalarType dtype);

// A view of a tensor of new_tensor().
epx_tensor view_of_new(const Tensor& tensor);
// A view of a part of a tensor of new_tensor(), which begins `first_byte` bytes behind its begin.
epx_tensor view_of_part(const Tensor& tensor, int64_t first_byte, std::initializer_list<int64_t> shape, ScalarType dtype);

// The current stream of the group's GPU, whose calls are enqueued there; NULL on the host.
epx_stream current_stream(const Place& place);

} // namespace epx_torch
