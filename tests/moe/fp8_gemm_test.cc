// SPDX-License-Identifier: Apache-2.0
// Grouped products of FLOAT8_E4M3 beside float64, from random codes and scales, by every kernel that the device has. Zones have any
// number of rows, none too, and what lies outside them is NaN.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "moe/gemm/gemm_workspace.h"
#include "moe/gemm/grouped_gemm.h"
#include "tests/support/rng.h"

namespace epx::test {
namespace {

using moe::Integers;
using moe::kQuantiseBlock;
using moe::cuda::DeviceZones;
using moe::cuda::GroupedGemm;
using moe::cuda::Product;

constexpr uint8_t kNaNCode = 0x7f;
constexpr int64_t kZoneAlignment = 16;

// The number of a code, by its definition (FORMATS: E4M3 has bias 7, no infinity, and NaN for the codes 0x7f and 0xff).
double value_of(uint8_t code) {
  const int exponent = code >> 3 & 0xf, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}
const std::vector<double>& values() {
  static const std::vector<double> table = [] {
    std::vector<double> made;
    for (int code = 0; code < 256; ++code)
      made.push_back(value_of(static_cast<uint8_t>(code)));
    return made;
  }();
  return table;
}
float value_of_bf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

void check_cuda(cudaError_t error) {
  REQUIRE(std::string(cudaGetErrorString(error)) == cudaGetErrorString(cudaSuccess));
}

template <typename T>
class DeviceArray {
public:
  explicit DeviceArray(const std::vector<T>& values) : size_(values.size()) {
    check_cuda(cudaMalloc(&memory_, std::max<size_t>(size_, 1) * sizeof(T)));
    check_cuda(cudaMemcpy(memory_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(memory_); }
  T* get() const { return static_cast<T*>(memory_); }
  std::vector<T> read() const {
    std::vector<T> values(size_);
    check_cuda(cudaMemcpy(values.data(), memory_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

private:
  void* memory_ = nullptr;
  size_t size_;
};

struct Zones {
  std::vector<int32_t> counts, offsets{0};
  int64_t num_rows;
};
Zones random_zones(Rng& rng) {
  Zones zones;
  for (int e = static_cast<int>(rng.between(1, 5)); e > 0; --e) {
    zones.counts.push_back(rng.pick<int32_t>({0, 1, 16, 63, 127, 128, 129, 200}));
    const int64_t end = zones.offsets.back() + zones.counts.back() + rng.pick<int32_t>({0, 0, 16});
    zones.offsets.push_back(static_cast<int32_t>((end + kZoneAlignment - 1) / kZoneAlignment * kZoneAlignment));
  }
  zones.num_rows = zones.offsets.back() + rng.pick<int64_t>({0, 32});
  return zones;
}

uint8_t random_code(Rng& rng) {
  const auto code = static_cast<uint8_t>(rng.next() >> 40);
  return (code & 0x7f) == kNaNCode ? 0 : code;
}
float random_scale(Rng& rng) {
  return std::ldexp(static_cast<float>(rng.between(64, 127)), static_cast<int>(rng.between(0, 8)) - 12);
}

// One random product. `is_added`: to what d has before.
struct Case {
  explicit Case(uint64_t seed) : rng(seed), zones(random_zones(rng)) {
    is_gradient = rng.chance(50);
    is_fp32 = is_gradient ? rng.chance(50) : false;
    is_added = is_fp32 && rng.chance(50);
    m = is_gradient ? 128 * rng.between(1, 3) : 0;
    n = 128 * rng.between(1, 3);
    k = is_gradient ? 0 : 128 * rng.between(1, 4);
    const auto experts = static_cast<int64_t>(zones.counts.size());
    const int64_t rows = zones.num_rows;
    a.assign(rows * (is_gradient ? m : k), kNaNCode);
    b.assign(is_gradient ? rows * n : experts * n * k, kNaNCode);
    const int64_t blocks = rows / kQuantiseBlock + experts;
    const auto nan = std::numeric_limits<float>::quiet_NaN();
    a_scales.assign(is_gradient ? blocks * m : rows * (k / kQuantiseBlock), nan);
    b_scales.assign(is_gradient ? blocks * n : experts * (n / kQuantiseBlock) * (k / kQuantiseBlock), nan);
    for (int64_t e = 0; e < experts; ++e)
      fill_expert(e);
    before.resize(is_gradient ? experts * m * n : rows * n);
    for (float& value : before)
      value = static_cast<float>(rng.between(0, 15)) - 8.0F;
  }

  void fill_expert(int64_t e) {
    const int64_t first = zones.offsets[e], count = zones.counts[e];
    if (is_gradient) {
      for (auto [codes, outer] : {std::pair{&a, m}, std::pair{&b, n}})
        for (int64_t o = 0; o < outer; ++o)
          for (int64_t r = 0; r < count; ++r)
            (*codes)[o * zones.num_rows + first + r] = random_code(rng);
      for (int64_t block = 0; block * kQuantiseBlock < count; ++block) {
        for (int64_t o = 0; o < m; ++o)
          a_scales[(first / kQuantiseBlock + e + block) * m + o] = random_scale(rng);
        for (int64_t o = 0; o < n; ++o)
          b_scales[(first / kQuantiseBlock + e + block) * n + o] = random_scale(rng);
      }
      return;
    }
    for (int64_t i = first * k; i < (first + count) * k; ++i)
      a[i] = random_code(rng);
    for (int64_t i = first * (k / kQuantiseBlock); i < (first + count) * (k / kQuantiseBlock); ++i)
      a_scales[i] = random_scale(rng);
    for (int64_t i = e * n * k; i < (e + 1) * n * k; ++i)
      b[i] = random_code(rng);
    const int64_t weight_scales = (n / kQuantiseBlock) * (k / kQuantiseBlock);
    for (int64_t i = e * weight_scales; i < (e + 1) * weight_scales; ++i)
      b_scales[i] = random_scale(rng);
  }

  // The dequantised elements of the operands: of row `outer` of d (a), or of its column (b).
  double a_at(int64_t e, int64_t outer, int64_t inner) const {
    const int64_t first = zones.offsets[e];
    if (is_gradient)
      return values()[a[outer * zones.num_rows + first + inner]] *
             static_cast<double>(a_scales[(first / kQuantiseBlock + e + inner / kQuantiseBlock) * m + outer]);
    return values()[a[(first + outer) * k + inner]] *
           static_cast<double>(a_scales[(first + outer) * (k / kQuantiseBlock) + inner / kQuantiseBlock]);
  }
  double b_at(int64_t e, int64_t outer, int64_t inner) const {
    const int64_t first = zones.offsets[e];
    if (is_gradient)
      return values()[b[outer * zones.num_rows + first + inner]] *
             static_cast<double>(b_scales[(first / kQuantiseBlock + e + inner / kQuantiseBlock) * n + outer]);
    return values()[b[(e * n + outer) * k + inner]] *
           static_cast<double>(b_scales[(e * (n / kQuantiseBlock) + outer / kQuantiseBlock) * (k / kQuantiseBlock) +
                                        inner / kQuantiseBlock]);
  }

  // Runs the product, with tensor cores where the device has them, and returns d as floats.
  std::vector<float> run(bool with_tensor_cores) const {
    const DeviceArray<int32_t> counts(zones.counts), offsets(zones.offsets);
    const DeviceArray<uint8_t> device_a(a), device_b(b);
    const DeviceArray<float> device_a_scales(a_scales), device_b_scales(b_scales);
    std::vector<uint16_t> halves(before.size());
    for (size_t i = 0; i < before.size(); ++i) {
      uint32_t word;
      std::memcpy(&word, &before[i], sizeof(word)); // small integers, which BFLOAT16 has
      halves[i] = static_cast<uint16_t>(word >> 16);
    }
    const DeviceArray<float> d(before);
    const DeviceArray<uint16_t> d_bf16(halves);
    const auto experts = static_cast<int>(zones.counts.size());
    const DeviceArray<std::byte> workspace(std::vector<std::byte>(moe::tensor_core_workspace_bytes(experts)));
    GroupedGemm gemm{.product = is_gradient ? Product::kWeightGradient : Product::kRowsByWeight,
                     .zones = {Integers(counts.get()), Integers(offsets.get()), experts, zones.num_rows},
                     .m = m,
                     .n = n,
                     .k = k,
                     .in_dtype = EPX_FLOAT8_E4M3,
                     .out_dtype = is_fp32 ? EPX_FLOAT32 : EPX_BFLOAT16};
    gemm.a = device_a.get();
    gemm.b = device_b.get();
    gemm.d = is_fp32 ? static_cast<void*>(d.get()) : d_bf16.get();
    gemm.a_scales = device_a_scales.get();
    gemm.b_scales = device_b_scales.get();
    gemm.a_stride = is_gradient ? zones.num_rows : k;
    gemm.b_stride = is_gradient ? zones.num_rows : n * k;
    gemm.d_stride = is_gradient ? m * n : n;
    gemm.accumulate = is_added;
    gemm.tensor_core_workspace = with_tensor_cores ? workspace.get() : nullptr;
    int num_sms = 0;
    check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
    check_cuda(launch_grouped_gemm(gemm, {nullptr, num_sms}));
    check_cuda(cudaDeviceSynchronize());
    if (is_fp32) return d.read();
    std::vector<float> values;
    for (const uint16_t bits : d_bf16.read())
      values.push_back(value_of_bf16(bits));
    return values;
  }

  // Each element, and the relative norm of the difference over all of them.
  void check_result(const std::vector<float>& d) const {
    double squares_of_difference = 0, squares = 0;
    for (size_t e = 0; e < zones.counts.size(); ++e) {
      const auto expert = static_cast<int64_t>(e);
      const int64_t rows = is_gradient ? m : zones.counts[e], inner = is_gradient ? zones.counts[e] : k;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < n; ++c) {
          const int64_t index = is_gradient ? (expert * m + r) * n + c : (zones.offsets[e] + r) * n + c;
          double expected = is_added ? static_cast<double>(before[index]) : 0.0, magnitude = std::abs(expected);
          for (int64_t i = 0; i < inner; ++i) {
            const double term = a_at(expert, r, i) * b_at(expert, c, i);
            expected += term;
            magnitude += std::abs(term);
          }
          // wgmma cuts each product of a block off at about 2^-13 of the largest one; the output is rounded once.
          const double bound = magnitude * 0x1p-8 + (is_fp32 ? 0.0 : std::abs(expected) * 0x1p-8);
          const double difference = static_cast<double>(d[index]) - expected;
          squares_of_difference += difference * difference;
          squares += expected * expected;
          if (!(std::abs(difference) <= bound)) {
            CAPTURE(e);
            CAPTURE(r);
            CAPTURE(c);
            CAPTURE(magnitude);
            REQUIRE(static_cast<double>(d[index]) == doctest::Approx(expected));
          }
        }
    }
    CHECK(squares_of_difference <= squares * (is_fp32 ? 1e-6 : 9e-6)); // 1e-3; BFLOAT16's rounding makes it 3e-3
    if (is_gradient) return;
    std::vector<bool> is_zone(zones.num_rows, false); // other rows of d are not written
    for (size_t e = 0; e < zones.counts.size(); ++e)
      std::fill_n(is_zone.begin() + zones.offsets[e], zones.counts[e], true);
    for (int64_t row = 0; row < zones.num_rows; ++row)
      for (int64_t c = 0; c < n && !is_zone[row]; ++c)
        REQUIRE(d[row * n + c] == before[row * n + c]);
  }

  Rng rng;
  Zones zones;
  bool is_gradient, is_fp32, is_added;
  int64_t m, n, k;
  std::vector<uint8_t> a, b;
  std::vector<float> a_scales, b_scales, before;
};

TEST_CASE("grouped products of E4M3 with scales of blocks are those of the dequantised operands") {
  for (uint64_t seed = 1; seed <= 24; ++seed) {
    CAPTURE(seed);
    const Case product(seed);
    CAPTURE(product.is_gradient);
    CAPTURE(product.is_fp32);
    CAPTURE(product.is_added);
    CAPTURE(product.n);
    CAPTURE(product.k);
    product.check_result(product.run(false));
    const std::vector<float> d = product.run(true);
    product.check_result(d);
    CHECK(d == product.run(true)); // the same bits
  }
}

TEST_CASE("products of E4M3 that no kernel has are refused") {
  GroupedGemm gemm{.product = Product::kRowsByTransposedWeight,
                   .zones = {Integers(), Integers(), 1, 16},
                   .n = 128,
                   .k = 128,
                   .in_dtype = EPX_FLOAT8_E4M3,
                   .out_dtype = EPX_BFLOAT16};
  CHECK(launch_grouped_gemm(gemm, {nullptr, 1}) == cudaErrorInvalidValue);
  gemm.product = Product::kRowsByWeight;
  gemm.accumulate = true;
  CHECK(launch_grouped_gemm(gemm, {nullptr, 1}) == cudaErrorInvalidValue);
  gemm.accumulate = false;
  gemm.out_dtype = EPX_FLOAT32;
  CHECK(launch_grouped_gemm(gemm, {nullptr, 1}) == cudaErrorInvalidValue);
  gemm.product = Product::kWeightGradient;
  gemm.out_dtype = EPX_BFLOAT16;
  gemm.accumulate = true;
  CHECK(launch_grouped_gemm(gemm, {nullptr, 1}) == cudaErrorInvalidValue);
}

} // namespace
} // namespace epx::test

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: there is no GPU");
    return 77;
  }
  return doctest::Context(argc, argv).run();
}
