// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/shape.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

namespace epx::bench {
namespace {

// Returns each expert's place in the order by popularity, 0 first.
std::vector<int32_t> places_of(const Options& options) {
  const BlockStream stream(options.seed, BlockTensor::Popularity, 0);
  std::vector<int32_t> order(options.experts), places(options.experts);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](int32_t expert) { return stream.at(static_cast<uint32_t>(expert)); });
  for (int32_t place = 0; place < options.experts; ++place)
    places[order[place]] = place;
  return places;
}

} // namespace

float weight_scale(int64_t fan_in) {
  return static_cast<float>(std::exp2(std::floor(0.5 * std::log2(3.0 / static_cast<double>(fan_in)) + 0.5)));
}

std::vector<float> block_logits(const Options& options, int set, int rank) {
  const BlockStream stream(options.seed, BlockTensor::Logits, token_part(set, rank));
  const std::vector<int32_t> places = places_of(options);
  const double expert_step = 0x1p-19;
  const double step = expert_step * std::bit_ceil(static_cast<uint32_t>(options.experts));
  std::vector<double> log_weights(options.experts);
  for (int32_t expert = 0; expert < options.experts; ++expert)
    log_weights[expert] = -options.routing.zipf_exponent * std::log(1.0 + places[expert]);

  std::vector<float> logits(static_cast<size_t>(options.tokens) * options.experts);
  for (size_t i = 0; i < logits.size(); ++i) {
    const auto expert = static_cast<int32_t>(i % options.experts);
    const double uniform = (static_cast<double>(stream.at(static_cast<uint32_t>(i)) >> 8) + 0.5) * 0x1p-24;
    const double gumbel = -std::log(-std::log(uniform));
    logits[i] = static_cast<float>(std::floor((gumbel + log_weights[expert]) / step) * step + expert * expert_step);
  }
  return logits;
}

std::vector<int64_t> block_topk_idx(const Options& options, int set, int rank) {
  const std::vector<float> logits = block_logits(options, set, rank);
  std::vector<int64_t> topk_idx;
  std::vector<int64_t> experts(options.experts);
  for (int64_t token = 0; token < options.tokens; ++token) {
    const float* const of_token = logits.data() + token * options.experts;
    std::iota(experts.begin(), experts.end(), 0);
    std::ranges::partial_sort(experts, experts.begin() + options.top_k, std::ranges::greater(),
                              [&](int64_t expert) { return of_token[expert]; });
    topk_idx.insert(topk_idx.end(), experts.begin(), experts.begin() + options.top_k);
  }
  return topk_idx;
}

std::vector<std::byte> block_elements(const Options& options, const BlockStream& stream, int64_t count, float scale) {
  std::vector<std::byte> bytes(epx::row_bytes(options.dtype, count));
  for (int64_t i = 0; i < count; ++i) {
    const float value = stream.symmetric(static_cast<uint32_t>(i)) * scale;
    if (options.dtype == EPX_BFLOAT16) {
      const uint16_t bits = bf16_bits(value);
      std::memcpy(bytes.data() + i * sizeof(bits), &bits, sizeof(bits));
    } else {
      std::memcpy(bytes.data() + i * sizeof(value), &value, sizeof(value));
    }
  }
  return bytes;
}

double forward_flops(const Options& options) {
  return 6.0 * options.tokens * options.top_k * options.hidden * options.block.ffn;
}

} // namespace epx::bench
