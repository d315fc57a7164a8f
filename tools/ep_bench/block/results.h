// SPDX-License-Identifier: Apache-2.0
// What --block measured.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/ep_bench/options.h"

namespace epx::bench {

// The times of which a quarter is faster, and a quarter slower.
struct Quartiles {
  double low_us = 0, high_us = 0;
};

// BlockFigures are those of one line. Times are the slowest rank's of each iteration.
struct BlockFigures {
  std::string name;
  double median_us = 0;
  double p99_us = 0;
  double min_us = 0;
  Quartiles quartiles;
  std::vector<double> rounds_us; // the median of each round
  int slowest_rank = 0;
  std::optional<double> paused_us; // median after pauses, with --pause-ms
  std::optional<Quartiles> paused_quartiles;
  std::optional<double> tflops;          // of a rank; none where nothing is multiplied
  std::optional<double> dense_us;        // nccl: the dense bound's median
  std::optional<double> paused_dense_us; // the same after pauses
  std::optional<double> wire_us;         // --floor: the sum of the operations' wire bounds

  std::optional<double> ratio() const; // median / (dense + wire)
  std::optional<double> max_ratio() const;
};

// How far another layer's outputs are from the block's, with --verify or --dump; of the rows that are dumped.
struct BlockDifference {
  std::string layer; // "native", or the block with a recipe
  std::string tensor;
  double largest = 0; // |layer - block|, any element of any rank
  double scale = 0;   // the largest |block|
  double limit = 0;   // largest / scale may be so much

  bool passed() const { return largest <= limit * scale; } // false also for NaN
};

// What --gather measured of one form of the weights.
struct GatherFigures {
  GatherForm form = GatherForm::Wide;
  std::string line;             // of the gather alone: "gather"
  double median_us = 0;         // of that line
  int64_t received_bytes = 0;   // from other ranks, on the rank that receives most
  std::optional<int64_t> wrong; // --verify: elements that are not those of the ranks, all ranks together
  // (time of a step with the gather beside it / time of the step alone - 1) in percent, by the line of the step.
  std::vector<std::pair<std::string, double>> added_percent;
};

struct BlockResults {
  std::vector<BlockFigures> lines;
  std::vector<BlockDifference> differences;
  std::vector<GatherFigures> gathers = {};
  int32_t gathered_experts = 0;                      // --gather: E_l, of the layer whose weights are gathered
  std::map<std::string, std::string> libraries = {}; // versions of what CUDA programs load, by name
  std::string dump_failure = {};                     // why this rank could not write its files of --dump; empty: it could

  bool passed() const;                       // nothing differs by more than it may
  std::optional<double> fp8_to_wide() const; // the ratio of the two gathers' times, where both were measured
};

} // namespace epx::bench
