// SPDX-License-Identifier: Apache-2.0
// Runs doctest's test cases, and checks the filters that chose them.
#pragma once

#include <doctest/doctest.h>

namespace epx::test {

// Runs the test cases that the arguments choose, which are also those of `context`. Returns 0 when all of them have passed, and
// each pattern of --test-case, --source-file and --test-case-exclude has chosen one: a filter for a case that has been renamed
// would pass by testing nothing. Returns kSkippedExitCode when this machine can run none of the program's cases
// (doctest::skip).
int run_test_cases(doctest::Context& context, int argc, const char* const* argv);

} // namespace epx::test
