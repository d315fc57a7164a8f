// SPDX-License-Identifier: Apache-2.0
// A FaultRank is one rank of a small group for the tests of failures: it makes calls whose fields can be spoiled, and checks
// the reports.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "epx/epx.h"
#include "tests/support/group_run.h"
#include "tests/support/layer_memory.h"

namespace epx::test {

// Ranks have to agree on these fields of a call. The sizes stay within the group's limits.
struct CallFields {
  int top_k = 2;
  int alignment = 4;
  int hidden = 8;
  epx_dtype dtype = EPX_FLOAT32;
  int sidecar_bytes = 0;
  bool weights = true;
  bool grads = true; // also of the weights
  int64_t zone_stride = 0;
  int rows_per_source = 4; // M of dispatch_rank_major, whose alignment is always 1
  epx_row_spacing row_spacing = EPX_ROWS_STRIDED;
  // NONE: the calls have no format.
  epx_scaling scaling = EPX_SCALING_NONE;
  epx_dtype elements = EPX_FLOAT8_E4M3;
  epx_dtype scales = EPX_DTYPE_UNSET; // of rows that arrive quantised; unset: the wire alone is quantised
  float amax_floor = 0.0F;
  // Of ragged_all_to_all, whose rows have `hidden` elements of `dtype`.
  int slices_per_rank = 1; // K / P
  epx_slice_direction direction = EPX_SLICES_FORWARD;
};

class FaultRank {
public:
  // Creates the group and makes its first call, prepare; both must succeed.
  FaultRank(const RankContext& context, int64_t timeout_ms, int ranks_per_node = 0, bool has_fixed_rail_tokens = false);
  // Makes no call, and a peer may not come: then group() is NULL, and created() and epx_last_error() have the reason.
  struct MayFail {};
  FaultRank(const RankContext& context, int64_t timeout_ms, MayFail, int ranks_per_node = 0,
            bool has_fixed_rail_tokens = false);
  FaultRank(const FaultRank&) = delete;
  FaultRank& operator=(const FaultRank&) = delete;
  ~FaultRank();

  epx_group group() const { return group_; }
  epx_status created() const { return created_; }
  void destroy(); // calls epx_group_destroy, which must return soon

  epx_status call(epx_operation operation, const CallFields& terms = {});

private:
  LayerMemory layer(epx_operation operation, const CallFields& terms);
  epx_status ragged_all_to_all(const CallFields& terms); // whose slices have no rows
  void pass_format(const CallFields& terms, int64_t rows, LayerMemory& layer);

  int num_ranks_;
  Device& device_;
  epx_group group_ = nullptr;
  epx_status created_ = EPX_ERROR_INTERNAL;
  std::vector<std::byte*> memory_; // several tensors, large enough for any fields
  size_t handle_bytes_ = 0;
  int64_t num_local_experts_ = 0;
  epx_row_format format_{}; // of the current call
  epx_tensor recv_scales_{};
};

// These fields of the report of a failed group are compared; a field that is not set is not.
struct ExpectedFailure {
  epx_status status = EPX_SUCCESS;
  epx_operation operation = EPX_OP_NONE;
  std::optional<int> culprit;
  std::optional<uint64_t> sequence;
};

// Checks the report, that its message and that of `returned` are sentences, and that every later call returns `status` at
// once. Returns the report.
epx_group_report check_failed(FaultRank& rank, epx_status returned, const ExpectedFailure& expected);

const char* operation_name(epx_operation operation); // "dispatch_bwd"

// Runs fn, which makes checks, on ranks that are threads.
void with_ranks(int num_ranks, const std::function<void(const RankContext&)>& fn);

// Waits, outside of epx, until other threads have reached a point. Fails after 30 s.
void wait_until(const std::function<bool()>& holds);

} // namespace epx::test
