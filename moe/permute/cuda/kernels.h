// SPDX-License-Identifier: Apache-2.0
// The kernels of the local permutation, for the host code that launches them. Arguments have been checked; each function
// returns a cudaError_t.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "epx/epx_moe.h"
#include "moe/cuda/error_record.h"
#include "moe/cuda/launch_target.h"
#include "moe/integers.h"
#include "moe/permute/row_map.h"

namespace epx::moe::cuda {

// A warp sorts the routes of a chunk in order. There are at most so many chunks, since one block adds up their counts.
constexpr int64_t kMinRoutesPerChunk = 256;
constexpr int64_t kMaxChunks = 256;
// Not by std::min: kernels call this too, and a reference to kMaxChunks would be one to a variable of the host, which NVCC
// compiles to a trap.
constexpr int64_t num_route_chunks(int64_t num_routes) {
  const int64_t chunks = (num_routes + kMinRoutesPerChunk - 1) / kMinRoutesPerChunk;
  return chunks < kMaxChunks ? chunks : kMaxChunks;
}
constexpr size_t row_map_bytes(int64_t num_routes, int64_t num_experts) {
  const auto counts = static_cast<size_t>(num_route_chunks(num_routes)) * static_cast<size_t>(num_experts);
  return round_up_workspace((counts + 1) * sizeof(int32_t));
}

struct RowMapCall {
  Integers topk_idx; // [T, K]
  int64_t num_routes, top_k, num_experts, alignment;
  Integers counts, offsets;   // [E], [E + 1]
  int32_t* row_map;           // [T, K]
  int32_t* has_too_many_rows; // [1]: the workspace, as the next one
  int32_t* chunk_counts;      // [num_route_chunks, E]
  ErrorSink errors;
};
int launch_row_map(const RowMapCall& call, const LaunchTarget& target);
std::vector<const void*> row_map_kernels();

constexpr size_t owners_bytes(int64_t num_rows) {
  return round_up_workspace(static_cast<size_t>(num_rows) * sizeof(uint32_t));
}

struct PermuteCall {
  RowMap map;
  const void* tokens; // [T, H] of any dtype, as the rows
  void* rows;         // [N, H]
  int64_t row_bytes;
  const void* topk_weights; // [T, K] of any dtype, as row_weights; or both NULL
  void* row_weights;        // [N]
  int64_t weight_bytes;     // of one weight
  bool zeroes_pads;         // rows that no route maps to become zero
  uint32_t* owners;         // [N]: the workspace
  ErrorSink errors;
};
int launch_permute(const PermuteCall& call, const LaunchTarget& target);
std::vector<const void*> permute_and_sum_kernels(); // those of launch_sum too

struct SumCall {
  RowMap map;
  const void* rows; // [N, H] of `dtype`, as the tokens
  epx_dtype dtype;
  int64_t hidden;
  const float* topk_weights;     // [T, K], or NULL: all 1
  void* tokens;                  // [T, H]
  const float* grad_row_weights; // [N], or NULL as the next one
  float* grad_topk_weights;      // [T, K]
  ErrorSink errors;
};
int launch_sum(const SumCall& call, const LaunchTarget& target);

struct UnpermuteBwdCall {
  RowMap map;
  const void* grad_tokens; // [T, H] of `dtype`, as all rows
  epx_dtype dtype;
  int64_t hidden;
  const float* topk_weights; // [T, K], or NULL: all 1
  void* grad_rows;           // [N, H]
  const void* rows;          // [N, H], or NULL as the next one
  float* grad_topk_weights;  // [T, K]
  uint32_t* owners;          // [N]: the workspace
  ErrorSink errors;
};
int launch_unpermute_bwd(const UnpermuteBwdCall& call, const LaunchTarget& target);

} // namespace epx::moe::cuda
