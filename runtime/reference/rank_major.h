// SPDX-License-Identifier: Apache-2.0
// The oracle of the rank-major layout, beside reference.h and like it: written from the contract in epx.h and nothing else.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/reference/reference.h"

namespace epx::reference {

// What one rank sends and receives. A row that holds -1 instead of a token, of a rank that takes part without routes, becomes
// zero in combine_rank_major_bwd, and takes no step in sums.
struct RankMajorRank {
  int first_local_expert = 0;
  int num_local_experts = 0;
  int64_t num_tokens = 0;
  std::vector<int64_t> topk_idx;             // [T, K]; -1 where masked or bad
  std::vector<std::vector<int32_t>> kept_to; // by destination rank: the tokens that it keeps, which are its rows 0, 1, ...
  int64_t bad_indices = 0;                   // routes of this rank with a bad index
  int64_t dropped_here = 0;                  // routes to this rank whose row is at or above M
};

struct RankMajorPlan {
  Problem problem;             // alignment and max_recv_tokens do not matter
  int64_t rows_per_source = 0; // M
  std::vector<RankMajorRank> ranks;
  bool is_compact = false; // EPX_ROWS_COMPACT
};

RankMajorPlan plan_rank_major(const Problem& problem, std::span<const Routing> ranks, int64_t rows_per_source,
                              bool is_compact = false);

// As in reference.h: one entry per rank in every span; an empty span means "not passed". Receive tensors have P * M rows:
// row i of source r is row r * M + i; in a compact plan it follows the rows of the sources before r.

struct RankMajorDispatchTensors {
  std::span<const Matrix> tokens;                   // [T, H]
  std::span<const Sidecar> sidecars;                // [T]
  std::span<const std::vector<float>> topk_weights; // [T, K]
  std::span<Matrix> recv_tokens;                    // [P * M, H]
  std::span<Sidecar> recv_sidecars;                 // [P * M]
  std::span<std::vector<int64_t>> recv_topk_idx;    // [P * M, K]
  std::span<std::vector<float>> recv_weights;       // [P * M, K]
  std::span<std::vector<int64_t>> counts;           // [P]
  const FormatTensors* formats = nullptr;           // NULL: rows travel as they are
};
void dispatch_rank_major(const RankMajorPlan& plan, const RankMajorDispatchTensors& tensors);

// expert_out: [P * M, H]; out: [T, H].
// `format` NULL: rows travel as they are.
void combine_rank_major(const RankMajorPlan& plan, std::span<const Matrix> expert_out, std::span<Matrix> out,
                        const Format* format = nullptr);

// grad_out: [T, H]; grad_expert_out: [P * M, H].
// `formats` NULL: rows travel as they are.
void combine_rank_major_bwd(const RankMajorPlan& plan, std::span<const Matrix> grad_out, std::span<Matrix> grad_expert_out,
                            const FormatTensors* formats = nullptr);

struct RankMajorDispatchBwdTensors {
  std::span<const Matrix> grad_recv;                     // [P * M, H]
  std::span<const std::vector<float>> grad_recv_weights; // [P * M, K]
  std::span<Matrix> grad_tokens;                         // [T, H]
  std::span<std::vector<float>> grad_topk_weights;       // [T, K]
  const Format* format = nullptr;                        // NULL: rows travel as they are
};
void dispatch_rank_major_bwd(const RankMajorPlan& plan, const RankMajorDispatchBwdTensors& tensors);

} // namespace epx::reference
