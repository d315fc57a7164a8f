// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/workload/workload.h"

#include <cstring>

#include "tools/ep_bench/block/shape.h"
#include "tools/ep_bench/row_format.h"
#include "tools/ep_bench/workload/random.h"
#include "tools/ep_bench/workload/routing.h"

namespace epx::bench {
namespace {

// First key words of the streams, so that no two tensors share numbers.
enum : uint64_t { kTokens = 1, kTopkWeights, kGradOut, kExpertOut, kGradRecv, kGradRecvWeights, kScales, kRowScales };

// Assembles a random sign and mantissa and one of the exponents -3..0 without a conversion.
struct ElementBits {
  int mantissa_bits;
  int sign_bit;
  uint64_t lowest_exponent; // biased

  uint32_t from(uint64_t random) const {
    const uint64_t mantissa = random & ((uint64_t{1} << mantissa_bits) - 1);
    const uint64_t exponent = lowest_exponent + ((random >> mantissa_bits) & 3);
    const uint64_t sign = (random >> (mantissa_bits + 2)) & 1;
    return static_cast<uint32_t>(sign << sign_bit | exponent << mantissa_bits | mantissa);
  }
};

template <typename Bits>
void fill(std::vector<std::byte>& bytes, const RandomStream& random, ElementBits layout) {
  constexpr int kPerDraw = sizeof(uint64_t) / sizeof(Bits);
  const size_t count = bytes.size() / sizeof(Bits);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t draw = random.at(i / kPerDraw) >> (i % kPerDraw * 8 * sizeof(Bits));
    const auto bits = static_cast<Bits>(layout.from(draw));
    std::memcpy(bytes.data() + i * sizeof(Bits), &bits, sizeof(Bits));
  }
}

RandomStream stream_of_set(uint64_t purpose, uint64_t seed, int set, int rank) {
  return {purpose, seed, static_cast<uint64_t>(set), static_cast<uint64_t>(rank)};
}

// Quantised rows are copied, so that any bytes will do.
std::vector<std::byte> any_bytes(const RandomStream& random, int64_t count) {
  std::vector<std::byte> bytes(count);
  for (int64_t i = 0; i < count; ++i)
    bytes[i] = static_cast<std::byte>(random.at(i / 8) >> (i % 8 * 8));
  return bytes;
}

std::vector<float> weights(const RandomStream& random, int64_t count) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i)
    values[i] = static_cast<float>(random.at(i) >> 40) * 0x1p-24f;
  return values;
}

} // namespace

Workload::Workload(const Options& options, int num_ranks) : options_(options), num_ranks_(num_ranks) {
  if (options.routing.kind == RoutingSpec::Kind::Text) words_ = read_words(options.routing.text_file);
}

std::vector<int64_t> Workload::topk_idx(int set, int rank) const {
  if (options_.block.is_measured) return block_topk_idx(options_, set, rank); // what the block's router will select
  const RoutingShape shape{options_.tokens, options_.experts, options_.top_k, options_.seed};
  switch (options_.routing.kind) {
  case RoutingSpec::Kind::Zipf:
    return zipf_routing(shape, options_.routing.zipf_exponent, set, rank);
  case RoutingSpec::Kind::Hot:
    return hot_routing(shape, options_.routing.hot_fraction, set, rank);
  case RoutingSpec::Kind::Text:
    return text_routing(shape, words_, set, rank, num_ranks_);
  case RoutingSpec::Kind::Uniform:
    break;
  }
  return uniform_routing(shape, set, rank);
}

TokenInputs Workload::token_inputs(int set, int rank) const {
  const int64_t routes = int64_t{options_.tokens} * options_.top_k;
  TokenInputs inputs{.topk_idx = topk_idx(set, rank),
                     .topk_weights = weights(stream_of_set(kTopkWeights, options_.seed, set, rank), routes),
                     .tokens = {},
                     .grad_out = elements(kGradOut, set, rank, options_.tokens),
                     .scales = {},
                     .row_scales = {}};
  if (!options_.has_quantised_input) {
    inputs.tokens = elements(kTokens, set, rank, options_.tokens);
    return inputs;
  }
  const QuantisedRow row = quantised_row(options_);
  const auto bytes = [&](uint64_t purpose, epx_dtype dtype, int64_t columns) {
    return any_bytes(stream_of_set(purpose, options_.seed, set, rank), options_.tokens * epx::row_bytes(dtype, columns));
  };
  inputs.tokens = bytes(kTokens, row.elements, options_.hidden);
  inputs.scales = bytes(kScales, row.scales, row_format(options_).num_scales(options_.hidden));
  if (row.has_row_scale())
    inputs.row_scales = weights(stream_of_set(kRowScales, options_.seed, set, rank), options_.tokens);
  return inputs;
}

RowInputs Workload::row_inputs(int set, int rank, int64_t rows) const {
  return {.expert_out = elements(kExpertOut, set, rank, rows),
          .grad_recv = elements(kGradRecv, set, rank, rows),
          .grad_recv_weights = weights(stream_of_set(kGradRecvWeights, options_.seed, set, rank),
                                       rows * (options_.is_rank_major() ? options_.top_k : 1))};
}

std::vector<std::byte> Workload::elements(uint64_t purpose, int set, int rank, int64_t rows) const {
  const RandomStream random = stream_of_set(purpose, options_.seed, set, rank);
  std::vector<std::byte> bytes(rows * row_bytes(options_));
  switch (options_.dtype) {
  case EPX_FLOAT32:
    fill<uint32_t>(bytes, random, {.mantissa_bits = 23, .sign_bit = 31, .lowest_exponent = 127 - 3});
    break;
  case EPX_FLOAT16:
    fill<uint16_t>(bytes, random, {.mantissa_bits = 10, .sign_bit = 15, .lowest_exponent = 15 - 3});
    break;
  default: // bfloat16
    fill<uint16_t>(bytes, random, {.mantissa_bits = 7, .sign_bit = 15, .lowest_exponent = 127 - 3});
  }
  return bytes;
}

} // namespace epx::bench
