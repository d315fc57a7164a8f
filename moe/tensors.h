// SPDX-License-Identifier: Apache-2.0
// The tensors of a call: checked against names, dtypes and dimensions, then read and written as typed memory.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "base/error.h"
#include "base/names.h"
#include "epx/epx.hpp"
#include "moe/integers.h"

namespace epx::moe {

// The product of sizes that are not negative; throws with `name` when an int64 cannot hold it.
int64_t checked_product(std::initializer_list<int64_t> factors, const char* name);

// The dtypes of what epx_moe.h calls real, and of indices and counts.
inline constexpr std::initializer_list<epx_dtype> kReal = {EPX_FLOAT32, EPX_FLOAT64};
inline constexpr std::initializer_list<epx_dtype> kInteger = {EPX_INT32, EPX_INT64};
// What they are on CUDA, and what logits and rows may be there.
inline constexpr std::initializer_list<epx_dtype> kCudaReal = {EPX_FLOAT32};
inline constexpr std::initializer_list<epx_dtype> kCudaLogits = {EPX_FLOAT32, EPX_BFLOAT16};
inline constexpr std::initializer_list<epx_dtype> kCudaRows = {EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16};

// A dimension that a tensor must have: what it is called, and its size.
struct Dim {
  const char* symbol;
  int64_t size;
};
inline constexpr int64_t kAnySize = -1;

// Throws unless `tensor` is there and has one of `dtypes` and exactly these dimensions. Returns its number of elements.
int64_t require_tensor(const epx_tensor* tensor, const char* name, std::initializer_list<epx_dtype> dtypes,
                       std::initializer_list<Dim> dims);

// Throws unless `tensor` is there and has these dimensions; looks at nothing else of it.
void require_sizes(const epx_tensor* tensor, const char* name, std::initializer_list<Dim> dims);

// As require_tensor, unless the tensor is NULL.
void allow_tensor(const epx_tensor* tensor, const char* name, std::initializer_list<epx_dtype> dtypes,
                  std::initializer_list<Dim> dims);

// Any dtype that there is, for bit copies.
void require_any_tensor(const epx_tensor* tensor, const char* name, std::initializer_list<Dim> dims);

void require_both_or_neither(const epx_tensor* one, const char* one_name, const epx_tensor* other, const char* other_name);

// Throws unless `value` is finite, also as a T.
template <typename T>
void require_finite(double value, const char* name) {
  if (!std::isfinite(static_cast<T>(value)))
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} is {}; it must be finite, as a {} too", name, value, name_of(kDtypeOf<T>));
}

template <typename Struct>
void require_struct(const Struct* given, const char* name) {
  if (given == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "{} is NULL", name);
  if (given->struct_size != sizeof(Struct))
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "{0}.struct_size is {1}; this library expects {2}: set it to the size of the struct, and build against the header "
         "of the library that is loaded",
         name, given->struct_size, sizeof(Struct));
}

// What the ..._config_init functions begin with: zeroes a config of the caller's, which has struct_size bytes.
template <typename Struct>
void init_struct(Struct* config, size_t struct_size, const char* name) {
  if (config == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "{} is NULL", name);
  if (struct_size != sizeof(Struct))
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "struct_size is {}; this library expects {}: build against the header of the library that is loaded", struct_size,
         sizeof(Struct));
  *config = {};
  config->struct_size = struct_size;
}

// Where a call computes, which decides the dtypes that it takes.
enum class Place { host, cuda };

// Checks what every args struct has: itself, its size, and `cuda`.
template <typename Args>
Place require_args(const Args* args) {
  require_struct(args, "args");
  if (args->cuda == nullptr) return Place::host;
  require_struct(args->cuda, "cuda");
  return Place::cuda;
}

// The memory of a tensor that was checked; NULL for NULL.
template <typename T>
T* data_of(const epx_tensor* tensor) {
  return tensor != nullptr ? static_cast<T*>(tensor->data) : nullptr;
}

// Calls body with a value of the tensor's type: FLOAT32 or FLOAT64, checked before.
template <typename Body>
decltype(auto) with_real(epx_dtype dtype, Body&& body) {
  return dtype == EPX_FLOAT64 ? body(double{}) : body(float{});
}

} // namespace epx::moe
