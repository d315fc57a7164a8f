// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/stats.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace epx::bench {
namespace {

constexpr double kNsPerUs = 1e3;
constexpr double kTail = 0.025; // on either side of an interval of 95 %
constexpr double kOutlierRanges = 3;

// Returns one value per iteration, from one column of timings.
template <typename Reduce>
std::vector<double> per_iteration_us(std::span<const Series> ranks, Reduce&& reduce) {
  std::vector<double> values(ranks.front().size());
  for (size_t iteration = 0; iteration < values.size(); ++iteration)
    values[iteration] = static_cast<double>(reduce(iteration)) / kNsPerUs;
  return values;
}

int64_t elapsed_ns(const Timing& timing) {
  return timing.end_ns - timing.begin_ns;
}

int64_t first_begin(std::span<const Series> ranks, size_t iteration) {
  return std::ranges::min_element(ranks, {}, [=](const Series& series) { return series[iteration].begin_ns; })
      ->at(iteration)
      .begin_ns;
}

const Series& slowest(std::span<const Series> ranks, size_t iteration) {
  return *std::ranges::max_element(ranks, {}, [=](const Series& series) { return elapsed_ns(series[iteration]); });
}

// Returns how many of the smallest values lie below the interval of the median of n values; as many lie above it.
size_t skipped_by_median_interval(size_t n) {
  // The number of values below the median is binomial with p = 1/2. Logarithms, since 2^-n is 0 in a double from n = 1075 on.
  double log_probability = -static_cast<double>(n) * std::numbers::ln2;
  double tail = std::exp(log_probability);
  size_t skipped = 0;
  while (skipped + 1 < n) {
    log_probability += std::log(static_cast<double>(n - skipped) / static_cast<double>(skipped + 1));
    tail += std::exp(log_probability);
    if (tail > kTail) break;
    ++skipped;
  }
  return skipped;
}

} // namespace

std::vector<double> slowest_us(std::span<const Series> ranks) {
  return per_iteration_us(ranks, [=](size_t i) { return elapsed_ns(slowest(ranks, i)[i]); });
}

int most_often_slowest(std::span<const Series> ranks) {
  std::vector<int> times(ranks.size());
  for (size_t i = 0; i < ranks.front().size(); ++i)
    ++times[&slowest(ranks, i) - ranks.data()];
  return static_cast<int>(std::ranges::max_element(times) - times.begin());
}

std::vector<double> span_us(std::span<const Series> ranks) {
  return per_iteration_us(ranks, [=](size_t i) {
    const auto last = std::ranges::max_element(ranks, {}, [=](const Series& series) { return series[i].end_ns; });
    return last->at(i).end_ns - first_begin(ranks, i);
  });
}

std::vector<double> start_skew_us(std::span<const Series> ranks) {
  return per_iteration_us(ranks, [=](size_t i) {
    const auto last = std::ranges::max_element(ranks, {}, [=](const Series& series) { return series[i].begin_ns; });
    return last->at(i).begin_ns - first_begin(ranks, i);
  });
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double percentile(std::vector<double> values, double percent) {
  std::ranges::sort(values);
  const double rank = std::ceil(percent / 100 * static_cast<double>(values.size()));
  return values[std::clamp<size_t>(static_cast<size_t>(rank), 1, values.size()) - 1];
}

double minimum(std::span<const double> values) {
  return *std::ranges::min_element(values);
}

Interval median_interval(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t skipped = skipped_by_median_interval(values.size());
  return {values[skipped], values[values.size() - 1 - skipped]};
}

int64_t count_outliers(const std::vector<double>& values) {
  const double lower = percentile(values, 25);
  const double upper = percentile(values, 75);
  const double distance = kOutlierRanges * (upper - lower);
  return std::ranges::count_if(values, [=](double value) { return value < lower - distance || value > upper + distance; });
}

} // namespace epx::bench
