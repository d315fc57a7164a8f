// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/pacer.h"

#include <cstdio>
#include <iostream>
#include <string>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"

namespace epx::bench {

void Pacer::begin() const {
  std::string line;
  if (is_paced_ && !std::getline(std::cin, line))
    throw RuntimeError(fmt::format("--paced: standard input ended before phase {}", phase_));
}

void Pacer::end() {
  if (is_paced_) {
    fmt::print("phase {} done\n", phase_);
    std::fflush(stdout);
  }
  ++phase_;
}

} // namespace epx::bench
