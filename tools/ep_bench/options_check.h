// SPDX-License-Identifier: Apache-2.0
// Refuses options that contradict each other or lie out of range.
#pragma once

#include <cstdint>

#include "tools/ep_bench/options.h"

namespace epx::bench {

// Throws UsageError with the option and the limits.
void check_range(const char* option, int64_t value, int64_t low, int64_t high);

// Checks one point of a sweep. Throws UsageError with the options and their values.
void check_point(const Options& options);

} // namespace epx::bench
