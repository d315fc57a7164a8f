// SPDX-License-Identifier: Apache-2.0
//   kernel            warps   what they do                          what they wait for
//   copy_integers     all     neighbouring threads copy neighbours  nothing
//   clamp_zones       all     each thread bounds one zone           nothing
//   for_each          all     each thread makes some of the steps   nothing
#include "moe/block/cuda/kernels.h"

#include "base/device/kernel_addresses.h"
#include "moe/block/tables.h"
#include "moe/block/zones.h"
#include "moe/cuda/warps.cuh"

namespace epx::moe::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) copy_integers_kernel(Integers from, Integers to, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step)
    to.set(i, from[i]);
}

__global__ void __launch_bounds__(kThreads)
    clamp_zones_kernel(Integers counts, Integers offsets, int num_experts, int64_t num_rows) {
  if (const int e = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); e <= num_experts)
    clamp_zone(counts, offsets, e, num_experts, num_rows);
}

template <typename Step>
__global__ void __launch_bounds__(kThreads) for_each_kernel(const __grid_constant__ Step step, int64_t count) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride)
    step(i);
}

epx::cuda::Grid grid_of_threads(int64_t count, const LaunchTarget& target) {
  const int64_t blocks = std::min((count + kThreads - 1) / kThreads, int64_t{kBlocksPerSm} * target.num_sms);
  return {static_cast<int>(blocks), kThreads};
}

} // namespace

std::vector<const void*> block_kernels() {
  return epx::cuda::addresses_of(&copy_integers_kernel, &clamp_zones_kernel, &for_each_kernel<RingRoutes>,
                                 &for_each_kernel<RingSlices>, &for_each_kernel<GatheredRoutes>, &for_each_kernel<HomeRows>,
                                 &for_each_kernel<CountSlices>, &for_each_kernel<ExpertSlices>);
}

template <typename Step>
int launch_for_each(const Step& step, int64_t count, const LaunchTarget& target) {
  if (count == 0) return cudaSuccess;
  return epx::cuda::launch(&for_each_kernel<Step>, grid_of_threads(count, target), stream_of(target), step, count);
}
template int launch_for_each(const RingRoutes&, int64_t, const LaunchTarget&);
template int launch_for_each(const RingSlices&, int64_t, const LaunchTarget&);
template int launch_for_each(const GatheredRoutes&, int64_t, const LaunchTarget&);
template int launch_for_each(const HomeRows&, int64_t, const LaunchTarget&);
template int launch_for_each(const CountSlices&, int64_t, const LaunchTarget&);
template int launch_for_each(const ExpertSlices&, int64_t, const LaunchTarget&);

int launch_copy_integers(Integers from, Integers to, int64_t count, const LaunchTarget& target) {
  if (count == 0) return cudaSuccess;
  return epx::cuda::launch(&copy_integers_kernel, grid_of_threads(count, target), stream_of(target), from, to, count);
}

int launch_clamp_zones(Integers counts, Integers offsets, int num_experts, int64_t num_rows, const LaunchTarget& target) {
  const epx::cuda::Grid grid{num_experts / kThreads + 1, kThreads};
  return epx::cuda::launch(&clamp_zones_kernel, grid, stream_of(target), counts, offsets, num_experts, num_rows);
}

} // namespace epx::moe::cuda
