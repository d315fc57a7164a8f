// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/suite.h"

#include <cstdio>
#include <cstdlib>

#include "tests/support/check.h"

namespace epx::test {

int run_suite(std::initializer_list<RankTest> tests) {
  try {
    const char* directory = std::getenv("EPX_TEST_DIR");
    check(directory != nullptr, "EPX_TEST_DIR is not set: start this through epx_test_launch");
    const auto launcher = make_file_launcher("nccl", "EPX_TEST_RANK", "EPX_TEST_RANKS", directory);
    for (const RankTest& test : tests)
      launcher->each_rank(test);
    std::printf("%lld checks passed\n", static_cast<long long>(num_checks()));
    return 0;
  } catch (const Skipped& reason) {
    std::fprintf(stderr, "skipped: %s\n", reason.what());
    return kSkippedExitCode;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", describe(error).c_str());
    std::_Exit(1); // no destructors: they may wait for peers that are gone
  }
}

long option(int argc, char** argv, const std::string& name, long otherwise) {
  for (int i = 1; i + 1 < argc; i += 2)
    if (name == argv[i]) return std::atol(argv[i + 1]);
  return otherwise;
}

} // namespace epx::test
