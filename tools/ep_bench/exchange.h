// One rank's group, layer and output tensors, and the five operations on them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "epx/epx.h"
#include "tools/ep_bench/memory.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/workload.h"

namespace epx::bench {

inline constexpr std::array kOperations{EPX_OP_PREPARE, EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_COMBINE_BWD,
                                        EPX_OP_DISPATCH_BWD};
inline constexpr int kNumOperations = kOperations.size();
const char* name_of(epx_operation operation); // "dispatch_bwd"

// What poisoned outputs are filled with.
inline constexpr auto kPoison = std::byte{0xa5};

struct PrepareOutputs {
  std::vector<int64_t> counts;        // [E_l]
  std::vector<int64_t> offsets;       // [E_l + 1]
  std::vector<int64_t> global_counts; // [P, E]
  std::array<int64_t, 5> info{};
  std::vector<int32_t> slot;        // [T, K]
  std::vector<int32_t> slot_origin; // [R, 3]
};

struct RowOutputs {
  Buffer recv_tokens;       // [N, H]
  Buffer recv_weights;      // [N] float
  Buffer grad_expert_out;   // [N, H]
  Buffer grad_recv_weights; // [N] float
};

// What the experts would have written: inputs of combine, combine_bwd and dispatch_bwd.
struct ExpertRows {
  Buffer expert_out;        // [N, H]
  Buffer grad_recv;         // [N, H]
  Buffer grad_recv_weights; // [N] float
};

struct TokenOutputs {
  Buffer out;               // [T, H]
  Buffer grad_tokens;       // [T, H]
  Buffer grad_topk_weights; // [T, K] float
};

// The group's config that the options ask for. Throws RuntimeError.
epx_group_config group_config(const Options& options);

class Exchange {
public:
  // Creates the group: collective over the bootstrap. Throws RuntimeError.
  Exchange(const epx_bootstrap& bootstrap, const Options& options);
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Allocates receive tensors of N rows: collective, with the same N everywhere. Before the first operation but prepare.
  void allocate_rows(int64_t rows);

  // Puts the inputs of the last three where experts would have written them, in memory of the same kind as the receive
  // tensors.
  void load(const RowInputs& inputs);
  void load_recv_weights(const std::vector<float>& recv_weights); // instead of those that dispatch received

  // Each is one call of epx, collective, and throws RuntimeError with epx's own words.
  void prepare(const TokenInputs& inputs);       // counts and offsets only
  void prepare_fully(const TokenInputs& inputs); // every output
  void dispatch(const TokenInputs& inputs);
  void combine();
  void combine_bwd(const TokenInputs& inputs);
  void dispatch_bwd();

  // The timed form of any of the five.
  void call(epx_operation operation, const InputSet& inputs);

  // Reads the group's report and clears its events.
  epx_group_report status();

  void poison(); // all outputs

  const epx_group_info& info() const { return info_; }
  size_t handle_mem_bytes() const { return handle_mem_.size(); }
  int64_t rows() const { return rows_; } // N
  const PrepareOutputs& prepared() const { return prepared_; }
  const RowOutputs& by_row() const { return by_row_; }
  const ExpertRows& expert_rows() const { return expert_rows_; }
  const TokenOutputs& by_token() const { return by_token_; }

private:
  struct DestroyGroup {
    using pointer = epx_group;
    void operator()(epx_group group) const { epx_group_destroy(group); }
  };

  void run_prepare(const TokenInputs& inputs, bool every_output);
  template <typename Args>
  Args args() const; // struct_size, layer and handle memory
  epx_tensor rows_tensor(const void* data, int64_t rows) const;
  epx_tensor recv_weights_tensor() const;

  Options options_;
  std::unique_ptr<epx_group_s, DestroyGroup> group_;
  epx_group_info info_{};
  epx_layer layer_{};
  std::vector<std::byte> handle_mem_; // malloc aligns it to the 16 bytes that epx wants
  int64_t rows_ = 0;
  PrepareOutputs prepared_;
  RowOutputs by_row_;
  ExpertRows expert_rows_;
  TokenOutputs by_token_;
};

} // namespace epx::bench
