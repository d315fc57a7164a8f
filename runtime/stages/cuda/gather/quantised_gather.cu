// SPDX-License-Identifier: Apache-2.0
// combine and dispatch_bwd with a row format, in both layouts: a rank's partial sum of a token travels quantised from float32. There
// is no low-latency path. The kernels are Gather's (gather.cuh) with another policy of sums.
#include "runtime/stages/cuda/gather/quantised_gather.h"

#include "base/device/launch.h"
#include "runtime/stages/cuda/gather/gather.cuh"
#include "runtime/stages/cuda/gather/quantised_sums.cuh"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/movement.cuh"

namespace epx::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    quantised_gather_kernel(const __grid_constant__ GatherParams params) {
  pdl_wait(params);
  const Movement movement(params);
  movement.post();
  if (movement.begin()) {
    TmaRowPipeline pipeline = pipeline_of_warp();
    send_and_sum<Gather<T, QuantisedSums<T>>>(params, movement, pipeline);
  }
  leave(params.group);
}

} // namespace

std::vector<const void*> quantised_gather_kernels() {
  return {reinterpret_cast<const void*>(&quantised_gather_kernel<float>),
          reinterpret_cast<const void*>(&quantised_gather_kernel<__half>),
          reinterpret_cast<const void*>(&quantised_gather_kernel<__nv_bfloat16>)};
}

cudaError_t launch_quantised_gather(const Launcher& launcher, const MovementCall& call, const CallDescriptor& descriptor,
                                    const GatherTensors& tensors) {
  const GatherGrid grid =
      launcher.plan.next_gather(call.num_tokens, call.top_k, row_bytes(call.dtype, call.hidden), false, launcher.stream);
  const GatherParams params{make_movement_params(launcher.group, grid.role_counts, call, descriptor), tensors};
  if (call.dtype == EPX_FLOAT32)
    return launch_cooperative(&quantised_gather_kernel<float>, grid.grid, launcher.stream, params);
  if (call.dtype == EPX_FLOAT16)
    return launch_cooperative(&quantised_gather_kernel<__half>, grid.grid, launcher.stream, params);
  return launch_cooperative(&quantised_gather_kernel<__nv_bfloat16>, grid.grid, launcher.stream, params);
}

} // namespace epx::cuda
