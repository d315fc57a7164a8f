// SPDX-License-Identifier: Apache-2.0
// Text has the bytes that are learnt and those that are held out, and chooses which bytes a step predicts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "apps/train_moe/options.h"

namespace train {

struct Text {
  std::vector<unsigned char> bytes;
  int64_t num_train = 0; // bytes before the held-out ones

  int64_t size() const { return static_cast<int64_t>(bytes.size()); }
  double unigram_entropy() const; // of all bytes, nats per byte
  uint64_t hash() const;          // FNV-1a, to tell texts apart
};

// Throws Error when the file cannot be read, is not a regular file or has more than 1 GiB, or is shorter than a batch.
Text read_text(const std::string& file, const ModelOptions& model);

// Returns the positions of all bytes that `step` predicts, the same on every rank.
std::vector<int64_t> train_positions(const Text& text, const ModelOptions& model, int64_t step);

// Returns the positions of all held-out bytes.
std::vector<int64_t> held_out_positions(const Text& text, const ModelOptions& model);

} // namespace train
