// SPDX-License-Identifier: Apache-2.0
// Stores an abort record in the window of every rank when the host ends the group (epx_group_abort) and no kernel of this rank
// may be running that would do so.
//
//   warps             what they do                                          what they wait for
//   the only warp     each lane stores the record in one peer at a time     nothing
#include "base/device/launch.h"
#include "base/device/memory_order.cuh"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/kernels.h"

namespace epx::cuda {
namespace {

__global__ void abort_kernel(const __grid_constant__ DeviceGroup group, uint64_t abort_record) {
  for (int peer = threadIdx.x; peer < group.context.shape.num_ranks; peer += blockDim.x)
    compare_and_swap_sys(&group.window().at<Flag>(peer, group.context.layout.abort_record.offset)->value, 0, abort_record);
}

} // namespace

const void* abort_kernel_address() {
  return reinterpret_cast<const void*>(&abort_kernel);
}

cudaError_t launch_abort(const DeviceGroup& group, const AbortRecord& abort_record, cudaStream_t stream) {
  return launch(&abort_kernel, {1, 32}, stream, group, pack(abort_record));
}

} // namespace epx::cuda
