// SPDX-License-Identifier: Apache-2.0
// These tests check ep_bench's intervals and outliers against tables and against series whose median is known.
#include <algorithm>
#include <cstddef>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "tools/ep_bench/stats.h"

namespace epx::bench {
namespace {

std::vector<double> up_to(int n) {
  std::vector<double> values(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i)
    values[static_cast<size_t>(i)] = n - i; // backwards: the order of the values does not matter
  return values;
}

TEST_CASE("ep_bench interval of the median: the order statistics of the binomial distribution") {
  struct Row {
    int n;
    int lo; // the interval goes from the lo-th to the (n + 1 - lo)-th smallest value
  };
  // Fewer than 6 values, then the sign test's critical values at 5 %, two-sided, and 10000 by the normal approximation.
  const std::vector<Row> table{{1, 1},  {2, 1},  {5, 1},   {6, 1},    {8, 1},      {9, 2},      {11, 2},      {12, 3},
                               {20, 6}, {25, 8}, {50, 18}, {100, 40}, {1000, 469}, {2000, 956}, {10000, 4902}};
  for (const Row& row : table) {
    CAPTURE(row.n);
    const Interval interval = median_interval(up_to(row.n));
    CHECK(interval.lo == row.lo);
    CHECK(interval.hi == row.n + 1 - row.lo);
  }
}

TEST_CASE("ep_bench interval of the median covers the median 95 % of the time, of skewed values too") {
  std::mt19937_64 random(51);
  std::lognormal_distribution<double> skewed(0, 1); // its median is 1
  constexpr int kTrials = 2000;
  int covered = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::vector<double> values(100);
    std::ranges::generate(values, [&] { return skewed(random); });
    const Interval interval = median_interval(values);
    covered += interval.lo <= 1 && 1 <= interval.hi;
  }
  CHECK(covered >= 0.95 * kTrials);
  CHECK(covered <= 0.98 * kTrials); // 96.5 % by the binomial distribution: the interval is not wider than need be
}

TEST_CASE("ep_bench outliers: beyond 3 interquartile ranges") {
  // The quartiles of 1 to 8 are 2 and 6, by nearest rank, so an outlier lies below -10 or above 18.
  CHECK(count_outliers({1, 2, 3, 4, 5, 6, 7, 8}) == 0);
  CHECK(count_outliers({-10, 2, 3, 4, 5, 6, 7, 18}) == 0);
  CHECK(count_outliers({-10.5, 2, 3, 4, 5, 6, 7, 18.5}) == 2);
  CHECK(count_outliers({3}) == 0);
}

} // namespace
} // namespace epx::bench
