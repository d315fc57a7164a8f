// SPDX-License-Identifier: Apache-2.0
// The kernels behind EPX_CHECK_HANDLE_MEM: seal_kernel stores a checksum of the handle memory after the call that wrote it, and
// check_kernel verifies it before a movement. Each has one block, so it takes about as long as one SM takes to read the memory:
// the switch is for those who look for a bug.
//
//   warps   what they do                                   what they wait for
//   all     each thread adds up a part of the body         only barriers of the block; no peer is involved
//   thread 0 of warp 0 then stores the checksum (seal_kernel) or the checked header (check_kernel)
#include "base/device/launch.h"
#include "runtime/handle_checksum.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/kernels.h"

namespace epx::cuda {
namespace {

constexpr int kThreads = 512;

struct ChecksumParams {
  GroupContext context;
  DeviceState* state;
  HandleLayout layout;
  int top_k;
};

// Returns whether the header's counts are valid, so that they say how much there is to add up. If they are not, the movement
// finds that out itself.
__device__ bool is_header_intact(const ChecksumParams& params, const HandleHeader& header) {
  return header.magic == kHandleMagic && header.checksum == header_checksum(header) && header.top_k == params.top_k &&
         counts_fit(header, params.context.shape, params.context.layout.ll_tokens);
}

// The threads of the block add up the body together, and all get the sum.
__device__ uint64_t add_up(const ChecksumParams& params, const std::byte* handle_mem, const HandleHeader& header) {
  __shared__ unsigned long long sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, static_cast<unsigned long long>(
                      body_checksum(handle_mem, header, params.layout, params.context, threadIdx.x, kThreads)));
  __syncthreads();
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    seal_kernel(const __grid_constant__ ChecksumParams params, std::byte* handle_mem) {
  auto* const header = reinterpret_cast<HandleHeader*>(handle_mem);
  const HandleHeader sealed = *header;
  if (!is_header_intact(params, sealed)) return; // prepare has failed
  const uint64_t sum = add_up(params, handle_mem, sealed);
  if (threadIdx.x == 0) header->body_checksum = sum;
}

__global__ void __launch_bounds__(kThreads)
    check_kernel(const __grid_constant__ ChecksumParams params, const std::byte* handle_mem) {
  HandleHeader header = *reinterpret_cast<const HandleHeader*>(handle_mem);
  if (is_header_intact(params, header) && add_up(params, handle_mem, header) != header.body_checksum) header.magic = 0;
  if (threadIdx.x == 0) params.state->checked_header = header;
}

ChecksumParams params_of(const DeviceGroup& group, int top_k) {
  return {group.context, group.state, make_handle_layout(group.context.shape, top_k), top_k};
}

} // namespace

std::vector<const void*> checksum_kernels() {
  return {reinterpret_cast<const void*>(&seal_kernel), reinterpret_cast<const void*>(&check_kernel)};
}

cudaError_t launch_seal(const DeviceGroup& group, int top_k, std::byte* handle_mem, cudaStream_t stream) {
  return launch(&seal_kernel, {1, kThreads}, stream, params_of(group, top_k), handle_mem);
}

cudaError_t launch_check(const DeviceGroup& group, const MovementCall& call, cudaStream_t stream) {
  return launch(&check_kernel, {1, kThreads}, stream, params_of(group, call.top_k), call.handle_mem);
}

} // namespace epx::cuda
