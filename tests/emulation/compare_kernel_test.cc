// SPDX-License-Identifier: Apache-2.0
// Tests that the comparison of the GPU suites counts each byte that differs, wherever it is, and no other one.
#include <algorithm>
#include <iterator>

#include <doctest/doctest.h>

#include "tests/gpu/compare_kernel.h"

namespace epx::test {
namespace {

constexpr size_t kAlignment = 16;
constexpr size_t kMaxBytes = 70'000; // more than all threads of the kernel have in flight

unsigned long long num_differences(const std::byte* one, const std::byte* other, size_t bytes) {
  unsigned long long differences = 0;
  REQUIRE(count_differences(one, other, bytes, &differences, nullptr) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(nullptr) == cudaSuccess);
  return differences;
}

TEST_CASE("each byte that differs is counted once, and none behind the end") {
  alignas(kAlignment) static std::byte one[kMaxBytes + kAlignment], other[kMaxBytes];
  for (const size_t offset : {0, 3})
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{16}, size_t{37}, kMaxBytes - 5, kMaxBytes}) {
      CAPTURE(offset);
      CAPTURE(bytes);
      std::fill(std::begin(one), std::end(one), std::byte{0});
      one[offset + bytes] = std::byte{1};
      CHECK(num_differences(one + offset, other, bytes) == 0);
      unsigned long long changed = 0;
      for (size_t i = 0; i < bytes; i += 1 + i / 7, ++changed) // neighbours at first, then ever fewer
        one[offset + bytes - 1 - i] = std::byte{1} << static_cast<int>(i % 8);
      CHECK(num_differences(one + offset, other, bytes) == changed);
    }
}

} // namespace
} // namespace epx::test
