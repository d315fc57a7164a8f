// SPDX-License-Identifier: Apache-2.0
// The kernels behind EPX_CHECK_HANDLE_MEM: seal_kernel stores a checksum of the handle memory after the call that wrote it, and
// check_kernel verifies it before a movement, in groups of one node and of several. Each has one block, so it takes about as
// long as one SM takes to read the memory: the switch is for those who look for a bug.
//
//   warps   what they do                                   what they wait for
//   all     each thread adds up a part of the body         only barriers of the block; no peer is involved
//   thread 0 of warp 0 then stores the checksum (seal_kernel) or the checked header (check_kernel)
#include "base/device/launch.h"
#include "runtime/handle_checksum.h"
#include "runtime/nodes/multi_node_kernels.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/kernels.h"

namespace epx::cuda {
namespace {

constexpr int kThreads = 512;

// The body of handle memory in a group of one node.
struct OneNodeBody {
  HandleLayout layout;
  GroupContext group;

  __device__ bool fits(const HandleHeader& header) const { return counts_fit(header, group.shape, group.layout.ll_tokens); }
};
// The same in a group of several.
struct MultiNodeBody {
  MultiNodeHandleLayout layout;
  MultiNodeShape group;

  __device__ bool fits(const HandleHeader& header) const { return counts_fit(header, group.group, 0); }
};

template <typename Body>
struct ChecksumParams {
  Body body;
  int top_k;
  HandleHeader* checked_header; // which check_kernel stores
};

// Returns whether the header's counts are valid, so that they say how much there is to add up. If they are not, the movement
// finds that out itself.
template <typename Body>
__device__ bool is_header_intact(const ChecksumParams<Body>& params, const HandleHeader& header) {
  return header.magic == kHandleMagic && header.checksum == header_checksum(header) && header.top_k == params.top_k &&
         params.body.fits(header);
}

// The threads of the block add up the body together, and all get the sum.
template <typename Body>
__device__ uint64_t add_up(const ChecksumParams<Body>& params, const std::byte* handle_mem, const HandleHeader& header) {
  __shared__ unsigned long long sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, static_cast<unsigned long long>(
                      body_checksum(handle_mem, header, params.body.layout, params.body.group, threadIdx.x, kThreads)));
  __syncthreads();
  return sum;
}

template <typename Body>
__global__ void __launch_bounds__(kThreads)
    seal_kernel(const __grid_constant__ ChecksumParams<Body> params, std::byte* handle_mem) {
  auto* const header = reinterpret_cast<HandleHeader*>(handle_mem);
  const HandleHeader sealed = *header;
  if (!is_header_intact(params, sealed)) return; // prepare has failed
  const uint64_t sum = add_up(params, handle_mem, sealed);
  if (threadIdx.x == 0) header->body_checksum = sum;
}

template <typename Body>
__global__ void __launch_bounds__(kThreads)
    check_kernel(const __grid_constant__ ChecksumParams<Body> params, const std::byte* handle_mem) {
  HandleHeader header = *reinterpret_cast<const HandleHeader*>(handle_mem);
  if (is_header_intact(params, header) && add_up(params, handle_mem, header) != header.body_checksum) header.magic = 0;
  if (threadIdx.x == 0) *params.checked_header = header;
}

ChecksumParams<OneNodeBody> params_of(const DeviceGroup& group, int top_k) {
  return {{make_handle_layout(group.context.shape, top_k), group.context}, top_k, &group.state->checked_header};
}
ChecksumParams<MultiNodeBody> params_of(const MultiNodeDevice& nodes, int top_k) {
  return {{make_multi_node_handle_layout(nodes.shape, top_k), nodes.shape}, top_k, &nodes.state->header};
}

} // namespace

std::vector<const void*> checksum_kernels() {
  return {reinterpret_cast<const void*>(&seal_kernel<OneNodeBody>),
          reinterpret_cast<const void*>(&check_kernel<OneNodeBody>),
          reinterpret_cast<const void*>(&seal_kernel<MultiNodeBody>),
          reinterpret_cast<const void*>(&check_kernel<MultiNodeBody>)};
}

cudaError_t launch_seal(const DeviceGroup& group, int top_k, std::byte* handle_mem, cudaStream_t stream) {
  return launch(&seal_kernel<OneNodeBody>, {1, kThreads}, stream, params_of(group, top_k), handle_mem);
}

cudaError_t launch_check(const DeviceGroup& group, const MovementCall& call, cudaStream_t stream) {
  return launch(&check_kernel<OneNodeBody>, {1, kThreads}, stream, params_of(group, call.top_k), call.handle_mem);
}

cudaError_t launch_seal(const MultiNodeDevice& nodes, int top_k, std::byte* handle_mem, cudaStream_t stream) {
  return launch(&seal_kernel<MultiNodeBody>, {1, kThreads}, stream, params_of(nodes, top_k), handle_mem);
}

cudaError_t launch_check(const MultiNodeDevice& nodes, const MovementCall& call, cudaStream_t stream) {
  return launch(&check_kernel<MultiNodeBody>, {1, kThreads}, stream, params_of(nodes, call.top_k), call.handle_mem);
}

} // namespace epx::cuda
