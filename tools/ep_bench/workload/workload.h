// SPDX-License-Identifier: Apache-2.0
// The inputs of a rank are a function of (seed, set, rank), so that each rank can make those of all others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tools/ep_bench/options.h"

namespace epx::bench {

// TokenInputs are what a rank has per token.
struct TokenInputs {
  std::vector<int64_t> topk_idx;   // [T, K]
  std::vector<float> topk_weights; // [T, K], in [0, 1)
  std::vector<std::byte> tokens;   // [T, H]
  std::vector<std::byte> grad_out; // [T, H]
  std::vector<std::byte> scales;   // [T, S], of rows that come quantised
  std::vector<float> row_scales;   // [T], of those that have them
};

// RowInputs are what a rank has per row of the receive tensors; they stand for what its experts computed.
struct RowInputs {
  std::vector<std::byte> expert_out;    // [rows, H]
  std::vector<std::byte> grad_recv;     // [rows, H]
  std::vector<float> grad_recv_weights; // [rows], rank-major [rows, K]; in [0, 1)
};

// An InputSet has one rank's inputs of one set.
struct InputSet {
  TokenInputs by_token;
  RowInputs by_row;
};

class Workload {
public:
  // Reads the text of --routing text:FILE; throws UsageError when it cannot.
  Workload(const Options& options, int num_ranks);

  std::vector<int64_t> topk_idx(int set, int rank) const; // [T, K]
  TokenInputs token_inputs(int set, int rank) const;
  RowInputs row_inputs(int set, int rank, int64_t rows) const;

private:
  // Returns [rows, H] elements of dtype of either sign with magnitudes in [1/8, 2), which no operation overflows.
  std::vector<std::byte> elements(uint64_t purpose, int set, int rank, int64_t rows) const;

  Options options_;
  int num_ranks_;
  std::vector<std::string> words_;
};

} // namespace epx::bench
