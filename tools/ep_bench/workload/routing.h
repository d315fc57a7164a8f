// SPDX-License-Identifier: Apache-2.0
// These functions decide which experts each token goes to.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace epx::bench {

// Returns the expert of one hash of a word, in [0, num_experts), as in Hash Layers (Roller et al. 2021), where a token's expert
// depends on its word alone. Different k are independent hashes.
int32_t hash_expert(std::string_view word, uint64_t seed, int k, int32_t num_experts);

// Returns the whitespace-separated words of a file. Throws UsageError when it cannot be read (text_file.h) or has none.
std::vector<std::string> read_words(const std::string& file);

// RoutingShape is what all tokens of a run share.
struct RoutingShape {
  int32_t tokens = 0;
  int32_t experts = 0;
  int32_t top_k = 0;
  uint64_t seed = 0;
};

// The routing functions return topk_idx [T, K] of one rank in one input set, and depend on the arguments alone.

// Chooses K distinct experts per token, every ordered choice equally likely.
std::vector<int64_t> uniform_routing(const RoutingShape& shape, int set, int rank);

// Draws K distinct experts per token, one after the other without replacement, with weights 1 / (n + 1)^exponent, where n is
// the expert's place in zipf_order.
std::vector<int64_t> zipf_routing(const RoutingShape& shape, double exponent, int set, int rank);

// Returns the experts from the most to the least popular, a permutation that the seed chooses.
std::vector<int32_t> zipf_order(uint64_t seed, int32_t experts);

// Puts hot_expert in the first place of each token with probability `fraction`; the token's other experts are distinct ones of
// the rest, every ordered choice equally likely. E > K.
std::vector<int64_t> hot_routing(const RoutingShape& shape, double fraction, int set, int rank);

// Returns the same expert in all sets and on all ranks; the seed chooses it.
int32_t hot_expert(uint64_t seed, int32_t experts);

// Token t of rank r in set s is word (s * P + r) * T + t of the text, cyclically.
std::vector<int64_t> text_routing(const RoutingShape& shape, std::span<const std::string> words, int set, int rank,
                                  int num_ranks);

} // namespace epx::bench
