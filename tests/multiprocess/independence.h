// SPDX-License-Identifier: Apache-2.0
// `exact` combine has the same bits for every number of ranks: the tokens of one global problem are split over 1, 2, 3, 4 or
// 7 ranks.
#pragma once

#include <cstdint>
#include <string>

namespace epx::test {

// Runs a random global problem with several numbers of ranks (as threads) the way a user would: prepare, dispatch, a simple
// expert function, combine, and backward. Throws CheckFailure unless the outputs and gradients of all tokens have the same
// bits (NaN equal to NaN).
void check_independence(uint64_t seed, const std::string& transport);

} // namespace epx::test
