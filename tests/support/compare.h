// SPDX-License-Identifier: Apache-2.0
// These functions compare what a call wrote with what it had to write. They throw CheckFailure with the first wrong element
// and the number of wrong ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/reference/reference.h"

namespace epx::test {

enum class NanRule {
  bits,   // copies: payloads too
  any_nan // computed values: a NaN equals any NaN
};

void check_rows(const std::string& what, const reference::Matrix& expected, std::span<const std::byte> actual,
                NanRule rule);
void check_floats(const std::string& what, std::span<const float> expected, std::span<const std::byte> actual,
                  NanRule rule);
void check_bytes(const std::string& what, std::span<const std::byte> expected, std::span<const std::byte> actual);

// `actual` holds elements of `dtype`, INT32 or INT64.
void check_integers(const std::string& what, std::span<const int64_t> expected, std::span<const std::byte> actual,
                    epx_dtype dtype);

} // namespace epx::test
