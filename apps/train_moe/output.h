// SPDX-License-Identifier: Apache-2.0
// train_moe writes JSON lines, the routing record, and a progress bar.
#pragma once

#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "apps/train_moe/options.h"
#include "apps/train_moe/trainer.h"
#include "apps/train_moe/world.h"

namespace train {

// A LineWriter writes JSON lines to a file, or to standard output for "". Rank 0 writes. Throws Error when the file cannot be
// written.
class LineWriter {
public:
  LineWriter(const std::string& option, const std::string& file);
  void write(const std::string& line);
  void close(); // throws if anything was lost

private:
  std::string option_, file_;
  std::ofstream stream_;
};

// A RoutingRecord has one line per layer, step and rank (docs/routing-record.md).
class RoutingRecord {
public:
  RoutingRecord(const World& world, const ModelOptions& model, const std::string& file);
  void write(int64_t step, const Model& model); // collective
  void close();

private:
  const World& world_;
  ModelOptions options_;
  std::unique_ptr<LineWriter> writer_; // only on rank 0
};

// A ProgressBar is drawn on standard error.
class ProgressBar {
public:
  ProgressBar(bool is_shown, int64_t first_step, int64_t last_step);
  ~ProgressBar();
  void update(int64_t step, double loss);

private:
  bool is_shown_;
  int64_t first_step_, last_step_;
  double begin_;
};

// Returns whether standard error, or that of mpirun when it started this process, is a terminal.
bool has_terminal();

} // namespace train
