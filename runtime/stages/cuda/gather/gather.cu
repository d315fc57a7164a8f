// SPDX-License-Identifier: Apache-2.0
// Gather: rows go from slots to their tokens' home ranks and are summed. combine weights them; dispatch_bwd does not, and
// carries the weights' gradients along. The low-latency path is in ll_gather.cuh, and the high-throughput path in gather.cuh. On
// few SMs, and where warps have many tokens, batch_gather_kernel takes a batch of tokens as a tile (LaunchPlan::next_gather;
// batch_gather.cuh).
#include "runtime/stages/cuda/gather/quantised_gather.h"
#include "runtime/stages/cuda/gather/rank_major_gather.h"
#include "runtime/stages/cuda/kernels.h"

#include <algorithm>

#include "base/device/launch.h"
#include "runtime/stages/cuda/gather/batch_gather.cuh"
#include "runtime/stages/cuda/gather/gather.cuh"
#include "runtime/stages/cuda/gather/gather_params.h"
#include "runtime/stages/cuda/gather/ll_gather.cuh"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/row_reader.cuh"

namespace epx::cuda {
namespace {

// kByList is false in the kernel that has the low-latency path.
template <typename T, bool kByList>
__device__ __forceinline__ void gather_rows(const GatherParams& params) {
  Movement movement(params);
  movement.post();
  if constexpr (!kByList) { // the launches of the other are for more tokens
    if (params.group.context.shape.precision != EPX_COMBINE_EXACT && movement.takes_ll_path()) {
      ll_gather<T, false>(params, movement);
      return;
    }
  }
  if (!movement.begin()) return;
  TmaRowPipeline pipeline = pipeline_of_warp();
  send_and_sum<Gather<T, PlainSums<T, kByList>>>(params, movement, pipeline);
}

// Lists have a kernel of their own because the other one has the low-latency path, too, and its sums spill registers. What each
// of the kernels buys is in docs/tuning.md.
template <typename T, bool kByList>
__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    gather_kernel(const __grid_constant__ GatherParams params) {
  pdl_wait(params);
  gather_rows<T, kByList>(params);
  leave(params.group);
}

// Batches have a kernel of their own because with them in gather_kernel, calls without them take longer; and their long h-tiles
// take fewer instructions for each element, but more registers, so that it has fewer warps, and a larger ring for each.
constexpr int kBatchGatherWarps = kBatchGatherThreads / kWarp;
template <typename T>
__global__ void __launch_bounds__(kBatchGatherThreads, kMovementBlocksPerSm)
    batch_gather_kernel(const __grid_constant__ GatherParams params) {
  pdl_wait(params);
  const Movement movement(params);
  movement.post();
  if (movement.begin()) {
    TmaRowPipeline pipeline = pipeline_of_warp<kBatchGatherWarps, LongTileReader<T>::kRingBytes>();
    send_and_sum<BatchGather<T>>(params, movement, pipeline);
  }
  leave(params.group);
}

// Returns whether batch_gather_kernel can make a call of more tokens than the low-latency path may take.
template <typename T>
bool can_take_batches(const GroupShape& shape, const MovementCall& call, const GatherTensors& tensors) {
  const uint64_t address_bits = reinterpret_cast<uint64_t>(tensors.rows) | reinterpret_cast<uint64_t>(tensors.out);
  return LongTileReader<T>::takes(call.hidden) && shape.precision != EPX_COMBINE_EXACT &&
         call.top_k <= BatchGather<T>::kMaxTopK && !is_unaligned(address_bits, row_bytes(call.dtype, call.hidden));
}

template <typename T>
cudaError_t launch_as(const Launcher& launcher, const MovementCall& call, const CallDescriptor& descriptor,
                      const GatherTensors& tensors) {
  const bool takes_list_reader =
      call.hidden < ShortTileReader<T>::kMaxHidden && !launcher.plan.may_take_ll_path(call.num_tokens);
  bool can_batch = false;
  if constexpr (LongTileReader<T>::kTakesType)
    can_batch = takes_list_reader && can_take_batches<T>(launcher.group.context.shape, call, tensors);
  const GatherGrid grid = launcher.plan.next_gather(call.num_tokens, call.top_k, row_bytes(call.dtype, call.hidden),
                                                    can_batch, launcher.stream);
  const GatherParams params{make_movement_params(launcher.group, grid.role_counts, call, descriptor), tensors};
  if constexpr (LongTileReader<T>::kTakesType) {
    if (grid.takes_batches) return launch_cooperative(&batch_gather_kernel<T>, grid.grid, launcher.stream, params);
    if (takes_list_reader && ShortTileReader<T>::takes(call.hidden))
      return launch_cooperative(&gather_kernel<T, true>, grid.grid, launcher.stream, params);
  }
  return launch_cooperative(&gather_kernel<T, false>, grid.grid, launcher.stream, params);
}
template <typename Call>
cudaError_t launch(const Launcher& launcher, const Call& call, const GatherTensors& tensors) {
  const CallDescriptor descriptor = describe(call, kNotRegistered);
  if (call.format.is_quantised()) return launch_quantised_gather(launcher, call, descriptor, tensors);
  if (call.dtype == EPX_FLOAT32) return launch_as<float>(launcher, call, descriptor, tensors);
  if (call.dtype == EPX_FLOAT16) return launch_as<__half>(launcher, call, descriptor, tensors);
  return launch_as<__nv_bfloat16>(launcher, call, descriptor, tensors);
}

} // namespace

std::vector<const void*> gather_kernels() {
  return {reinterpret_cast<const void*>(&gather_kernel<float, false>),
          reinterpret_cast<const void*>(&gather_kernel<__half, false>),
          reinterpret_cast<const void*>(&gather_kernel<__nv_bfloat16, false>),
          reinterpret_cast<const void*>(&gather_kernel<__half, true>),
          reinterpret_cast<const void*>(&gather_kernel<__nv_bfloat16, true>)};
}
std::vector<const void*> batch_gather_kernels() {
  return {reinterpret_cast<const void*>(&batch_gather_kernel<__half>),
          reinterpret_cast<const void*>(&batch_gather_kernel<__nv_bfloat16>)};
}
size_t batch_gather_shared_bytes() {
  return kBatchGatherWarps *
         (LongTileReader<__nv_bfloat16>::kRingBytes + TmaRowPipeline::kBarriersBytes); // as that of __half
}

cudaError_t launch_combine(const Launcher& launcher, const CombineCall& call) {
  if (call.is_rank_major()) return launch_combine_rank_major(launcher, call);
  return launch(launcher, call, {call.expert_out, call.recv_weights, nullptr, call.out, nullptr});
}

cudaError_t launch_dispatch_bwd(const Launcher& launcher, const DispatchBwdCall& call) {
  if (call.is_rank_major()) return launch_dispatch_rank_major_bwd(launcher, call);
  return launch(launcher, call,
                {call.grad_recv, nullptr, call.grad_recv_weights, call.grad_tokens, call.grad_topk_weights});
}

} // namespace epx::cuda
