// SPDX-License-Identifier: Apache-2.0
// These tests check ep_bench compare's verdicts on series whose difference is known: normal, skewed, bimodal and drifting ones.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "tools/ep_bench/compare/estimate.h"
#include "tools/ep_bench/stats.h"

namespace epx::bench {
namespace {

using Random = std::mt19937_64;

// A Shape draws the time of iteration i of n, as a multiple of the series' usual time.
struct Shape {
  const char* name;
  std::function<double(Random&, double progress)> draw;
};

double normal(Random& random, double deviation) {
  return 1 + std::normal_distribution<double>(0, deviation)(random);
}

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all{
      {"normal", [](Random& random, double) { return normal(random, 0.02); }},
      {"skewed", [](Random& random, double) { return std::exp(std::normal_distribution<double>(0, 0.03)(random)); }},
      // One iteration in five runs at another clock.
      {"bimodal",
       [](Random& random, double) { return (std::bernoulli_distribution(0.2)(random) ? 1.06 : 1) * normal(random, 0.01); }},
      // The clock sinks by 2 % as the GPU warms up.
      {"drifting", [](Random& random, double progress) { return (1 + 0.02 * progress) * normal(random, 0.01); }},
  };
  return all;
}

StartMedian summary(const std::vector<double>& times) {
  return {median(times), median_interval(times), std::ssize(times)};
}

// Runs a build that is `slowdown` times as slow in one start, whose addresses and clocks change all times by a factor.
StartMedian run(Random& random, const Shape& shape, double slowdown, const Tolerance& tolerance) {
  constexpr int kIterations = 200;
  const double usual_us = 80 * slowdown * normal(random, tolerance.between_starts);
  std::vector<double> times;
  for (int i = 0; i < kIterations; ++i)
    times.push_back(usual_us * shape.draw(random, static_cast<double>(i) / kIterations));
  return summary(times);
}

std::vector<StartMedian> runs(int starts, Random& random, const Shape& shape, double slowdown, const Tolerance& tolerance) {
  std::vector<StartMedian> result;
  for (int start = 0; start < starts; ++start)
    result.push_back(run(random, shape, slowdown, tolerance));
  return result;
}

Estimate exactly(double us, double half_percent) {
  return {us, {us / (1 + half_percent / 100), us * (1 + half_percent / 100)}};
}

const Tolerance& host() {
  return tolerance_of(EPX_TRANSPORT_HOST);
}
const Tolerance& nccl() {
  return tolerance_of(EPX_TRANSPORT_NCCL);
}

constexpr int kPairs = 200;

// How many starts find what is to be found; on a host it takes many.
std::vector<int> numbers_of_starts(const Tolerance& tolerance) {
  return &tolerance == &host() ? std::vector<int>{48} : std::vector<int>{1, 2, 5, 8};
}

TEST_CASE("ep_bench compare: two runs of one build are the same in 95 % of pairs, of one start and of several") {
  Random random(51);
  for (const Tolerance* tolerance : {&host(), &nccl()})
    for (const Shape& shape : shapes())
      for (const int starts : numbers_of_starts(*tolerance)) {
        int same = 0, told_apart = 0;
        for (int pair = 0; pair < kPairs; ++pair) {
          const Estimate a = estimate(runs(starts, random, shape, 1, *tolerance), *tolerance);
          const Estimate b = estimate(runs(starts, random, shape, 1, *tolerance), *tolerance);
          const Verdict verdict = compare(a, b, *tolerance).verdict;
          same += verdict == Verdict::Same;
          told_apart += verdict == Verdict::Slower || verdict == Verdict::Faster;
        }
        CAPTURE(shape.name);
        CAPTURE(starts);
        CAPTURE(tolerance->same);
        CHECK(same >= 0.95 * kPairs);
        CHECK(told_apart <= 0.025 * kPairs);
      }
}

TEST_CASE("ep_bench compare: a build that is slower by 3 % on GPUs and 10 % on the host is called so in 90 % of pairs") {
  Random random(51);
  for (const Tolerance* tolerance : {&host(), &nccl()})
    for (const Shape& shape : shapes())
      for (const int starts : numbers_of_starts(*tolerance)) {
        const double slowdown = tolerance == &host() ? 1.1 : 1.03;
        int slower = 0, faster = 0;
        for (int pair = 0; pair < kPairs; ++pair) {
          const Estimate before = estimate(runs(starts, random, shape, 1, *tolerance), *tolerance);
          const Estimate after = estimate(runs(starts, random, shape, slowdown, *tolerance), *tolerance);
          slower += compare(before, after, *tolerance).verdict == Verdict::Slower;
          faster += compare(after, before, *tolerance).verdict == Verdict::Faster;
        }
        CAPTURE(shape.name);
        CAPTURE(starts);
        CAPTURE(slowdown);
        CHECK(slower >= 0.9 * kPairs);
        CHECK(faster == slower);
      }
}

TEST_CASE("ep_bench compare: a run is the same as itself, and swapped runs give the inverse ratio and verdict") {
  Random random(51);
  std::uniform_real_distribution<double> slowdown(0.9, 1.1);
  for (const Tolerance* tolerance : {&host(), &nccl()})
    for (const Shape& shape : shapes())
      for (int pair = 0; pair < 100; ++pair) {
        const int starts = 1 + pair % 8;
        const Estimate a = estimate(runs(starts, random, shape, 1, *tolerance), *tolerance);
        const Estimate b = estimate(runs(starts, random, shape, slowdown(random), *tolerance), *tolerance);
        const Comparison itself = compare(a, a, *tolerance), forward = compare(a, b, *tolerance),
                         backward = compare(b, a, *tolerance);
        // On a host so few starts may leave the interval too wide.
        CHECK((itself.verdict == Verdict::Same || (tolerance == &host() && itself.verdict == Verdict::Ambiguous)));
        CHECK(itself.ratio == 1);
        CHECK(forward.ratio * backward.ratio == doctest::Approx(1));
        CHECK(forward.ratio_interval.lo * backward.ratio_interval.hi == doctest::Approx(1));
        CHECK(forward.ratio_interval.hi * backward.ratio_interval.lo == doctest::Approx(1));
        CHECK((forward.verdict == Verdict::Slower) == (backward.verdict == Verdict::Faster));
        CHECK((forward.verdict == Verdict::Same) == (backward.verdict == Verdict::Same));
      }
}

TEST_CASE("ep_bench compare: each verdict, from intervals") {
  const Tolerance tolerance{.between_starts = 0.003, .of_samples = 0.1, .margin = 0.005, .same = 0.03};
  const auto verdict = [&](double a_us, double b_us, double half_percent) {
    return std::string(to_string(compare(exactly(a_us, half_percent), exactly(b_us, half_percent), tolerance).verdict));
  };
  CHECK(verdict(100, 100, 1) == "same");
  CHECK(verdict(100, 101, 1) == "same");
  CHECK(verdict(100, 105, 1) == "slower"); // by 3.6 to 6.5 %
  CHECK(verdict(105, 100, 1) == "faster");
  CHECK(verdict(100, 101.8, 0.5) == "slower"); // less than `same`, and beyond the margin for certain
  CHECK(verdict(100, 100.4, 0.01) == "same");  // certain, and within the margin
  CHECK(verdict(100, 100, 3) == "ambiguous");  // too wide for either
  CHECK(verdict(100, 102.5, 2) == "ambiguous");
  CHECK(verdict(102.5, 100, 2) == "ambiguous");
}

TEST_CASE("ep_bench compare: the interval of a ratio has the sides of both medians") {
  const Tolerance tolerance{.between_starts = 0.003, .of_samples = 0.1, .margin = 0.005, .same = 0.03};
  const Estimate certain{100, {100, 100}}, high{100, {100, 104}}, low{100, {98, 100}};
  CHECK(compare(certain, high, tolerance).ratio_interval.lo == doctest::Approx(1));
  CHECK(compare(certain, high, tolerance).ratio_interval.hi == doctest::Approx(1.04));
  CHECK(compare(high, certain, tolerance).ratio_interval.lo == doctest::Approx(1 / 1.04));
  CHECK(compare(low, certain, tolerance).ratio_interval.hi == doctest::Approx(1 / 0.98));
  const double both = std::exp(std::hypot(std::log(1.04), std::log(0.98)));
  CHECK(compare(low, high, tolerance).ratio_interval.hi == doctest::Approx(both));
}

TEST_CASE("ep_bench compare: several starts count as variance") {
  const Tolerance tolerance{.between_starts = 0.01, .of_samples = 0.1, .margin = 0.01, .same = 0.1};
  const auto certain = [](std::vector<double> medians) {
    std::vector<StartMedian> starts;
    for (const double us : medians)
      starts.push_back({us, {us, us}, 100});
    return starts;
  };
  const auto half = [](const Estimate& of) { return std::log(of.interval_us.hi / of.us); };

  // One start says nothing of the variance: the assumed one, with Student's t for 4 degrees of freedom.
  CHECK(half(estimate(certain({100}), tolerance)) == doctest::Approx(2.776 * 0.01));
  // Equal starts: the assumed variance counts as 4 degrees of freedom of 8.
  CHECK(half(estimate(certain({100, 100, 100, 100, 100}), tolerance)) ==
        doctest::Approx(1.2 * 2.306 * 0.01 * std::sqrt(4.0 / 8) / std::sqrt(5)));
  const double step = std::exp(0.05);
  const Estimate three = estimate(certain({100 * step, 100 / step, 100}), tolerance);
  CHECK(three.us == 100);
  CHECK(half(three) == doctest::Approx(1.2 * 2.447 * std::sqrt((4 * 0.01 * 0.01 + 2 * 0.05 * 0.05) / 6) / std::sqrt(3)));

  // From 6 starts on only their own spread counts.
  const Estimate six = estimate(certain({103, 98, 99, 101, 102, 97}), tolerance);
  CHECK(six.us == 100);
  CHECK(six.interval_us.lo == doctest::Approx(97));
  CHECK(six.interval_us.hi == doctest::Approx(103));

  // The widest interval within a start comes on top, on its own side.
  const Estimate wide = estimate(
      std::vector<StartMedian>{
          {100, {100, 104}}, {100, {99, 100}}, {100, {100, 100}}, {100, {100, 100}}, {100, {100, 100}}, {100, {100, 100}}},
      tolerance);
  CHECK(wide.interval_us.hi == doctest::Approx(100 * std::pow(1.04, 1 / std::sqrt(6))));
  CHECK(wide.interval_us.lo == doctest::Approx(100 * std::pow(0.99, 1 / std::sqrt(6))));
}

TEST_CASE("ep_bench compare: on a busy machine runs of one build are ambiguous, and seldom faster or slower") {
  const Shape busy{"busy",
                   [](Random& random, double) { return std::exp(std::normal_distribution<double>(0, 0.3)(random)); }};
  const Tolerance truth{.between_starts = 0.12, .of_samples = 0, .margin = 0, .same = 0}; // what the starts differ by
  Random random(51);
  int told_apart = 0, same = 0;
  for (int pair = 0; pair < kPairs; ++pair) {
    const Verdict verdict = compare(estimate(runs(1, random, busy, 1, truth), host()),
                                    estimate(runs(1, random, busy, 1, truth), host()), host())
                                .verdict;
    told_apart += verdict == Verdict::Slower || verdict == Verdict::Faster;
    same += verdict == Verdict::Same;
  }
  CHECK(told_apart <= 0.05 * kPairs);
  CHECK(same == 0);

  const Tolerance tolerance{.between_starts = 0.01, .of_samples = 0.1, .margin = 0.01, .same = 0.1};
  // Its samples have a deviation of 0.49 * sqrt(100) / 2.456: 2.0.
  const Estimate wide = estimate(std::vector<StartMedian>{{1, {std::exp(-0.49), std::exp(0.49)}, 100}}, tolerance);
  const double of_samples = 2.776 * 0.1 * 0.49 * 10 / (1.96 * 1.2533);
  CHECK(std::log(wide.interval_us.hi) == doctest::Approx(std::hypot(of_samples, 0.49)));
}

TEST_CASE("ep_bench compare: the interval of several starts contains the build's time in 95 % of runs") {
  Random random(51);
  const Tolerance tolerance{.between_starts = 0.01, .of_samples = 0.1, .margin = 0.01, .same = 0.1};
  constexpr int kRuns = 1000;
  for (const int starts : {1, 2, 3, 5, 6, 9, 20}) {
    int contains = 0;
    for (int i = 0; i < kRuns; ++i) {
      const Interval interval = estimate(runs(starts, random, shapes().front(), 1, tolerance), tolerance).interval_us;
      contains += interval.lo <= 80 && 80 <= interval.hi;
    }
    CAPTURE(starts);
    CHECK(contains >= 0.95 * kRuns);
  }
}

} // namespace
} // namespace epx::bench
