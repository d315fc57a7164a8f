// What the programs of this folder have in common: each is started once per rank by epx_test_launch.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>

#include "tests/support/launcher.h"

namespace epx::test {

using RankTest = std::function<void(const RankContext&)>;

// Runs the tests one after the other as this rank, on transport nccl. Returns main's exit code.
int run_suite(std::initializer_list<RankTest> tests);

// The value after `name` on the command line, or `otherwise`.
long option(int argc, char** argv, const std::string& name, long otherwise);

} // namespace epx::test
