// SPDX-License-Identifier: Apache-2.0
// Where a call of a block computes, and the few things that are done in another way on a GPU than on the host.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <optional>

#include "epx/epx.hpp"
#include "moe/block/cuda/kernels.h"
#include "moe/block/plan.h"
#include "moe/cuda/cuda_call.h"

namespace epx::moe {

class CallPlace {
public:
  // Checks `cuda` of the call's args against the block's place; throws. `device` is the group's, the workspace that of the
  // arena, and `errors` where to report when the caller has no record.
  CallPlace(const BlockPlan& plan, const epx_moe_cuda* cuda, int device, std::byte* workspace, int64_t workspace_bytes,
            epx_moe_errors errors);

  epx_stream stream() const { return on_gpu_ ? cuda_.stream : nullptr; }

  // Returns args for a call of one of the block's parts, with struct_size and `cuda`, which is NULL on the host.
  template <typename Args>
  Args make_args() const {
    Args args{};
    args.struct_size = sizeof(args);
    args.cuda = on_gpu_ ? &cuda_ : nullptr;
    return args;
  }

  // Throws unless the tensors, whose shapes have been checked, are memory of the GPU; looks at nothing on the host.
  void require_memory(std::initializer_list<NamedTensor> tensors);

  void copy(const ConstTensor& from, const epx_tensor& to) const; // of the same dtype and shape
  void copy_integers(const ConstTensor& from, const epx_tensor& to) const;
  void clamp_zones(const Tensor& counts, const Tensor& offsets, int64_t num_rows) const;

  // Calls step(i) for each i < count, of the integers of an exchange (moe/block/tables.h); on a GPU in any order.
  template <typename Step>
  void for_each(int64_t count, const Step& step) const {
    if (!on_gpu_) {
      for (int64_t i = 0; i < count; ++i)
        step(i);
    } else {
      enqueue_on_cuda([&](auto) { call_->require_launched(cuda::launch_for_each(step, count, call_->target())); });
    }
  }

private:
  bool on_gpu_;
  epx_moe_cuda cuda_{};
  std::optional<CudaCall> call_; // on a GPU
};

} // namespace epx::moe
