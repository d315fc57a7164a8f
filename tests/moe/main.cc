// SPDX-License-Identifier: Apache-2.0
// main of the tests of epx_moe.h: [--device cuda] [--cases N] and doctest's options. Without a GPU, cuda is skipped (exit
// status 77). N is the number of random FFNs of each kind on CUDA; there are ten times as many random permutations and
// backwards of the router.
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <doctest/doctest.h>

#include "tests/moe/device.h"

namespace {
uint64_t chosen_cases = 0; // by --cases
} // namespace

uint64_t epx::test::num_cases(uint64_t otherwise) {
  return chosen_cases > 0 ? chosen_cases : otherwise;
}

int main(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (argv[i] == std::string_view("--device") && argv[i + 1] == std::string_view("cuda") && !epx::test::use_cuda()) {
      std::puts("skipped: there is no GPU");
      return 77;
    }
    if (argv[i] == std::string_view("--cases")) chosen_cases = std::strtoull(argv[i + 1], nullptr, 10);
  }
  const int status = doctest::Context(argc, argv).run();
  if (epx::test::broken_guards() == 0) return status;
  std::printf("%lld guard zones around tensors were written to\n", static_cast<long long>(epx::test::broken_guards()));
  return 1;
}
