// SPDX-License-Identifier: Apache-2.0
// main of the tests of epx_moe.h: [--device cuda] and doctest's options. Without a GPU, cuda is skipped (exit status 77).
#include <cstdio>
#include <string_view>

#include <doctest/doctest.h>

#include "tests/moe/device.h"

int main(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; ++i)
    if (argv[i] == std::string_view("--device") && argv[i + 1] == std::string_view("cuda") && !epx::test::use_cuda()) {
      std::puts("skipped: there is no GPU");
      return 77;
    }
  const int status = doctest::Context(argc, argv).run();
  if (epx::test::broken_guards() == 0) return status;
  std::printf("%lld guard zones around tensors were written to\n", static_cast<long long>(epx::test::broken_guards()));
  return 1;
}
