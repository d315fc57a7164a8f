// Tells every peer that this rank ended the group, while none of its kernels is there to do so.
#include "runtime/base/device/launch.h"
#include "runtime/base/device/memory_order.cuh"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/kernels.h"

namespace epx::cuda {
namespace {

__global__ void poison_kernel(const __grid_constant__ DeviceGroup group, uint64_t poison) {
  for (int peer = threadIdx.x; peer < group.context.shape.num_ranks; peer += blockDim.x)
    compare_and_swap_sys(&group.window().at<Flag>(peer, group.context.layout.poison.offset)->value, 0, poison);
}

} // namespace

const void* poison_kernel_address() {
  return reinterpret_cast<const void*>(&poison_kernel);
}

cudaError_t launch_poison(const DeviceGroup& group, const Poison& poison, cudaStream_t stream) {
  return launch(&poison_kernel, {1, 32}, stream, group, pack(poison));
}

} // namespace epx::cuda
