// SPDX-License-Identifier: Apache-2.0
// The kernels behind EPX_CHECK_HANDLE_MEM, one for groups of one node and one for groups of several. Behind the call that wrote
// the handle memory they store its checksum there, and before a movement they verify it. Each has one block, so it takes about
// as long as one SM takes to read the memory: the switch is for those who look for a bug.
//
//   warps   what they do                                   what they wait for
//   all     each thread adds up a part of the body         only barriers of the block; no peer is involved
//   thread 0 of warp 0 then stores the checksum, or the checked header
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
  HandleHeader* checked_header; // where the checked header goes; NULL: the checksum is to be stored, not verified
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
    checksum_kernel(const __grid_constant__ ChecksumParams<Body> params, std::byte* handle_mem) {
  auto* const stored = reinterpret_cast<HandleHeader*>(handle_mem);
  HandleHeader header = *stored;
  const bool is_intact = is_header_intact(params, header); // if not, prepare has failed, or something has been overwritten
  const uint64_t sum = is_intact ? add_up(params, handle_mem, header) : 0;
  if (threadIdx.x != 0) return;
  if (params.checked_header == nullptr) {
    if (is_intact) stored->body_checksum = sum;
    return;
  }
  if (is_intact && sum != header.body_checksum) header.magic = 0;
  *params.checked_header = header;
}

// `checked_header`: see ChecksumParams.
cudaError_t launch_one_node(const DeviceGroup& group, int top_k, std::byte* handle_mem, HandleHeader* checked_header,
                            cudaStream_t stream) {
  const ChecksumParams<OneNodeBody> params{
      {make_handle_layout(group.context.shape, top_k), group.context}, top_k, checked_header};
  return launch(&checksum_kernel<OneNodeBody>, {1, kThreads}, stream, params, handle_mem);
}
cudaError_t launch_multi_node(const MultiNodeDevice& nodes, int top_k, std::byte* handle_mem, HandleHeader* checked_header,
                              cudaStream_t stream) {
  const ChecksumParams<MultiNodeBody> params{
      {make_multi_node_handle_layout(nodes.shape, top_k), nodes.shape}, top_k, checked_header};
  return launch(&checksum_kernel<MultiNodeBody>, {1, kThreads}, stream, params, handle_mem);
}

} // namespace

std::vector<const void*> checksum_kernels() {
  return {reinterpret_cast<const void*>(&checksum_kernel<OneNodeBody>),
          reinterpret_cast<const void*>(&checksum_kernel<MultiNodeBody>)};
}

cudaError_t launch_seal(const DeviceGroup& group, int top_k, std::byte* handle_mem, cudaStream_t stream) {
  return launch_one_node(group, top_k, handle_mem, nullptr, stream);
}

cudaError_t launch_check(const DeviceGroup& group, const MovementCall& call, cudaStream_t stream) {
  return launch_one_node(group, call.top_k, const_cast<std::byte*>(call.handle_mem), &group.state->checked_header, stream);
}

cudaError_t launch_seal(const MultiNodeDevice& nodes, int top_k, std::byte* handle_mem, cudaStream_t stream) {
  return launch_multi_node(nodes, top_k, handle_mem, nullptr, stream);
}

cudaError_t launch_check(const MultiNodeDevice& nodes, const MovementCall& call, cudaStream_t stream) {
  return launch_multi_node(nodes, call.top_k, const_cast<std::byte*>(call.handle_mem), &nodes.state->header, stream);
}

} // namespace epx::cuda
