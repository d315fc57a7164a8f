// SPDX-License-Identifier: Apache-2.0
#include "moe/block/call.h"

#include <cstring>

#include "base/dtypes.h"
#include "base/error.h"
#include "moe/block/cuda/kernels.h"
#include "moe/block/memory.h"
#include "moe/block/zones.h"
#include "moe/tensors.h"

namespace epx::moe {
namespace {

int64_t elements_of(const ConstTensor& tensor) {
  int64_t elements = 1;
  for (int32_t axis = 0; axis < tensor.ndim(); ++axis)
    elements *= tensor.size(axis);
  return elements;
}

} // namespace

CallPlace::CallPlace(const BlockPlan& plan, const epx_moe_cuda* cuda, int device, std::byte* workspace,
                     int64_t workspace_bytes, epx_moe_errors errors)
    : on_gpu_(plan.is_on_gpu()) {
  if (on_gpu_ && cuda == nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT, "cuda is NULL; the block computes on GPU {}, where its group is", device);
  if (!on_gpu_ && cuda != nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT, "cuda is given; a block {} computes on the host, pass NULL",
         plan.num_ranks == 1 ? "without a group on GPUs" : "on the host transport");
  if (!on_gpu_) return;
  cuda_ = *cuda;
  cuda_.workspace = workspace;
  cuda_.workspace_bytes = static_cast<size_t>(workspace_bytes);
  if (cuda_.errors == nullptr) cuda_.errors = errors;
  enqueue_on_cuda([&](auto) {
    if (const int current = current_device(); current != device)
      fail(EPX_ERROR_INVALID_ARGUMENT, "the thread's current device is {}; the block's group is on GPU {}", current,
           device);
    call_.emplace(cuda_, EPX_MOE_OP_NONE, 0, std::initializer_list<NamedTensor>{});
  });
}

void CallPlace::require_memory(std::initializer_list<NamedTensor> tensors) {
  if (!on_gpu_) return;
  enqueue_on_cuda([&](auto) {
    for (const NamedTensor& named : tensors)
      call_->require_memory(named.tensor, named.name);
  });
}

void CallPlace::copy(const ConstTensor& from, const epx_tensor& to) const {
  const auto bytes = static_cast<size_t>(row_bytes(from.dtype(), elements_of(from)));
  if (on_gpu_) return enqueue_on_cuda([&](auto) { cuda::copy_async(to.data, from.data(), bytes, cuda_.stream); });
  if (bytes > 0) std::memcpy(to.data, from.data(), bytes);
}

void CallPlace::copy_integers(const ConstTensor& from, const epx_tensor& to) const {
  const Integers source(from.get());
  const Integers target(&to);
  const int64_t count = elements_of(from);
  if (on_gpu_)
    return enqueue_on_cuda(
        [&](auto) { call_->require_launched(cuda::launch_copy_integers(source, target, count, call_->target())); });
  for (int64_t i = 0; i < count; ++i)
    target.set(i, source[i]);
}

void CallPlace::clamp_zones(const Tensor& counts, const Tensor& offsets, int64_t num_rows) const {
  const Integers zone_counts(counts.get());
  const Integers zone_offsets(offsets.get());
  const auto num_experts = static_cast<int>(counts.size(0));
  if (on_gpu_)
    return enqueue_on_cuda([&](auto) {
      call_->require_launched(cuda::launch_clamp_zones(zone_counts, zone_offsets, num_experts, num_rows, call_->target()));
    });
  for (int e = 0; e <= num_experts; ++e)
    clamp_zone(zone_counts, zone_offsets, e, num_experts, num_rows);
}

} // namespace epx::moe
