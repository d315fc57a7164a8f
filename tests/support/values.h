// SPDX-License-Identifier: Apache-2.0
// This test data has rows of values that are hard on arithmetic, and the bytes that outputs hold before a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/reference/reference.h"
#include "tests/support/rng.h"

namespace epx::test {

inline constexpr std::byte kScribble{0xA5}; // as an element of any dtype it is finite, and no test computes it

// Returns rows of values of mixed magnitude; every fourth row also has zeros of both signs, subnormals, infinities and NaNs
// with payloads.
// Rows of quantised elements have any bytes.
reference::Matrix random_rows(epx_dtype dtype, int64_t rows, int64_t cols, Rng& rng);

// Returns rows of FLOAT32, FLOAT16 or BFLOAT16 whose blocks are hard on a quantiser. Every other row has blocks of zeros, of
// subnormals, of one magnitude, of small and of large numbers, and of those that random_rows has in every fourth row. Of the
// others every other one has an infinity near its end.
reference::Matrix random_blocks(epx_dtype dtype, int64_t rows, int64_t cols, Rng& rng);
std::vector<float> random_weights(int64_t count, Rng& rng);
reference::Sidecar random_sidecar(int64_t rows, int64_t row_bytes, Rng& rng);

reference::Matrix scribbled_rows(epx_dtype dtype, int64_t rows, int64_t cols);
std::vector<float> scribbled_weights(int64_t count);
reference::Sidecar scribbled_sidecar(int64_t rows, int64_t row_bytes);

} // namespace epx::test
