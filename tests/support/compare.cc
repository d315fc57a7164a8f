// SPDX-License-Identifier: Apache-2.0
#include "tests/support/compare.h"

#include <cstring>

#include "base/dtypes.h"
#include "tests/support/check.h"

namespace epx::test {

namespace {

uint32_t bits_at(const std::byte* from, int64_t size) {
  if (size == 4) {
    uint32_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    return bits;
  }
  if (size == 1) return std::to_integer<uint32_t>(*from);
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return bits;
}

bool is_nan(uint32_t bits, epx_dtype dtype) {
  if (dtype == EPX_FLOAT16) return (bits & 0x7fff) > 0x7c00;
  if (dtype == EPX_BFLOAT16) return (bits & 0x7fff) > 0x7f80;
  return (bits & 0x7fffffff) > 0x7f800000;
}

void check_elements(const std::string& what, epx_dtype dtype, int64_t cols, std::span<const std::byte> expected,
                    std::span<const std::byte> actual, NanRule rule) {
  cols = row_bytes(dtype, cols) / single_element_bytes(dtype); // of FLOAT4_E2M1, bytes
  check(expected.size() == actual.size(), "{} has {} bytes, expected {}", what, actual.size(), expected.size());
  if (expected.empty() || std::memcmp(expected.data(), actual.data(), expected.size()) == 0) return;
  const int64_t size = single_element_bytes(dtype);
  const int64_t count = static_cast<int64_t>(expected.size()) / size;
  int64_t num_wrong = 0;
  std::string first;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t want = bits_at(expected.data() + i * size, size);
    const uint32_t have = bits_at(actual.data() + i * size, size);
    if (want == have || (rule == NanRule::any_nan && is_nan(want, dtype) && is_nan(have, dtype))) continue;
    if (num_wrong++ == 0) {
      first = fmt::format("[{}, {}] holds bits {:#x}, expected {:#x}", i / cols, i % cols, have, want);
    }
  }
  check(num_wrong == 0, "{}{} ({} of {} elements are wrong)", what, first, num_wrong, count);
}

} // namespace

void check_rows(const std::string& what, const reference::Matrix& expected, std::span<const std::byte> actual,
                NanRule rule) {
  check_elements(what, expected.dtype, expected.cols, expected.bytes, actual, rule);
}

void check_floats(const std::string& what, std::span<const float> expected, std::span<const std::byte> actual,
                  NanRule rule) {
  check_elements(what, EPX_FLOAT32, 1, std::as_bytes(expected), actual, rule);
}

void check_bytes(const std::string& what, std::span<const std::byte> expected, std::span<const std::byte> actual) {
  check(expected.size() == actual.size(), "{} has {} bytes, expected {}", what, actual.size(), expected.size());
  if (expected.empty() || std::memcmp(expected.data(), actual.data(), expected.size()) == 0) return;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] != actual[i]) {
      fail_check("{}: byte {} of {} is {:#x}, expected {:#x}", what, i, expected.size(), std::to_integer<int>(actual[i]),
                 std::to_integer<int>(expected[i]));
    }
  }
}

void check_integers(const std::string& what, std::span<const int64_t> expected, std::span<const std::byte> actual,
                    epx_dtype dtype) {
  const size_t size = dtype == EPX_INT32 ? 4 : 8;
  check(actual.size() == expected.size() * size, "{} has {} bytes, expected {}", what, actual.size(),
        expected.size() * size);
  for (size_t i = 0; i < expected.size(); ++i) {
    int64_t value = 0;
    if (dtype == EPX_INT32) {
      int32_t narrow;
      std::memcpy(&narrow, actual.data() + i * size, size);
      value = narrow;
    } else {
      std::memcpy(&value, actual.data() + i * size, size);
    }
    if (value != expected[i]) fail_check("{}[{}] is {}, expected {}", what, i, value, expected[i]);
  }
}

} // namespace epx::test
