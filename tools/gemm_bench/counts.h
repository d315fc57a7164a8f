// SPDX-License-Identifier: Apache-2.0
// How many rows the experts of a GPU get.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace epx::bench {

// Returns the rows of each group, about `rows` in all. Throws when the routing is none.
inline std::vector<int32_t> draw_counts(const std::string& routing, int64_t rows, int groups) {
  std::vector<int32_t> counts(groups);
  std::mt19937_64 random(1);
  if (routing == "uniform") {
    for (int g = 0; g < groups; ++g)
      counts[g] = static_cast<int32_t>(rows * (g + 1) / groups - rows * g / groups);
  } else if (routing == "binomial") { // each of the tokens of all ranks is routed to 8 of 256 experts
    constexpr int kTopK = 8, kExperts = 256;
    const int64_t tokens = rows * kExperts / (int64_t{kTopK} * groups);
    std::binomial_distribution<int32_t> draw(static_cast<int32_t>(tokens), static_cast<double>(kTopK) / kExperts);
    for (int32_t& count : counts)
      count = draw(random);
  } else if (routing.rfind("zipf:", 0) == 0) {
    const double exponent = std::stod(routing.substr(5));
    double sum = 0;
    for (int g = 0; g < groups; ++g)
      sum += std::pow(g + 1, -exponent);
    for (int g = 0; g < groups; ++g)
      counts[g] = static_cast<int32_t>(static_cast<double>(rows) * std::pow(g + 1, -exponent) / sum);
    std::shuffle(counts.begin(), counts.end(), random);
  } else {
    throw std::runtime_error(fmt::format("--routing is {}; it must be uniform, binomial or zipf:EXPONENT", routing));
  }
  return counts;
}

} // namespace epx::bench
