// SPDX-License-Identifier: Apache-2.0
// A MeasuredGroup is one rank's group, layer and tensors, with the operations of its layout on them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "epx/epx.hpp"
#include "tools/ep_bench/lines.h"
#include "tools/ep_bench/memory.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/row_format.h"
#include "tools/ep_bench/workload/workload.h"

namespace epx::bench {

// Outputs are filled with this byte before a verified call.
inline constexpr auto kScribble = std::byte{0xa5};

struct PrepareOutputs {
  std::vector<int64_t> counts;        // [E_l]
  std::vector<int64_t> offsets;       // [E_l + 1]
  std::vector<int64_t> global_counts; // [P, E]
  std::array<int64_t, 5> info{};
  std::vector<int32_t> slot;        // [T, K]
  std::vector<int32_t> slot_origin; // [R, 3]
};

// TokenTensors are a rank's token inputs in memory that calls read.
struct TokenTensors {
  Buffer topk_idx;     // [T, K] int64
  Buffer topk_weights; // [T, K] float
  Buffer tokens;       // [T, H]
  Buffer grad_out;     // [T, H]
  Buffer scales;       // [T, S]; of rows that come quantised
  Buffer row_scales;   // [T] float; of those that have them
};

// N = P * M in the rank-major layout.
struct RowOutputs {
  Buffer recv_tokens;       // [N, H]
  Buffer recv_weights;      // [N] float; rank-major: [N, K]
  Buffer grad_expert_out;   // [N, H]
  Buffer grad_recv_weights; // [N] float; expert-major
  Buffer recv_topk_idx;     // [N, K] int64; rank-major
  Buffer source_counts;     // [P] int64; rank-major
  Buffer recv_scales;       // of quantised rows, in the layout of scales
  Buffer recv_row_scales;   // [N] float; of those that have them
};

// ExpertRows stand for what the experts would have written: the inputs of combine, combine_bwd and dispatch_bwd.
struct ExpertRows {
  Buffer expert_out;        // [N, H]
  Buffer grad_recv;         // [N, H]
  Buffer grad_recv_weights; // [N] float; rank-major: [N, K]
};

struct TokenOutputs {
  Buffer out;               // [T, H]
  Buffer grad_tokens;       // [T, H]
  Buffer grad_topk_weights; // [T, K] float
};

// Returns the group's config for the options. Throws epx::Error.
GroupConfig group_config(const Options& options);

class MeasuredGroup {
public:
  // Creates the group: collective over the bootstrap. `memory` must outlive this. Throws epx::Error.
  MeasuredGroup(const epx_bootstrap& bootstrap, const Options& options, Memory& memory);
  MeasuredGroup(const MeasuredGroup&) = delete;
  MeasuredGroup& operator=(const MeasuredGroup&) = delete;

  // Allocates receive tensors of N rows, the same N on all ranks. It is collective and precedes all operations but prepare.
  void allocate_rows(int64_t rows);

  // `inputs` must outlive the tensors.
  TokenTensors tensors_of(const TokenInputs& inputs) const;

  // Puts the inputs of the last three where experts would have written them, in memory of the same kind as the receive
  // tensors.
  void load(const RowInputs& inputs);
  void load_recv_weights(const std::vector<float>& recv_weights); // instead of those that dispatch received

  // Each is one call of epx in the layout of the options, collective, and throws epx::Error. On a GPU it only enqueues. The
  // rank-major layout has no prepare.
  void prepare(const TokenTensors& inputs);       // counts and offsets only
  void prepare_fully(const TokenTensors& inputs); // every output
  void prepare_dispatch_fully(const TokenTensors& inputs);
  void dispatch(const TokenTensors& inputs);
  void combine();
  void combine_bwd(const TokenTensors& inputs);
  void dispatch_bwd();

  // Makes the timed calls of any line of the table.
  void call(const Line& line, const TokenTensors& inputs);

  // Waits until all calls have ended. Throws RuntimeError with the group's message when one failed on the GPU.
  void finish();

  void scribble(); // over all outputs

  // Returns how often the group reported each kind of event until the last finish().
  const std::array<uint64_t, EPX_MAX_EVENT_KINDS>& events() const { return events_; }

  GroupView group() const { return group_; }
  const epx_group_info& info() const { return info_; }
  double creation_ms() const { return creation_ms_; } // the time of epx_group_create on this rank
  size_t handle_mem_bytes() const { return handle_mem_.size(); }
  int64_t rows() const { return rows_; }                      // N
  PrepareOutputs prepared() const;                            // the current contents
  const Buffer& counts() const { return prepared_.counts; }   // [E_l] int64, of the last prepare
  const Buffer& offsets() const { return prepared_.offsets; } // [E_l + 1] int64
  const RowOutputs& by_row() const { return by_row_; }
  const ExpertRows& expert_rows() const { return expert_rows_; }
  const TokenOutputs& by_token() const { return by_token_; }

private:
  struct PrepareTensors {
    Buffer counts, offsets, global_counts, info; // int64
    Buffer slot, slot_origin;                    // int32
  };

  template <typename Args>
  void pass_plan_tensors(const TokenTensors& inputs, bool every_output, Args& args);
  void dispatch_rank_major(const TokenTensors& inputs);
  void combine_rank_major();
  void combine_rank_major_bwd(const TokenTensors& inputs);
  void dispatch_rank_major_bwd();
  void run_prepare(const TokenTensors& inputs, bool every_output);
  void run_prepare_dispatch(const TokenTensors& inputs, bool every_output);
  void run_combine_bwd(const TokenTensors& inputs, bool with_weight_gradients);
  Tensor rows_tensor(const Buffer& buffer, int64_t rows) const { return rows_tensor(buffer, options_.dtype, rows); }
  Tensor rows_tensor(const Buffer& buffer, epx_dtype dtype, int64_t rows) const;
  RowFormat format_of(const TokenTensors& inputs) const;                          // with its tensors
  Tensor by_source(const Buffer& buffer, epx_dtype dtype, int64_t columns) const; // [P, M, columns]

  Options options_;
  Memory& memory_;
  Group group_;
  double creation_ms_ = 0;
  epx_group_info info_{};
  Layer layer_;
  Buffer handle_mem_;
  int64_t rows_ = 0;
  PrepareTensors prepared_;
  RowOutputs by_row_;
  ExpertRows expert_rows_;
  TokenOutputs by_token_;
  std::array<uint64_t, EPX_MAX_EVENT_KINDS> events_{};
};

} // namespace epx::bench
