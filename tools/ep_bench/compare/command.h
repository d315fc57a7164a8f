// SPDX-License-Identifier: Apache-2.0
// `ep_bench compare A.json B.json`: it measures nothing, and needs neither other ranks nor MPI.
#pragma once

#include <span>
#include <string_view>

namespace epx::bench {

inline constexpr std::string_view kCompare = "compare"; // the first argument

// Runs the command; `arguments` begin with its name. Returns the exit status: 0; kExitFailure with --fail-if-slower; kExitUsage for
// bad arguments and files, after one sentence to standard error.
int run_compare(std::span<const char* const> arguments);

} // namespace epx::bench
