// SPDX-License-Identifier: Apache-2.0
// The oracle: what every operation must yield, computed serially by one process that sees all ranks' data at once.
//
// Written from the contract in epx.h and nothing else. It shares no code with the stages: no slot arithmetic, no layouts,
// no dtype conversions. It is slow and plain on purpose. ep_bench and the tests compare the library with it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "epx/epx.h"

namespace epx::reference {

// What all ranks agree on.
struct Problem {
  int num_experts = 0;
  int top_k = 0;
  int alignment = 1;           // rows; 0 means 1
  int64_t max_recv_tokens = 0; // R, rows
  epx_combine_precision precision = EPX_COMBINE_WIRE;
  int ranks_per_node = 0;  // 0: all ranks are on one node
  int64_t zone_stride = 0; // rows; 0: zones follow each other
};

// Routing input of one rank.
struct Routing {
  int64_t num_tokens = 0;        // T
  std::vector<int64_t> topk_idx; // [T, K]; -1 masks; other values outside [0, E) are bad and count as masked
};

// The outputs of epx_prepare on one rank.
struct RankPlan {
  int first_local_expert = 0;
  int num_local_experts = 0;
  int64_t num_tokens = 0;
  std::vector<int64_t> counts;      // [E_l]
  std::vector<int64_t> offsets;     // [E_l + 1]
  std::vector<int32_t> slot;        // [T, K]
  std::vector<int32_t> expert_rank; // [T, K]; rank that owns the route's expert, -1 where masked
  std::vector<int32_t> slot_origin; // [R, 3]; -2 marks a slot of a rank that takes part without routes
  std::array<int64_t, 5> info{};    // demand, kept, dropped here, dropped of mine, rows needed
  int64_t bad_indices = 0;          // routes of this rank with a bad index
};

struct Plan {
  Problem problem;
  std::vector<RankPlan> ranks;        // [P]
  std::vector<int64_t> global_counts; // [P, E]
};

Plan prepare(const Problem& problem, std::span<const Routing> ranks);

// A row-major matrix of raw elements. Only rows of FLOAT32, FLOAT16 and BFLOAT16 are computed with; others are copied.
struct Matrix {
  epx_dtype dtype = EPX_FLOAT32;
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<std::byte> bytes; // rows of row_bytes(dtype, cols)
};

// Opaque bytes beside each row: rows * row_bytes. row_bytes = 0: none.
struct Sidecar {
  int64_t row_bytes = 0;
  std::vector<std::byte> bytes;
};

// One entry per rank in every span below. An empty span (or, for Sidecar, row_bytes = 0) means "not passed". Outputs come
// in with the caller's previous contents and sizes (rows = N of that rank) and keep them wherever the contract says "not
// touched". Routes whose slot is >= N of the receiving rank count as dropped. Tensors that do not fit the plan or each
// other throw std::invalid_argument before anything is written.

struct Format;
struct FormatTensors; // formats.h

struct DispatchTensors {
  std::span<const Matrix> tokens;                   // [T, H]
  std::span<const Sidecar> sidecars;                // [T]
  std::span<const std::vector<float>> topk_weights; // [T, K]
  std::span<Matrix> recv_tokens;                    // [N, H]
  std::span<Sidecar> recv_sidecars;                 // [N]
  std::span<std::vector<float>> recv_weights;       // [N]
  bool pads_untouched = false;                      // on every rank
  const FormatTensors* formats = nullptr;           // NULL: rows travel as they are
};
void dispatch(const Plan& plan, const DispatchTensors& tensors);

struct CombineTensors {
  std::span<const Matrix> expert_out;               // [N, H]
  std::span<const std::vector<float>> recv_weights; // [N]
  std::span<Matrix> out;                            // [T, H]
  const Format* format = nullptr;                   // of partial sums on their way; NULL: they travel in the dtype
};
void combine(const Plan& plan, const CombineTensors& tensors);

struct CombineBwdTensors {
  std::span<const Matrix> grad_out;                 // [T, H]
  std::span<const Matrix> expert_out;               // [N, H]; with grad_recv_weights
  std::span<const std::vector<float>> recv_weights; // [N]
  std::span<Matrix> grad_expert_out;                // [N, H]
  std::span<std::vector<float>> grad_recv_weights;  // [N]
  const FormatTensors* formats = nullptr;           // NULL: rows travel as they are
};
void combine_bwd(const Plan& plan, const CombineBwdTensors& tensors);

struct DispatchBwdTensors {
  std::span<const Matrix> grad_recv;                     // [N, H]
  std::span<const std::vector<float>> grad_recv_weights; // [N]
  std::span<Matrix> grad_tokens;                         // [T, H]
  std::span<std::vector<float>> grad_topk_weights;       // [T, K]
  const Format* format = nullptr;                        // as in combine
};
void dispatch_bwd(const Plan& plan, const DispatchBwdTensors& tensors);

// Elements of `actual` that differ from `expected` in a bit. With nan_equals_nan (computed outputs), two NaNs of any
// payload are equal. Shapes and dtypes must be equal; otherwise every element counts as wrong (at least 1).
int64_t count_wrong(const Matrix& expected, const Matrix& actual, bool nan_equals_nan);
int64_t count_wrong(std::span<const float> expected, std::span<const float> actual, bool nan_equals_nan);

// One element, by the contract's rounding (nearest even, overflow to infinity, subnormals kept).
float load(const Matrix& matrix, int64_t row, int64_t col);
void store(Matrix& matrix, int64_t row, int64_t col, float value);

int64_t element_size(epx_dtype dtype); // bytes

} // namespace epx::reference
