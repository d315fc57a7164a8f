// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/compare/estimate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace epx::bench {
namespace {

// Student's t for 97.5 % and 4 to 8 degrees of freedom: those of the assumed variance, and one for each start but the first.
constexpr std::array kStudent{2.776, 2.571, 2.447, 2.365, 2.306};
constexpr double kAssumedFreedom = 4;
// The standard error of the median of 5 normal values, over that of their mean; of 3 and 4 it is less, of 1 and 2 they are the same.
constexpr double kMedianError = 1.2;

// Sides are how far an interval goes below and above its middle, in logarithms.
struct Sides {
  double below = 0;
  double above = 0;
};

Sides sides_of(double middle, const Interval& interval) {
  return {std::log(middle / interval.lo), std::log(interval.hi / middle)};
}

// Combines the sides of independent errors.
Sides join(const Sides& one, const Sides& other) {
  return {std::hypot(one.below, other.below), std::hypot(one.above, other.above)};
}

Interval interval_of(double middle, const Sides& sides) {
  return {middle * std::exp(-sides.below), middle * std::exp(sides.above)};
}

double pooled_deviation(const std::vector<double>& medians, double assumed) {
  double mean = 0, squares = kAssumedFreedom * assumed * assumed;
  for (const double median : medians)
    mean += std::log(median) / static_cast<double>(medians.size());
  for (const double median : medians)
    squares += (std::log(median) - mean) * (std::log(median) - mean);
  return std::sqrt(squares / (kAssumedFreedom + static_cast<double>(medians.size() - 1)));
}

// Returns the standard deviation of the samples of a start, as their middle shows it: that of normal samples with this interval of
// their median, whose half is 1.96 standard errors of 1.25 deviations / sqrt(n).
double deviation_of_samples(const StartMedian& start) {
  constexpr double kHalfOfInterval = 1.96 * 1.2533;
  return std::log(start.interval_us.hi / start.interval_us.lo) / 2 * std::sqrt(static_cast<double>(start.samples)) /
         kHalfOfInterval;
}

Sides between_starts(std::span<const StartMedian> starts, const std::vector<double>& medians, double middle,
                     const Tolerance& tolerance) {
  const size_t n = medians.size();
  if (n > kStudent.size()) return sides_of(middle, median_interval(medians));
  double assumed = tolerance.between_starts;
  for (const StartMedian& start : starts)
    assumed = std::max(assumed, tolerance.of_samples * deviation_of_samples(start));
  const double error = (n > 2 ? kMedianError : 1) * pooled_deviation(medians, assumed);
  const double side = kStudent[n - 1] * error / std::sqrt(static_cast<double>(n));
  return {side, side};
}

Sides within_starts(std::span<const StartMedian> starts) {
  Sides widest;
  for (const StartMedian& start : starts) {
    const Sides sides = sides_of(start.us, start.interval_us);
    widest = {std::max(widest.below, sides.below), std::max(widest.above, sides.above)};
  }
  const double root = std::sqrt(static_cast<double>(starts.size()));
  return {widest.below / root, widest.above / root};
}

Verdict verdict_of(const Interval& ratio, const Tolerance& tolerance) {
  if (ratio.lo > 1 + tolerance.margin) return Verdict::Slower;
  if (1 / ratio.hi > 1 + tolerance.margin) return Verdict::Faster;
  return ratio.hi < 1 + tolerance.same && 1 / ratio.lo < 1 + tolerance.same ? Verdict::Same : Verdict::Ambiguous;
}

} // namespace

const Tolerance& tolerance_of(epx_transport transport) {
  // `same` is the change that is to be found. docs/ep_bench-json.md has the measured deviations between starts: on GPUs one start
  // finds it, on a host it takes many. tools/compare_check.py measures the deviation, and counts the verdicts of many pairs.
  static constexpr Tolerance kHost{.between_starts = 0.07, .of_samples = 0.3, .margin = 0.01, .same = 0.1};
  static constexpr Tolerance kNccl{.between_starts = 0.003, .of_samples = 0.1, .margin = 0.005, .same = 0.03};
  return transport == EPX_TRANSPORT_NCCL ? kNccl : kHost;
}

Estimate estimate(std::span<const StartMedian> starts, const Tolerance& tolerance) {
  std::vector<double> medians(starts.size());
  std::ranges::transform(starts, medians.begin(), &StartMedian::us);
  const double middle = median(medians);
  return {middle, interval_of(middle, join(between_starts(starts, medians, middle, tolerance), within_starts(starts)))};
}

const char* to_string(Verdict verdict) {
  switch (verdict) {
  case Verdict::Faster:
    return "faster";
  case Verdict::Slower:
    return "slower";
  case Verdict::Same:
    return "same";
  case Verdict::Ambiguous:
    break;
  }
  return "ambiguous";
}

Comparison compare(const Estimate& a, const Estimate& b, const Tolerance& tolerance) {
  const Sides of_a = sides_of(a.us, a.interval_us);
  const double ratio = b.us / a.us;
  // A ratio is large where B is large and A is small.
  const Interval interval = interval_of(ratio, join(sides_of(b.us, b.interval_us), {of_a.above, of_a.below}));
  return {ratio, interval, verdict_of(interval, tolerance)};
}

} // namespace epx::bench
