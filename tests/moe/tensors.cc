// SPDX-License-Identifier: Apache-2.0
#include "tests/moe/tensors.h"

#include <algorithm>
#include <bit>
#include <sstream>
#include <stdexcept>
#include <string_view>

#include <doctest/doctest.h>

namespace epx::test {

namespace {

constexpr int64_t kMaxElements = 60; // elements of a gradient that are compared
constexpr double kTolerance = 1e-6;
constexpr double kCudaTolerance = 1e-5; // of gradients in float32, which may be differences of nearly equal numbers
constexpr double kCudaSmallestScale = 0.1;
constexpr double kStep = 1e-5;

// The error of a central difference by the rounding of a value of about 10, 1e-16 * 10 / kStep, is below kTolerance of this.
constexpr double kSmallestScale = 1e-4;

bool tells(const std::string& sentence, std::string_view word) {
  for (size_t bar = word.find('|'); bar != std::string_view::npos; bar = word.find('|')) {
    if (sentence.find(word.substr(0, bar)) != std::string::npos) return true;
    word.remove_prefix(bar + 1);
  }
  return sentence.find(word) != std::string::npos;
}

template <typename T>
bool same_shape(const Tensor<T>& a, const Tensor<T>& b) {
  return a.ndim() == b.ndim() && std::equal(a.sizes(), a.sizes() + a.ndim(), b.sizes());
}

template <typename T, typename Equal>
std::string first_difference(const Tensor<T>& actual, const Tensor<T>& expected, const Equal& equal) {
  if (!same_shape(actual, expected)) return "the shapes differ";
  int64_t wrong = 0;
  std::ostringstream text;
  text.precision(17);
  for (int64_t i = 0; i < actual.count(); ++i) {
    if (equal(actual[i], expected[i])) continue;
    if (wrong++ == 0) text << "element " << i << " is " << +actual[i] << ", expected " << +expected[i];
  }
  if (wrong > 1) text << "; " << wrong << " of " << actual.count() << " are wrong";
  return text.str();
}

double central_difference(const std::function<double()>& value, double& x) {
  const double at = x;
  const double step = kStep * std::max(1.0, std::abs(at));
  const double above = at + step;
  const double below = at - step;
  x = above;
  const double value_above = value();
  x = below;
  const double value_below = value();
  x = at;
  return (value_above - value_below) / (above - below);
}

} // namespace

Bfloat16::Bfloat16(double value) {
  const auto single = std::bit_cast<uint32_t>(static_cast<float>(value)); // the tests' doubles are floats
  if (std::isnan(value))
    bits = 0x7fff;
  else
    bits = static_cast<uint16_t>((single + 0x7fff + (single >> 16 & 1)) >> 16);
}
Bfloat16::operator float() const {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

Float16::Float16(double value) {
  const double magnitude = std::abs(value);
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) {
    bits = 0x7fff;
  } else if (magnitude >= 65520) { // half a unit above the largest
    bits = sign | 0x7c00;
  } else {
    int exponent = 0;
    std::frexp(magnitude, &exponent);                                     // magnitude < 2^exponent
    const int unit = magnitude == 0 ? -24 : std::max(exponent - 11, -24); // log2 of the last place
    const auto units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -unit)));
    bits = static_cast<uint16_t>(sign | (((unit + 24) << 10) + units)); // 1024 units or more carry into the exponent
  }
}
Float16::operator float() const {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                  : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  if (exponent == 31) magnitude = fraction == 0 ? INFINITY : NAN;
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

E4m3::operator float() const {
  const int exponent = code >> 3 & 15;
  const int fraction = code & 7;
  float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                  : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  if ((code & 0x7f) == 0x7f) magnitude = NAN;
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

void require_ok(epx_status status, const char* call) {
  if (status == EPX_SUCCESS) return;
  throw std::runtime_error(std::string(call) + " returned " + epx_status_string(status) + ": " + epx_last_error());
}

std::string not_refused(epx_status status, const std::vector<std::string>& words) {
  const std::string sentence = epx_last_error();
  if (status != EPX_ERROR_INVALID_ARGUMENT)
    return std::string("returned ") + epx_status_string(status) + (status == EPX_SUCCESS ? "" : ": " + sentence);
  std::string missing;
  for (const std::string& word : words) {
    if (!tells(sentence, word)) missing += " " + word;
  }
  return missing.empty() ? "" : "\"" + sentence + "\" does not tell" + missing;
}

std::string not_refused_without_gpu(epx_status status) {
  if (status == EPX_ERROR_UNSUPPORTED && tells(epx_last_error(), "no CUDA|no GPU")) return "";
  return not_refused(status, {"memory|workspace"});
}

template <typename T>
std::string difference(const Tensor<T>& actual, const Tensor<T>& expected) {
  return first_difference(actual, expected, [](T a, T b) { return std::memcmp(&a, &b, sizeof(T)) == 0; });
}

template <typename T>
std::string difference(const Tensor<T>& actual, const Tensor<T>& expected, double tolerance, double scale) {
  return first_difference(actual, expected, [=](double a, double b) {
    return a == b || std::abs(a - b) <= tolerance * std::max(scale, std::abs(b));
  });
}

template std::string difference(const Tensor<float>&, const Tensor<float>&);
template std::string difference(const Tensor<double>&, const Tensor<double>&);
template std::string difference(const Tensor<int32_t>&, const Tensor<int32_t>&);
template std::string difference(const Tensor<int64_t>&, const Tensor<int64_t>&);
template std::string difference(const Tensor<uint8_t>&, const Tensor<uint8_t>&);
template std::string difference(const Tensor<uint16_t>&, const Tensor<uint16_t>&);
template std::string difference(const Tensor<Bfloat16>&, const Tensor<Bfloat16>&);
template std::string difference(const Tensor<Float16>&, const Tensor<Float16>&);
template std::string difference(const Tensor<E4m3>&, const Tensor<E4m3>&);
template std::string difference(const Tensor<float>&, const Tensor<float>&, double, double);
template std::string difference(const Tensor<double>&, const Tensor<double>&, double, double);

double dot(const Tensor<double>& a, const Tensor<double>& b) {
  REQUIRE(a.count() == b.count());
  double sum = 0;
  for (int64_t i = 0; i < a.count(); ++i)
    sum += a[i] * b[i];
  return sum;
}

double max_abs(const Tensor<double>& tensor) {
  double largest = 0;
  for (const double value : tensor)
    largest = std::max(largest, std::abs(value));
  return largest;
}

void check_gradient(const std::function<double()>& value, Tensor<double>& x, const Tensor<double>& analytic,
                    const std::string& what) {
  REQUIRE_MESSAGE(same_shape(x, analytic), what);
  const double scale = std::max(on_cuda() ? kCudaSmallestScale : kSmallestScale, max_abs(analytic));
  const double tolerance = on_cuda() ? kCudaTolerance : kTolerance;
  const OnHost differences_in_float64;
  Rng rng(mix(x.count(), 0x9bad));
  for (int64_t n = 0; n < std::min(x.count(), kMaxElements); ++n) {
    const int64_t i = x.count() <= kMaxElements ? n : rng.below(x.count());
    const double numeric = central_difference(value, x[i]);
    const double error = std::abs(numeric - analytic[i]);
    if (error <= tolerance * scale) continue; // scale is at least |analytic[i]|
    FAIL_CHECK("gradient of " << what << ": element " << i << " of " << x.count() << " is " << analytic[i]
                              << ", by differences " << numeric << " (largest " << scale << ")");
    return;
  }
  CHECK_MESSAGE(true, what); // counts as an assertion
}

} // namespace epx::test
