// SPDX-License-Identifier: Apache-2.0
// A Job is one run of train_moe: it reads its files, trains, and writes the results. Every function is collective.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "apps/train_moe/device.h"
#include "apps/train_moe/mesh.h"
#include "apps/train_moe/options.h"
#include "apps/train_moe/output.h"
#include "apps/train_moe/text.h"
#include "apps/train_moe/trainer.h"
#include "apps/train_moe/world.h"

namespace train {

class Job {
public:
  // Throws AgreedError for everything that can be refused, before a file of an earlier run is changed.
  Job(const World& world, const Options& options);

  void train();

  // Writes the errors of row formats if they are wanted. Measures the held-out loss, and writes the closing line and the table
  // of times.
  void finish();

private:
  void resume();
  void save(int64_t step);
  StepResult train_step(int64_t step);
  void write_format_errors();
  void print_times() const;

  const World& world_;
  const Options& options_;
  Text text_;
  Mesh mesh_;
  std::unique_ptr<Device> device_;                 // outlives the trainers
  std::vector<std::unique_ptr<Trainer>> trainers_; // one, or one per path side by side
  std::vector<std::vector<double>> seconds_;       // by trainer, of its steps
  StepResult last_;                                // of the last step
  int64_t done_ = 0;                               // steps before this run's first
  std::unique_ptr<LineWriter> log_;                // only on rank 0
  std::optional<RoutingRecord> routing_;
};

} // namespace train
