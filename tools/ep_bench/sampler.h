// SPDX-License-Identifier: Apache-2.0
// Decides how often the calls of a point are made: exactly so often, or until their times are known well enough.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"

namespace epx::bench {

// Returns true when the 95 % interval of the median lies within so many percent of it; false for fewer than 6 times, which have
// no such interval.
bool is_converged(const std::vector<double>& times, double percent);

// A StoppingRule sees the times of batches of iterations and says what follows. Ranks that see the same decide the same.
class StoppingRule {
public:
  // Takes noise, warms_up_until_stable, iterations and warmup of the options.
  StoppingRule(const Options& options, size_t num_lines);

  bool is_timed() const { return is_timed_; }       // of the batch to come; false: it warms up
  bool is_done() const { return batch_ == 0; }      // no batch comes
  int batch() const { return batch_; }              // iterations of the batch to come
  bool needs_times() const { return needs_times_; } // else add() gets none
  int warmup() const { return warmup_; }            // iterations that were not timed
  int num_timed() const { return num_timed_; }      // iterations that were

  // Takes a batch that has ended: `times` [line][iteration] in microseconds, and how long it took.
  void add(const std::vector<std::vector<double>>& times, double elapsed_s);

private:
  void begin_timed();
  void after_warmup(const std::vector<std::vector<double>>& times, double elapsed_s);
  void after_timed(const std::vector<std::vector<double>>& times, double elapsed_s);
  double budget_s() const;

  Options options_;
  bool needs_times_;
  bool is_timed_ = false;
  int batch_ = 0, warmup_ = 0, num_timed_ = 0;
  double elapsed_s_ = 0;                   // of the current phase
  std::vector<double> last_medians_;       // [line], of the warm-up's last batch
  std::vector<std::vector<double>> times_; // [line][timed iteration]
};

// A Sampler walks through the iterations of a point on all ranks, by the StoppingRule. It tells rank 0's clock and the slowest
// rank's times to all ranks, between iterations.
class Sampler {
public:
  Sampler(const Options& options, size_t num_lines, const Peers& peers);

  // Goes to the next iteration, which all ranks do together; returns false when there is none.
  bool next();

  int iteration() const { return iteration_; } // from 0, the untimed ones too
  bool is_timed() const { return rule_.is_timed(); }
  void add(size_t line, int64_t mine_ns) { mine_ns_[line].push_back(mine_ns); } // this rank's time, in every iteration

  // Returns the options with the iterations that took place.
  Options counted(Options options) const;

private:
  void end_batch();

  const Peers& peers_;
  StoppingRule rule_;
  int iteration_ = -1, left_;
  std::chrono::steady_clock::time_point batch_began_;
  std::vector<std::vector<int64_t>> mine_ns_; // [line][iteration of the batch]
};

} // namespace epx::bench
