// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>

#include "apps/train_moe/errors.h"
#include "apps/train_moe/files.h"

namespace train {
namespace {

constexpr int64_t kHeldOutPart = 10;                // one tenth of the text
constexpr int64_t kMaxTextBytes = int64_t{1} << 30; // every rank holds all of it

} // namespace

double Text::unigram_entropy() const {
  std::array<int64_t, 256> counts{};
  for (const unsigned char byte : bytes)
    ++counts[byte];
  double entropy = 0;
  for (const int64_t count : counts) {
    if (count == 0) continue;
    const double p = static_cast<double>(count) / static_cast<double>(size());
    entropy -= p * std::log(p);
  }
  return entropy;
}

uint64_t Text::hash() const {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const unsigned char byte : bytes)
    hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

Text read_text(const std::string& file, const ModelOptions& model) {
  Text text;
  text.bytes = read_file("--text", file, kMaxTextBytes);
  text.num_train = text.size() - text.size() / kHeldOutPart;
  const int64_t needed = static_cast<int64_t>(model.context) + model.batch;
  if (text.num_train < needed || text.size() - text.num_train < 1)
    fail(kExitUsage, "--text {} has {} bytes, {} of them to learn from; a batch needs --context {} + --batch {} = {}", file,
         text.size(), text.num_train, model.context, model.batch, needed);
  return text;
}

std::vector<int64_t> train_positions(const Text& text, const ModelOptions& model, int64_t step) {
  std::seed_seq words{static_cast<uint32_t>(model.seed), static_cast<uint32_t>(model.seed >> 32),
                      static_cast<uint32_t>(step)};
  std::mt19937_64 random(words);
  std::vector<int64_t> positions(model.batch);
  const auto choices = static_cast<uint64_t>(text.num_train - model.context);
  for (int64_t& position : positions)
    position = model.context + static_cast<int64_t>(random() % choices);
  return positions;
}

std::vector<int64_t> held_out_positions(const Text& text, const ModelOptions& model) {
  const int64_t first = std::max<int64_t>(text.num_train, model.context);
  std::vector<int64_t> positions(text.size() - first);
  std::iota(positions.begin(), positions.end(), first);
  return positions;
}

} // namespace train
