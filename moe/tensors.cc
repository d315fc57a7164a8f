// SPDX-License-Identifier: Apache-2.0
#include "moe/tensors.h"

#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/dtypes.h"

namespace epx::moe {
namespace {

[[noreturn]] void refuse_size(const char* name) {
  fail(EPX_ERROR_INVALID_ARGUMENT, "{} has more bytes than an int64 can count", name);
}

// "[T, K = 2]"
std::string describe(std::initializer_list<Dim> dims) {
  std::vector<std::string> parts;
  for (const Dim& dim : dims)
    parts.push_back(dim.size == kAnySize ? dim.symbol : fmt::format("{} = {}", dim.symbol, dim.size));
  return fmt::format("[{}]", fmt::join(parts, ", "));
}

// Returns the number of elements.
int64_t require_dims(const epx_tensor& tensor, const char* name, std::initializer_list<Dim> dims) {
  if (tensor.ndim != static_cast<int32_t>(dims.size()))
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} has {} dimensions (ndim); it must have {}: {}", name, tensor.ndim, dims.size(),
         describe(dims));
  int64_t elements = 1;
  int axis = 0;
  for (const Dim& dim : dims) {
    const int64_t size = tensor.sizes[axis];
    if (size < 0) fail(EPX_ERROR_INVALID_ARGUMENT, "{} has sizes[{}] = {}; sizes are not negative", name, axis, size);
    if (dim.size != kAnySize && size != dim.size)
      fail(EPX_ERROR_INVALID_ARGUMENT, "{} has sizes[{}] = {}; its shape must be {}", name, axis, size, describe(dims));
    elements = checked_product({elements, size}, name);
    ++axis;
  }
  return elements;
}

int64_t require_shape(const epx_tensor& tensor, const char* name, std::initializer_list<Dim> dims) {
  const int64_t elements = require_dims(tensor, name, dims);
  const int64_t last_size = tensor.ndim == 0 ? 1 : tensor.sizes[tensor.ndim - 1];
  if (!checked_bytes_of_rows(tensor.dtype, elements == 0 ? 0 : elements / last_size, last_size)) refuse_size(name);
  if (elements > 0 && tensor.data == nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} has {} elements, but its data is NULL", name, elements);
  const int64_t bytes = single_element_bytes(tensor.dtype);
  if (reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(bytes) != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} has data at {}, which is not aligned to its {} bytes per element", name,
         tensor.data, bytes);
  if (tensor.sidecar != nullptr || tensor.sidecar_row_bytes != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} has a sidecar of {} bytes per row; sidecars belong to the tokens of epx_dispatch",
         name, tensor.sidecar_row_bytes);
  if (tensor.reserved[0] != 0 || tensor.reserved[1] != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} has a reserved field that is not 0", name);
  return elements;
}

} // namespace

int64_t checked_product(std::initializer_list<int64_t> factors, const char* name) {
  int64_t product = 1;
  for (const int64_t factor : factors)
    if (__builtin_mul_overflow(product, factor, &product)) refuse_size(name);
  return product;
}

int64_t require_tensor(const epx_tensor* tensor, const char* name, std::initializer_list<epx_dtype> dtypes,
                       std::initializer_list<Dim> dims) {
  if (tensor == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "{} is NULL; it is required, {}", name, describe(dims));
  bool fits = false;
  std::vector<const char*> wanted;
  for (const epx_dtype dtype : dtypes) {
    fits |= tensor->dtype == dtype;
    wanted.push_back(name_of(dtype));
  }
  if (!fits)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} has dtype {} ({}); it must be {}", name, static_cast<int>(tensor->dtype),
         name_of(tensor->dtype), fmt::join(wanted, " or "));
  return require_shape(*tensor, name, dims);
}

void require_sizes(const epx_tensor* tensor, const char* name, std::initializer_list<Dim> dims) {
  if (tensor == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "{} is NULL; it is required, {}", name, describe(dims));
  require_dims(*tensor, name, dims);
}

void allow_tensor(const epx_tensor* tensor, const char* name, std::initializer_list<epx_dtype> dtypes,
                  std::initializer_list<Dim> dims) {
  if (tensor != nullptr) require_tensor(tensor, name, dtypes, dims);
}

void require_any_tensor(const epx_tensor* tensor, const char* name, std::initializer_list<Dim> dims) {
  if (tensor == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "{} is NULL; it is required, {}", name, describe(dims));
  if (row_bytes(tensor->dtype, 1) == 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} has dtype {}, which is none", name, static_cast<int>(tensor->dtype));
  require_shape(*tensor, name, dims);
}

void require_both_or_neither(const epx_tensor* one, const char* one_name, const epx_tensor* other, const char* other_name) {
  if ((one == nullptr) == (other == nullptr)) return;
  const bool one_given = one != nullptr;
  fail(EPX_ERROR_INVALID_ARGUMENT, "{} is given, but {} is NULL; they are given both or neither",
       one_given ? one_name : other_name, one_given ? other_name : one_name);
}

} // namespace epx::moe
