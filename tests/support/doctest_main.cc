// SPDX-License-Identifier: Apache-2.0
// This is main() of the programs that have no other.
#include <doctest/doctest.h>

int main(int argc, char** argv) {
  return doctest::Context(argc, argv).run();
}
