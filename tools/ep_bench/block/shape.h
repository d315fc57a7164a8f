// SPDX-License-Identifier: Apache-2.0
// The shape of the block that --block measures, and its data on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "epx/epx.h"
#include "tools/ep_bench/block/numbers.h"
#include "tools/ep_bench/options.h"

namespace epx::bench {

// The set of a rank's data is part of the key of what is per token; parameters are the same in all sets.
constexpr uint32_t token_part(int set, int rank) {
  return static_cast<uint32_t>(set) * 65536u + static_cast<uint32_t>(rank);
}

// Returns the power of two that is nearest to sqrt(3 / fan_in), the larger of two: with it a product of fan_in terms keeps the
// variance.
float weight_scale(int64_t fan_in);

inline constexpr float kBiasScale = 0.125f;

// Returns the gate's logits of a rank, [T, E]. A logit is Gumbel noise minus exponent * log(1 + place of the expert in an order
// by popularity), so that the K largest of a token are K draws without replacement by weight 1 / n^exponent; 0 is uniform. It
// is rounded down to a multiple of a power of two, to which the expert's number adds less than one step: logits of a token are
// distinct, exact in float32, and the same in every language.
std::vector<float> block_logits(const Options& options, int set, int rank);

// Returns the K experts with the largest logits of each token, best first, [T, K].
std::vector<int64_t> block_topk_idx(const Options& options, int set, int rank);

// Returns `count` elements of a stream as the options' dtype stores them.
std::vector<std::byte> block_elements(const Options& options, const BlockStream& stream, int64_t count, float scale);

// Returns the i-th row that stands for all `rows` rows of a tensor where samples of two programs' outputs are compared.
constexpr int64_t sample_row(uint64_t seed, int64_t i, int64_t rows) {
  return BlockStream(seed, BlockTensor::Sample, 0).at(static_cast<uint32_t>(i)) % rows;
}

// Returns the floating-point operations of a rank's experts with T * K rows: 6 * rows * H * F forward (2 for each multiply and
// add; H x 2F and F x H), and twice as many backward.
double forward_flops(const Options& options);

} // namespace epx::bench
