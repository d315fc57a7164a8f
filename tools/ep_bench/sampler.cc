// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/sampler.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "tools/ep_bench/measure.h"
#include "tools/ep_bench/stats.h"

namespace epx::bench {
namespace {

constexpr size_t kLeastForInterval = 6; // fewer values have no 95 % interval of their median by order statistics

// Warm-up ends when the medians of two batches differ by no more than this, and at the latest after so many batches or so much
// of the budget.
constexpr double kStable = 0.05;
constexpr int kWarmupBatch = 5, kMaxWarmup = 50;
constexpr double kWarmupPart = 0.25;

// The first decision comes after so many timed iterations, and each later one after a quarter more: decisions cost all-gathers,
// and an interval that is looked at seldom is left by chance seldom.
constexpr int kFirstBatch = 20, kGrowth = 4;
constexpr int kMaxTimed = 100'000;

} // namespace

bool is_converged(const std::vector<double>& times, double percent) {
  if (times.size() < kLeastForInterval) return false;
  const double middle = median(times);
  const Interval interval = median_interval(times);
  return std::max(interval.hi - middle, middle - interval.lo) <= percent / 100 * middle;
}

StoppingRule::StoppingRule(const Options& options, size_t num_lines)
    : options_(options), needs_times_(options.noise.has_value()), times_(num_lines) {
  batch_ = options.warms_up_until_stable ? kWarmupBatch : options.warmup;
  if (batch_ == 0) begin_timed();
}

double StoppingRule::budget_s() const {
  return options_.noise->budget_s * static_cast<double>(times_.size());
}

void StoppingRule::begin_timed() {
  is_timed_ = true;
  elapsed_s_ = 0;
  batch_ = options_.noise ? kFirstBatch : options_.iterations;
}

void StoppingRule::add(const std::vector<std::vector<double>>& times, double elapsed_s) {
  elapsed_s_ += elapsed_s;
  if (is_timed_)
    after_timed(times, elapsed_s);
  else
    after_warmup(times, elapsed_s);
}

void StoppingRule::after_warmup(const std::vector<std::vector<double>>& times, double /*elapsed_s*/) {
  warmup_ += batch_;
  if (!options_.warms_up_until_stable) return begin_timed();
  std::vector<double> medians;
  medians.reserve(times.size());
  for (const std::vector<double>& of_line : times)
    medians.push_back(median(of_line));
  bool is_stable = !last_medians_.empty();
  for (size_t line = 0; is_stable && line < medians.size(); ++line)
    is_stable = std::abs(medians[line] - last_medians_[line]) <= kStable * last_medians_[line];
  last_medians_ = medians;
  if (is_stable || warmup_ >= kMaxWarmup || elapsed_s_ >= kWarmupPart * budget_s()) begin_timed();
}

void StoppingRule::after_timed(const std::vector<std::vector<double>>& times, double elapsed_s) {
  num_timed_ += batch_;
  if (!options_.noise) {
    batch_ = 0;
    return;
  }
  for (size_t line = 0; line < times.size(); ++line)
    times_[line].insert(times_[line].end(), times[line].begin(), times[line].end());
  const double left_s = budget_s() - elapsed_s_;
  const bool is_known = std::ranges::all_of(
      times_, [&](const std::vector<double>& of_line) { return is_converged(of_line, options_.noise->percent); });
  if (is_known || left_s <= 0 || num_timed_ >= kMaxTimed) {
    batch_ = 0;
    return;
  }
  const double fit = left_s / std::max(elapsed_s / batch_, 1e-9); // iterations that the rest of the budget has room for
  const int most = std::min(std::max(kFirstBatch / 2, num_timed_ / kGrowth), kMaxTimed - num_timed_);
  batch_ = static_cast<int>(std::clamp(fit, 1.0, static_cast<double>(most)));
}

Sampler::Sampler(const Options& options, size_t num_lines, const Peers& peers)
    : peers_(peers), rule_(options, num_lines), left_(rule_.batch()), mine_ns_(num_lines) {}

bool Sampler::next() {
  if (left_ == 0) end_batch();
  if (rule_.is_done()) return false;
  if (left_ == rule_.batch()) batch_began_ = std::chrono::steady_clock::now();
  --left_;
  ++iteration_;
  return true;
}

void Sampler::end_batch() {
  std::vector<std::vector<double>> times(mine_ns_.size());
  double elapsed_s = 0;
  if (rule_.needs_times()) {
    const std::chrono::duration<double> mine = std::chrono::steady_clock::now() - batch_began_;
    elapsed_s = peers_.gather(mine.count())[0];
    for (size_t line = 0; line < times.size(); ++line)
      times[line] = slowest_us(gather_durations(mine_ns_[line], peers_));
  }
  for (std::vector<int64_t>& of_line : mine_ns_)
    of_line.clear();
  rule_.add(times, elapsed_s);
  left_ = rule_.batch();
}

Options Sampler::counted(Options options) const {
  options.warmup = rule_.warmup();
  options.iterations = rule_.num_timed();
  return options;
}

} // namespace epx::bench
