// SPDX-License-Identifier: Apache-2.0
// This is main() of the programs that have no other.
#include "tests/support/run_test_cases.h"

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  return epx::test::run_test_cases(context, argc, argv);
}
