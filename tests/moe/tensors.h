// SPDX-License-Identifier: Apache-2.0
// Tensors, values and comparisons for the tests of epx_moe.h. Nothing here knows which operation is under test.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "epx/epx.hpp"
#include "epx/epx_moe.h"
#include "tests/moe/device.h"
#include "tests/support/rng.h"

namespace epx::test {

template <typename T>
inline constexpr epx_dtype kDtype = kDtypeOf<T>;
template <>
inline constexpr epx_dtype kDtype<uint16_t> = EPX_BFLOAT16; // its bits

// Elements of two bytes as numbers. Rounding is to nearest even, written out so that it is not the library's.
struct Bfloat16 {
  uint16_t bits = 0;

  Bfloat16() = default;
  explicit Bfloat16(double value);
  operator float() const;
};
struct Float16 {
  uint16_t bits = 0;

  Float16() = default;
  explicit Float16(double value);
  operator float() const;
};
// A code of FLOAT8_E4M3.
struct E4m3 {
  uint8_t code = 0;

  operator float() const;
};
template <>
inline constexpr epx_dtype kDtype<E4m3> = EPX_FLOAT8_E4M3;
template <>
inline constexpr epx_dtype kDtype<Bfloat16> = EPX_BFLOAT16;
template <>
inline constexpr epx_dtype kDtype<Float16> = EPX_FLOAT16;

// The type of weights and biases beside elements of type T.
template <typename T>
using RealOf = std::conditional_t<sizeof(T) == 2, float, T>;

// A contiguous array and the descriptor that the C API takes. Its size is fixed, so what get() returns stays valid as long as
// it lives; on CUDA get() also copies the values to the device.
template <typename T>
class Tensor {
public:
  Tensor() : Tensor({0}) {}
  explicit Tensor(std::initializer_list<int64_t> shape, T value = T{}) : view_{} {
    size_t count = 1;
    for (const int64_t size : shape) {
      view_.sizes[view_.ndim++] = size;
      count *= static_cast<size_t>(size);
    }
    values_.assign(count, value);
    view_.dtype = kDtype<T>;
  }
  Tensor(std::initializer_list<int64_t> shape, const std::vector<T>& values) : Tensor(shape) {
    for (size_t i = 0; i < values_.size(); ++i)
      values_[i] = values.at(i);
  }
  Tensor(const Tensor&) = default;
  Tensor(Tensor&&) noexcept = default;
  Tensor& operator=(Tensor other) noexcept {
    values_ = std::move(other.values_); // a move keeps the address of the elements
    view_ = other.view_;
    return *this;
  }
  ~Tensor() = default;

  const epx_tensor* get() const {
    view_.data = address_for_call(const_cast<T*>(values_.data()));
    return &view_;
  }
  int32_t ndim() const { return view_.ndim; }
  const int64_t* sizes() const { return view_.sizes; }
  int64_t size(int dimension) const { return view_.sizes[dimension]; }
  int64_t count() const { return static_cast<int64_t>(values_.size()); }
  int64_t per_row() const { return size(0) == 0 ? 0 : count() / size(0); } // elements for each index of the first dimension

  T& operator[](int64_t i) { return values_.at(static_cast<size_t>(i)); }
  const T& operator[](int64_t i) const { return values_.at(static_cast<size_t>(i)); }
  T& operator()(int64_t row, int64_t i) { return (*this)[row * per_row() + i]; }
  const T& operator()(int64_t row, int64_t i) const { return (*this)[row * per_row() + i]; }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }

  // Bytes that no test produces and that are finite as a float: what outputs hold before a call.
  void scribble() {
    if (count() > 0) std::memset(static_cast<void*>(values_.data()), 0xA5, values_.size() * sizeof(T));
  }

private:
  std::vector<T, GuardedAllocator<T>> values_;
  mutable epx_tensor view_; // its data is filled in by get()
};

template <typename T>
Tensor<T> scribbled(std::initializer_list<int64_t> shape) {
  Tensor<T> tensor(shape);
  tensor.scribble();
  return tensor;
}

// An argument of a call that a test may spoil: what the call gets, and the values.
template <typename T>
struct Argument : epx_tensor {
  Argument(Tensor<T> tensor) : epx_tensor{}, values(std::move(tensor)) { *static_cast<epx_tensor*>(this) = *values.get(); }
  Argument(const Argument&) = delete;
  Argument& operator=(const Argument&) = delete;
  ~Argument() = default;

  // Of an output that was scribbled().
  bool is_written() const {
    const auto is_scribble = [](std::byte byte) { return byte == std::byte{0xA5}; };
    const auto bytes = std::as_bytes(std::span(values.begin(), values.end()));
    return !std::all_of(bytes.begin(), bytes.end(), is_scribble);
  }

  Tensor<T> values;
};

// Returns a number in [low, high) from the top 53 bits of the generator. It is the same on every platform, unlike those of the
// standard distributions.
inline double uniform(Rng& rng, double low = -1, double high = 1) {
  return low + (high - low) * (static_cast<double>(rng.next() >> 11) * 0x1p-53);
}

template <typename T>
Tensor<T> random_tensor(std::initializer_list<int64_t> shape, Rng& rng, double low = -1, double high = 1) {
  Tensor<T> tensor(shape);
  for (int64_t i = 0; i < tensor.count(); ++i)
    tensor[i] = static_cast<T>(uniform(rng, low, high));
  return tensor;
}

template <typename To, typename From>
Tensor<To> converted(const Tensor<From>& from) {
  const int64_t* sizes = from.sizes();
  Tensor<To> to = from.ndim() == 1   ? Tensor<To>({sizes[0]})
                  : from.ndim() == 2 ? Tensor<To>({sizes[0], sizes[1]})
                                     : Tensor<To>({sizes[0], sizes[1], sizes[2]});
  for (int64_t i = 0; i < to.count(); ++i)
    to[i] = static_cast<To>(from[i]);
  return to;
}

// Returns rows [first, first + rows) of a tensor of two dimensions.
template <typename T>
Tensor<T> slice_rows(const Tensor<T>& tensor, int64_t first, int64_t rows) {
  Tensor<T> slice({rows, tensor.size(1)});
  for (int64_t i = 0; i < slice.count(); ++i)
    slice[i] = tensor[first * tensor.size(1) + i];
  return slice;
}

// Throws the sentence of the library, which works on any thread, since doctest and run_threads both report it.
void require_ok(epx_status status, const char* call);

// The format of a scaling as epx_row_format_init() makes it.
inline epx_row_format format_of(epx_scaling scaling) {
  epx_row_format format;
  require_ok(epx_row_format_init(&format, scaling), "epx_row_format_init");
  return format;
}

// Returns what is wrong with a refusal: "" when the call returned EPX_ERROR_INVALID_ARGUMENT and its sentence has each of the
// words. A sentence has "a|b" when it has a or b.
std::string not_refused(epx_status status, const std::vector<std::string>& words);

// The same for a call with `cuda` and host memory, on any machine: "" when it was refused for one or the other.
std::string not_refused_without_gpu(epx_status status);

// "" when the tensors have the same shape and bits, else the first element that differs.
template <typename T>
std::string difference(const Tensor<T>& actual, const Tensor<T>& expected);

// Does the same, but allows |actual - expected| <= tolerance * max(scale, |expected|). A NaN equals nothing.
template <typename T>
std::string difference(const Tensor<T>& actual, const Tensor<T>& expected, double tolerance, double scale = 0);

// The norm of the difference, relative to that of what is expected.
template <typename A, typename B>
double relative_error(const Tensor<A>& actual, const Tensor<B>& expected) {
  double error = 0, norm = 0;
  for (int64_t i = 0; i < expected.count(); ++i) {
    error += std::pow(static_cast<double>(actual[i]) - static_cast<double>(expected[i]), 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(norm == 0 ? error : error / norm);
}

double dot(const Tensor<double>& a, const Tensor<double>& b);
double max_abs(const Tensor<double>& tensor);

// Compares an analytic gradient of a scalar function with central differences in float64, to 1e-6 of the largest element.
// `value` reads x, which is changed and put back one element at a time; when x is large, 60 random elements.
void check_gradient(const std::function<double()>& value, Tensor<double>& x, const Tensor<double>& analytic,
                    const std::string& what);

} // namespace epx::test
