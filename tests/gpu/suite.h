// SPDX-License-Identifier: Apache-2.0
// The programs of this folder share this code; epx_test_launch starts each of them once per rank.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>

#include "tests/support/launcher.h"

namespace epx::test {

using RankTest = std::function<void(const RankContext&)>;

// Runs the tests one after the other as this rank, on transport nccl, and returns main's exit code.
int run_suite(std::initializer_list<RankTest> tests);

// Returns the value after `name` on the command line, or `otherwise`.
long option(int argc, char** argv, const std::string& name, long otherwise);

} // namespace epx::test
