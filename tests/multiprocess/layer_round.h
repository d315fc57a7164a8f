// SPDX-License-Identifier: Apache-2.0
// A LayerRound runs one layer on one rank, forward and backward, with closed-form results. The bad-input tests spoil its
// arguments, and run it afterwards to prove that a refused call has changed nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "base/operations.h"
#include "epx/epx.h"
#include "tests/support/case.h"

namespace epx::test {

inline constexpr int kRanks = 2;
inline constexpr int kExperts = 5; // rank 0 owns three, rank 1 two
inline constexpr int kMaxTokens = 6;
inline constexpr int kHiddenDim = 16;
inline constexpr int kHidden = 8;
inline constexpr int kMaxTopK = 4;
inline constexpr int kTopK = 2;
inline constexpr int kMaxAlignment = 8;
inline constexpr int kAlignment = 4;
inline constexpr int kMaxSidecarBytes = 16;
inline constexpr int kSidecarBytes = 8;
inline constexpr epx_dtype kDtype = EPX_BFLOAT16; // it is also the group's max_token_dtype

// Returns the config of the groups here; the timeout is 20 s.
epx_group_config round_config();

inline constexpr int kRowsPerSource = kMaxTokens + 1; // M of the rank-major calls

// Of ragged_all_to_all: slices to a rank, and rows of operand and of output, in which a slice begins every third row.
inline constexpr int kSlicesPerRank = 2;
inline constexpr int kSlices = kRanks * kSlicesPerRank;
inline constexpr int kOperandRows = 3 * kSlices + 1;
inline constexpr int kOutputRows = 3 * kSlices + 2;

#define EPX_TEST_NAME(NUMBER, name, ...) name,
// The last is ragged_all_to_all, the four before it are those of the rank-major layout.
enum class Op { EPX_OPERATIONS(EPX_TEST_NAME) };
#undef EPX_TEST_NAME

// Calls has the arguments of all calls, which are right until a test spoils them.
struct Calls {
  Calls() = default;
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  epx_group group = nullptr;
  bool without_args = false; // pass NULL
  epx_tensor topk_idx{}, counts{}, offsets{}, global_counts{}, info{}, slot{}, slot_origin{};
  epx_tensor tokens{}, topk_weights{}, recv_tokens{}, recv_weights{};
  epx_tensor expert_out{}, out{}; // expert_out is recv_tokens without its sidecar: the experts are the identity
  epx_tensor grad_out{}, grad_expert_out{}, grad_recv_weights{};
  epx_tensor grad_recv{}, grad_tokens{}, grad_topk_weights{}; // grad_recv is grad_expert_out
  epx_prepare_args prepare{};
  epx_dispatch_args dispatch{};
  epx_prepare_dispatch_args prepare_dispatch{}; // see set_prepare_dispatch
  epx_combine_args combine{};
  epx_combine_bwd_args combine_bwd{};
  epx_dispatch_bwd_args dispatch_bwd{};

  // The rank-major calls have tokens, topk_idx, topk_weights, out, grad_out, grad_tokens and grad_topk_weights in common with
  // the others. Their experts are the identity too; grad_rows are what combine_rank_major_bwd writes and
  // dispatch_rank_major_bwd reads, with recv_row_weights as the gradients of the weights.
  epx_tensor recv_rows{}, recv_row_idx{}, recv_row_weights{}, source_counts{};
  epx_tensor row_expert_out{}, grad_rows{};
  epx_dispatch_rank_major_args dispatch_rank_major{};
  epx_combine_rank_major_args combine_rank_major{};
  epx_combine_rank_major_bwd_args combine_rank_major_bwd{};
  epx_dispatch_rank_major_bwd_args dispatch_rank_major_bwd{};

  epx_tensor operand{}, output{}, input_offsets{}, send_sizes{}, output_offsets{}, recv_sizes{};
  epx_ragged_all_to_all_args ragged_all_to_all{};

  // These belong to a row format, which no call has until give_format().
  epx_row_format format{};
  epx_tensor scales{}, row_scales{}, encode_scale{}, recv_scales{}, recv_row_scales{};
};

// Gives a call rows of a format, with the tensors that it needs, and takes the weights from a combine_bwd whose scales take none.
// The scales of rows that come or arrive quantised are of `format.scales`.
void give_format(Calls& calls, Op op, const FormatCase& format);

// Makes the arguments of prepare_dispatch those of prepare and dispatch.
void set_prepare_dispatch(Calls& calls);

epx_status call(Op op, const Calls& calls);

class LayerRound {
public:
  LayerRound(epx_group group, int rank);

  std::unique_ptr<Calls> calls();
  int num_tokens() const { return num_tokens_; } // T of this rank
  int64_t num_rows() const { return num_rows_; } // R, which is also N
  size_t handle_bytes() const { return handle_bytes_; }

  // Makes route (t, k) an index that the library has to treat as masked, from the next prepare on.
  void mask(int t, int k, int64_t index);
  void unmask();

  void scribble_outputs();
  void run(Op op);       // a good call
  void run_all();        // scribbles over the outputs, makes and checks the five calls, and checks that nothing is reported
  void check_results();  // compares the results of the five calls
  void run_fused();      // as run_all, with prepare_dispatch in the place of prepare and dispatch
  void run_rank_major(); // the same with the four rank-major calls
  void run_ragged();     // the same with ragged_all_to_all
  std::vector<std::byte> memory() const; // a copy of the inputs, the handle and the outputs
  std::byte* handle() { return at(kHandle); }
  int32_t slot(int t, int k) const;

private:
  enum Buffer {
    // Inputs.
    kTopkIdx,
    kTokens,
    kSidecar,
    kTopkWeights,
    kGradOut,
    kScales,
    kRowScales,
    kEncodeScale,
    kOperand,
    kInputOffsets,
    kSendSizes,
    kOutputOffsets,
    kRecvSizes,
    // Outputs; the handle memory is one of them.
    kHandle,
    kCounts,
    kOffsets,
    kGlobalCounts,
    kInfo,
    kSlot,
    kSlotOrigin,
    kRecvTokens,
    kRecvSidecar,
    kRecvWeights,
    kRecvScales,
    kRecvRowScales,
    kOut,
    kGradExpertOut,
    kGradRecvWeights,
    kGradTokens,
    kGradTopkWeights,
    kRowHandle,
    kRecvRows,
    kRecvRowSidecar,
    kRecvRowIdx,
    kRecvRowWeights,
    kSourceCounts,
    kGradRows,
    kOutput,
    kNumBuffers
  };
  static constexpr Buffer kFirstOutput = kHandle;

  struct alignas(256) Block {
    std::array<std::byte, 256> bytes;
  };

  std::byte* at(Buffer buffer) { return arena_[first_block_[buffer]].bytes.data(); }
  const std::byte* at(Buffer buffer) const { return arena_[first_block_[buffer]].bytes.data(); }
  template <typename T>
  T* as(Buffer buffer) {
    return reinterpret_cast<T*>(at(buffer));
  }
  template <typename T>
  const T* as(Buffer buffer) const {
    return reinterpret_cast<const T*>(at(buffer));
  }
  template <typename Expected>
  void check_row(Buffer buffer, int64_t row, const char* what, const Expected& expected_at) const;
  template <typename Expected>
  void check_sidecar(Buffer buffer, int64_t row, const Expected& expected_at) const;
  void check_received() const; // what dispatch has delivered
  void run_and_check(std::initializer_list<Op> operations);
  void lay_out();
  void fill_inputs();
  bool kept(int t, int k) const { return !masked_[t * kTopK + k]; }
  bool goes_to(int source, int t, int k) const; // whether an unmasked route of `source` goes to this rank
  float kept_weight(int t) const;               // sum of the weights of token t's routes that are not masked

  epx_group group_;
  int rank_;
  int num_local_ = 0; // E_l
  int num_tokens_;
  int64_t num_rows_ = 0;
  size_t handle_bytes_ = 0;
  std::array<size_t, kNumBuffers + 1> first_block_{};
  std::vector<Block> arena_;
  std::array<bool, kMaxTokens * kTopK> masked_{};
};

} // namespace epx::test
