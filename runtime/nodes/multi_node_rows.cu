// SPDX-License-Identifier: Apache-2.0
// Kernels that take rows to and from the rails. Their warps share the rows among them and wait for nobody.
//
//   kernel          a warp takes                                 and does with it
//   pack_rows       one token that goes to another node          moves its row, sidecar and weights to the rail's area
//   forward_rows    one token of a leg                           copies what has been staged of it here to the rail's area
//   sum_rows        one token of this rank                       sums what has come of it
#include <algorithm>
#include <type_traits>

#include "base/device/launch.h"
#include "runtime/nodes/forward_rows.cuh"
#include "runtime/nodes/home_sums.cuh"
#include "runtime/nodes/multi_node_kernels.h"
#include "runtime/nodes/pack_rows.cuh"

namespace epx::cuda {
namespace {

template <typename Format>
__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    pack_rows_kernel(const __grid_constant__ PackParams params) {
  TmaRowPipeline pipeline = pipeline_of_warp();
  pack_rows<Format>(params, pipeline);
}

template <typename Sums>
__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    forward_rows_kernel(const __grid_constant__ ForwardParams params) {
  const Movement movement(params, CallSession(params.group, params.call.operation, CallSession::kContinues));
  if (!movement.is_usable() || !movement.call().enter_again(params.descriptor)) return;
  TmaRowPipeline pipeline = pipeline_of_warp();
  const RowForwarder<Sums> forwarder(params, movement, pipeline);
  forwarder.forward(partition_warps(0, kMovementWarps, 0, static_cast<int>(gridDim.x)));
}

template <typename Sums>
__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    sum_rows_kernel(const __grid_constant__ SumParams params) {
  if (params.nodes.state->header.magic != kHandleMagic) return; // this rank takes part without routes
  TmaRowPipeline pipeline = pipeline_of_warp();
  const HomeSums<Sums> sums(params, pipeline);
  sums.sum(partition_warps(0, kMovementWarps, 0, static_cast<int>(gridDim.x)));
}

constexpr size_t kSharedBytes = kMovementWarps * TmaRowPipeline::kSharedBytes; // movement_shared_bytes()

// Launches one of these with a warp for each of `items`, on at most num_sms SMs.
template <typename Params>
cudaError_t launch_rows(void (*kernel)(Params), int64_t items, int num_sms, cudaStream_t stream, const Params& params) {
  if (items == 0) return cudaSuccess;
  const auto blocks = static_cast<int>(std::min<int64_t>((items + kMovementWarps - 1) / kMovementWarps, num_sms));
  return launch(kernel, {blocks, kMovementThreads, kSharedBytes}, stream, params);
}

// Calls launch(std::type_identity<Sums>) with what travels in the call.
template <template <typename> typename Sums, typename Launch>
cudaError_t with_elements(epx_dtype dtype, const Launch& launch) {
  if (dtype == EPX_FLOAT32) return launch(std::type_identity<Sums<float>>());
  if (dtype == EPX_FLOAT16) return launch(std::type_identity<Sums<__half>>());
  return launch(std::type_identity<Sums<__nv_bfloat16>>());
}
template <typename Launch>
cudaError_t with_rail_sums(const MovementCall& call, const Launch& launch) {
  if (call.format.is_quantised()) return with_elements<QuantisedRailSums>(call.dtype, launch);
  return with_elements<PlainRailSums>(call.dtype, launch);
}

} // namespace

std::vector<const void*> multi_node_row_kernels() {
  return {reinterpret_cast<const void*>(&pack_rows_kernel<PlainRows>),
          reinterpret_cast<const void*>(&pack_rows_kernel<QuantisedRows>),
          reinterpret_cast<const void*>(&forward_rows_kernel<PlainRailSums<float>>),
          reinterpret_cast<const void*>(&forward_rows_kernel<PlainRailSums<__half>>),
          reinterpret_cast<const void*>(&forward_rows_kernel<PlainRailSums<__nv_bfloat16>>),
          reinterpret_cast<const void*>(&forward_rows_kernel<QuantisedRailSums<float>>),
          reinterpret_cast<const void*>(&forward_rows_kernel<QuantisedRailSums<__half>>),
          reinterpret_cast<const void*>(&forward_rows_kernel<QuantisedRailSums<__nv_bfloat16>>),
          reinterpret_cast<const void*>(&sum_rows_kernel<PlainRailSums<float>>),
          reinterpret_cast<const void*>(&sum_rows_kernel<PlainRailSums<__half>>),
          reinterpret_cast<const void*>(&sum_rows_kernel<PlainRailSums<__nv_bfloat16>>),
          reinterpret_cast<const void*>(&sum_rows_kernel<QuantisedRailSums<float>>),
          reinterpret_cast<const void*>(&sum_rows_kernel<QuantisedRailSums<__half>>),
          reinterpret_cast<const void*>(&sum_rows_kernel<QuantisedRailSums<__nv_bfloat16>>)};
}

cudaError_t launch_pack_rows(const MultiNodeCall& nodes, const PackCall& call, int num_sms, cudaStream_t stream) {
  const PackParams params{nodes, call, row_bytes(call.dtype, call.hidden),
                          rail_row_bytes(call.format, call.dtype, call.hidden)};
  const int64_t rows = int64_t{nodes.shape.num_nodes() - 1} * nodes.shape.chunk_tokens();
  const auto kernel = call.format.is_quantised() ? &pack_rows_kernel<QuantisedRows> : &pack_rows_kernel<PlainRows>;
  return launch_rows(kernel, rows, num_sms, stream, params);
}

cudaError_t launch_forward_rows(const DeviceGroup& group, const MultiNodeCall& nodes, const ForwardCall& call, int num_sms,
                                cudaStream_t stream) {
  const MovementCall& args = call.call;
  const ForwardParams params{make_movement_params(group, {}, args, describe_movement(args, 0, 0)),
                             {call.rows, call.row_weights, call.area},
                             nodes.shape,
                             nodes.layout,
                             call.node,
                             call.chunk};
  return with_rail_sums(args, [&](auto sums) {
    return launch_rows(&forward_rows_kernel<typename decltype(sums)::type>, args.num_tokens, num_sms, stream, params);
  });
}

cudaError_t launch_sum_rows(const MultiNodeCall& nodes, const SumCall& call, int num_sms, cudaStream_t stream) {
  const SumParams params{nodes, call};
  return with_rail_sums(call.call, [&](auto sums) {
    return launch_rows(&sum_rows_kernel<typename decltype(sums)::type>, call.call.num_tokens, num_sms, stream, params);
  });
}

} // namespace epx::cuda
