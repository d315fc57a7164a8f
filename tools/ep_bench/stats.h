// SPDX-License-Identifier: Apache-2.0
// These functions compute statistics of series of times.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace epx::bench {

// Timing is when one rank began and ended a call, in nanoseconds of its steady clock. Ranks on one machine share that clock.
struct Timing {
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

using Series = std::vector<Timing>; // one per iteration

// The next functions take one Series per rank, of equal lengths.

// Returns the longest time of any rank in each iteration, in microseconds.
std::vector<double> slowest_us(std::span<const Series> ranks);

// Returns the rank that was the slowest most often; of several the lowest.
int most_often_slowest(std::span<const Series> ranks);

// Returns the time from the first rank's begin to the last rank's end in each iteration, in microseconds. Only for ranks of one
// machine.
std::vector<double> span_us(std::span<const Series> ranks);

// Returns the time from the first rank's begin to the last rank's begin in each iteration, in microseconds. Only for ranks of
// one machine.
std::vector<double> start_skew_us(std::span<const Series> ranks);

// These take at least one value. The median of an even number is the mean of the middle two; a percentile is by nearest rank.
double median(std::vector<double> values);
double percentile(std::vector<double> values, double percent);
double minimum(std::span<const double> values);

struct Interval {
  double lo = 0;
  double hi = 0;
};

// Returns the 95 % confidence interval of the median of what at least one value was drawn from, by order statistics: the k-th
// smallest to the k-th largest value, for the largest k at which the binomial distribution leaves at most 2.5 % on either side
// (Conover, Practical Nonparametric Statistics, 3.2). No shape of the distribution is assumed, and the values are taken as
// independent. From fewer than 6 values no such interval reaches 95 %, and the result is the smallest to the largest value.
Interval median_interval(std::vector<double> values);

// Returns how many of at least one value lie more than 3 interquartile ranges below the lower or above the upper quartile
// (Tukey's "far out").
int64_t count_outliers(const std::vector<double>& values);

} // namespace epx::bench
