// SPDX-License-Identifier: Apache-2.0
// What the forward and the backward of a block have in common: tensors of the arena with the sizes of the call, and the few
// things that are done in another way on a GPU than on the host.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <optional>
#include <span>

#include "epx/epx.hpp"
#include "moe/block/layout.h"
#include "moe/block/plan.h"
#include "moe/cuda/cuda_call.h"

namespace epx::moe {

// Tensors of one flight and of its arena, for num_tokens tokens.
struct CallTensors {
  CallTensors(const BlockPlan& plan, const FlightTensors& flight, const SharedTensors& shared, int64_t num_tokens,
              epx_dtype logits_dtype);

  std::span<std::byte> handle_mem;
  Tensor recv_tokens, expert_out, recv_weights, topk_idx, topk_weights, logits, counts, offsets, global_counts, pre_act;
  Tensor grad_expert_out, grad_recv, grad_recv_weights, grad_topk_weights;
};

// Where a call computes.
class CallPlace {
public:
  // Checks `cuda` of the call's args against the block's place; throws. `device` is the group's, `errors` where to report when
  // the caller has no record.
  CallPlace(const BlockPlan& plan, const epx_moe_cuda* cuda, int device, const SharedTensors& shared,
            epx_moe_errors errors);

  // What the calls of the block's parts get: NULL on the host.
  const epx_moe_cuda* cuda() const { return on_gpu_ ? &cuda_ : nullptr; }
  epx_stream stream() const { return on_gpu_ ? cuda_.stream : nullptr; }

  // Throws unless the tensors, whose shapes have been checked, are memory of the GPU; looks at nothing on the host.
  void require_memory(std::initializer_list<NamedTensor> tensors);

  void copy(const ConstTensor& from, const epx_tensor& to) const; // of the same dtype and shape
  void copy_integers(const ConstTensor& from, const epx_tensor& to) const;
  void clamp_zones(const Tensor& counts, const Tensor& offsets, int64_t num_rows) const;

private:
  bool on_gpu_;
  epx_moe_cuda cuda_{};
  std::optional<CudaCall> call_; // on a GPU
};

} // namespace epx::moe
