// SPDX-License-Identifier: Apache-2.0
// Scatter: rows go from tokens to slots. dispatch copies them; in combine_bwd the receiver scales each row by its weight and
// computes its dot product with expert_out, which is the weight's gradient. The low-latency path of dispatch is in
// ll_dispatch.cuh. On the high-throughput path the warps are specialized:
//
//   warps    do                                                         wait for
//   send     store a token's row once to each peer that it goes to:     the entry barrier; a free cell of the signal warp
//            into the token's first live slot there when the receive
//            rows lie in an allocation of the group, else, and where
//            this rank stages its rows, into staging
//   signal   store ready flags for the send warps of their CTA          the entry barrier; the CTA's pending flags
//            (signal_warp.cuh)
//            In a small grid send and signal warps receive when
//            nothing is left to send or to signal
//   receive  clear pads                                                 nothing
//            store the tokens of this rank into their slots here        the entry barrier
//            store a peer's token into all its slots here, from one     the row's ready flag
//            read of the row
//
// A row and its ready flag, in this order:
//   cp.async.bulk      the send warp stores the row in the peer's window (TmaRowPipeline::begin_copy_to_destinations; a row that
//                      it quantises: begin_store_to_destinations)
//   wait_group 0       its lane 0 waits until those stores are complete (TmaRowPipeline::finish)
//   fence.acq_rel.cta  the send warp enqueues the flag in shared memory by a CAS (SignalWarp::enqueue)
//   fence.acq_rel.sys  the signal warp has loaded the enqueued flags (SignalWarp::run)
//   st.relaxed.sys     and stores the epoch of the call in the flag (CallSession::signal_behind_fence); no flag is ever reset
//   ld.acquire.sys     lane 0 of a receive warp polls the flag (CallSession::wait_ready); a __syncwarp() follows
//   fence.proxy.async  orders that acquire before the bulk loads of the row, in every lane (TmaRowPipeline::begin); rows that
//                      are read by cp.async or by plain loads need none
#include <type_traits>

#include "runtime/stages/cuda/kernels.h"

#include "base/device/launch.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/scatter/ll_dispatch.cuh"
#include "runtime/stages/cuda/scatter/scatter.cuh"

namespace epx::cuda {
namespace {

// Weights' gradients, which rank-major calls do not have, have kernels of their own, since a kernel with both loops would spill
// the registers of either.
template <typename T, bool kHasProducts>
struct CombineBwd {
  using Format = PlainRows;

  CombineBwdCall call;
  int64_t row_bytes;

  __device__ const std::byte* input_rows() const { return call.grad_out; }
  __device__ static const float* input_weights() { return nullptr; }
  __device__ static const std::byte* input_sidecar() { return nullptr; }
  static constexpr int64_t sidecar_bytes() { return 0; }
  __device__ static PlainRows format() { return {}; }
  __device__ int64_t recv_row_bytes() const { return row_bytes; }
  __device__ int64_t wire_row_bytes() const { return row_bytes; }
  __device__ std::byte* rows() const { return call.grad_expert_out; }
  static constexpr bool clears_pads() { return true; }
  static constexpr bool kMixesPaths = false, kTakesRankMajor = !kHasProducts;
  static constexpr bool kStagesOwnRows = false;
  __device__ void store(TmaRowPipeline& pipeline, const SourceRow& source_row, int32_t slot, int64_t index, float) const {
    const auto* const row = reinterpret_cast<const T*>(source_row.row);
    if constexpr (kHasProducts) {
      store_with_products(pipeline, row, slot);
    } else {
      const bool is_slot = slot >= 0;
      std::byte* const to = is_slot ? call.grad_expert_out + index * row_bytes : nullptr;
      const float factor = is_slot && call.recv_weights != nullptr ? call.recv_weights[slot] : 1.0f;
      if (call.recv_weights != nullptr)
        scale_row_to_destinations(pipeline, row, call.hidden, reinterpret_cast<T*>(to), factor);
      else
        begin_copy_row_to_destinations(pipeline, source_row.row, row_bytes,
                                       slot != source_row.slot_in_place ? to : nullptr);
    }
  }
  __device__ void clear_beside_rows(int32_t slot, int64_t /*row*/) const {
    if (kHasProducts && slot >= 0) call.grad_recv_weights[slot] = 0.0f;
  }

private:
  // Lanes that have a slot come first. Slots descend: the first may alias the gradient's row, and is overwritten last.
  __device__ void store_with_products(TmaRowPipeline& pipeline, const T* grad, int32_t slot) const {
    const bool is_weighted = call.recv_weights != nullptr;
    const int slots = __popc(__ballot_sync(~0u, slot >= 0 ? 1 : 0));
    const auto bits = [](const void* place) { return reinterpret_cast<uint64_t>(place); };
    // Where the first rows and the size of a row are aligned, all rows are.
    const bool is_aligned = is_vectorizable(bits(grad) | bits(call.expert_out) | bits(call.grad_expert_out), call.hidden);
    const int at_a_time = is_aligned ? kMaxProducts : 1;
#pragma unroll 1
    for (int first = (slots - 1) / at_a_time * at_a_time; first >= 0; first -= at_a_time) {
      const int count = min(at_a_time, slots - first);
      const int32_t own = from_lane(slot, min(first + lane(), kWarp - 1)); // lane i has the slot `first` + i
      const bool has_own = lane() < count;
      T* const to = has_own ? reinterpret_cast<T*>(call.grad_expert_out + own * row_bytes) : nullptr;
      const T* const x = has_own ? reinterpret_cast<const T*>(call.expert_out + own * row_bytes) : nullptr;
      const float weight = has_own && is_weighted ? call.recv_weights[own] : 1.0f;
      float product;
      if (is_aligned)
        product = scale_and_multiply(pipeline.begin_generic(), grad, x, count, call.hidden, to, is_weighted, weight);
      else
        product = scale_and_multiply_elements(grad, from_lane(x, 0), call.hidden, from_lane(to, 0), is_weighted,
                                              from_lane(weight, 0));
      if (has_own) call.grad_recv_weights[own] = product;
    }
  }
};

// combine_bwd of rows that have a format. All rows pass through staging: the weights and the dot products need the row as it
// travelled.
struct QuantisedCombineBwd {
  using Format = QuantisedRows;

  CombineBwdCall call;
  int64_t row_bytes; // of grad_out

  __device__ const std::byte* input_rows() const { return call.grad_out; }
  __device__ static const float* input_weights() { return nullptr; }
  __device__ static const std::byte* input_sidecar() { return nullptr; }
  static constexpr int64_t sidecar_bytes() { return 0; }
  __device__ QuantisedRows format() const { return QuantisedRows(call); }
  __device__ int64_t recv_row_bytes() const { return epx::row_bytes(call.recv_dtype, call.hidden); }
  __device__ int64_t wire_row_bytes() const { return WireRow(call.format, call.hidden).bytes; }
  __device__ std::byte* rows() const { return call.grad_expert_out; }
  static constexpr bool clears_pads() { return true; }
  static constexpr bool kMixesPaths = false, kTakesRankMajor = true;
  static constexpr bool kStagesOwnRows = true;
  __device__ void store(TmaRowPipeline& pipeline, const SourceRow& source_row, int32_t slot, int64_t index, float) const {
    const bool is_slot = slot >= 0;
    if (!is_slot) index = -1;
    std::byte* const to = is_slot ? call.grad_expert_out + index * recv_row_bytes() : nullptr;
    if (call.recv_weights != nullptr)
      format().begin_receive_weighted(pipeline, source_row.row, index, to, is_slot ? call.recv_weights[slot] : 1.0f);
    else
      format().begin_receive(pipeline, source_row.row, row_bytes, index, to);
    if (call.grad_recv_weights == nullptr) return;
    const int64_t expert_bytes = epx::row_bytes(call.expert_dtype, call.hidden);
    for (unsigned left = __ballot_sync(~0u, is_slot ? 1 : 0); left != 0; left &= left - 1) {
      const int32_t one = from_lane(slot, lowest_bit(left));
      const float product = format().dot(source_row.row, call.expert_dtype, call.expert_out + one * expert_bytes);
      if (lane() == 0) call.grad_recv_weights[one] = product;
    }
  }
  __device__ void clear_beside_rows(int32_t slot, int64_t row) const {
    if (call.grad_recv_weights != nullptr && slot >= 0) call.grad_recv_weights[slot] = 0.0f;
    format().clear_scales(slot >= 0 ? row : -1);
  }
};

template <bool kUnaligned, typename Format>
__device__ void ll_scatter(const ScatterParams<Dispatch<Format>>& params, Movement& movement) {
  if (!movement.call().begin_ll()) return;
  const LlDispatch<typename Format::template LlChunks<kUnaligned>> dispatch(params, movement, params.operation.call);
  if (dispatch.is_pad_warp()) {
    TmaRowPipeline pipeline = pipeline_of_warp();
    Scatter(params, movement, pipeline).clear_pads(dispatch.pad_partition());
    pipeline.finish();
    return;
  }
  dispatch.send();
  movement.call().sent_by_warp(dispatch.num_copy_warps());
  dispatch.receive();
}
// Not inlined: a kernel would have more registers for it than for the rest.
template <bool kUnaligned, typename Format>
__device__ __noinline__ void ll_scatter_apart(const ScatterParams<Dispatch<Format>>& params, Movement movement) {
  ll_scatter<kUnaligned>(params, movement);
}
template <typename Format>
__device__ __forceinline__ void ll_scatter(const ScatterParams<Dispatch<Format>>& params, Movement& movement) {
  if (has_unaligned_rows(params.operation.call))
    ll_scatter_apart<true>(params, movement);
  else if constexpr (Format::kIsReceiveFormat)
    ll_scatter<false>(params, movement);
  else
    ll_scatter_apart<false>(params, movement);
}

template <typename Operation>
__device__ __forceinline__ Movement movement_of(const ScatterParams<Operation>& params) {
  if constexpr (Operation::kMixesPaths)
    return {params, CallSession(params.group, params.call.operation, CallSession::kContinues)};
  else
    return Movement(params);
}

template <typename Operation>
__device__ __forceinline__ void scatter(const ScatterParams<Operation>& params) {
  Movement movement = movement_of(params);
  if constexpr (!Operation::kMixesPaths) movement.post(); // the first half of the call has posted
  if constexpr (std::is_same_v<Operation, Dispatch<typename Operation::Format>>) {
    if (movement.takes_ll_path()) {
      ll_scatter(params, movement);
      return;
    }
  }
  TmaRowPipeline pipeline = pipeline_of_warp();
  Scatter scatter(params, movement, pipeline);
  WarpAssignment warp = assign_warp_role(params.role_counts, params.group.context.shape.num_ranks);
  if (warp.role == WarpRole::receive && movement.is_usable() && params.operation.clears_pads())
    scatter.clear_pads(warp); // needs no peer, and overlaps the entry barrier
  if (warp.role == WarpRole::signal) scatter.signal_warp().clear();
  if (!movement.begin()) {
    pipeline.finish();
    return;
  }
  warp = send_and_signal(scatter, movement.call(), params.role_counts, warp);
  if (warp.role == WarpRole::receive) {
    scatter.receive(warp);
    if constexpr (Operation::kMixesPaths) receive_ll_peers(params, movement.call(), warp, pipeline);
  }
}

template <typename Operation>
__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    scatter_kernel(const __grid_constant__ ScatterParams<Operation> params) {
  pdl_wait(params);
  scatter(params);
  leave(params.group);
}

template <typename Operation>
cudaError_t launch(const Launcher& launcher, const Operation& operation, const CallDescriptor& descriptor) {
  const auto& call = operation.call;
  const int alignment = operation.clears_pads() ? call.alignment : 1; // of zones that have pads to clear
  const auto [grid, role_counts] = launcher.plan.next_scatter(call.num_tokens, operation.row_bytes, alignment,
                                                              sender_work_of(call), ReceiverWork::rows, launcher.stream);
  MovementParams movement = make_movement_params(launcher.group, role_counts, call, descriptor);
  if (!call.is_rank_major() && launcher.plan.stages_rows(grid.blocks, operation.row_bytes))
    movement.descriptor.stages_rows = 1;
  const ScatterParams<Operation> params{movement, operation};
  return launch_cooperative(&scatter_kernel<Operation>, grid, launcher.stream, params);
}

template <typename T>
cudaError_t launch_combine_bwd_as(const Launcher& launcher, const CombineBwdCall& call, const CallDescriptor& descriptor) {
  const int64_t row_bytes = epx::row_bytes(call.dtype, call.hidden);
  if (call.grad_recv_weights != nullptr) return launch(launcher, CombineBwd<T, true>{call, row_bytes}, descriptor);
  return launch(launcher, CombineBwd<T, false>{call, row_bytes}, descriptor);
}

} // namespace

size_t movement_shared_bytes() {
  return kMovementWarps * TmaRowPipeline::kSharedBytes;
}
std::vector<const void*> scatter_kernels() {
  return {reinterpret_cast<const void*>(&scatter_kernel<Dispatch<PlainRows>>),
          reinterpret_cast<const void*>(&scatter_kernel<Dispatch<QuantisedRows>>),
          reinterpret_cast<const void*>(&scatter_kernel<MixedDispatch<PlainRows>>),
          reinterpret_cast<const void*>(&scatter_kernel<MixedDispatch<QuantisedRows>>),
          reinterpret_cast<const void*>(&scatter_kernel<QuantisedCombineBwd>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwd<float, false>>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwd<float, true>>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwd<__half, false>>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwd<__half, true>>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwd<__nv_bfloat16, false>>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwd<__nv_bfloat16, true>>)};
}

cudaError_t launch_dispatch(const Launcher& launcher, const DispatchCall& call) {
  const int64_t bytes = row_bytes(call.dtype, call.hidden);
  const CallDescriptor descriptor = describe(call, launcher.place_of(call, call.recv_tokens));
  if (call.format.is_quantised()) return launch(launcher, Dispatch<QuantisedRows>{call, bytes}, descriptor);
  return launch(launcher, Dispatch<PlainRows>{call, bytes}, descriptor);
}

cudaError_t launch_second_half(const Launcher& launcher, const PrepareDispatchCall& call) {
  const DispatchCall& dispatch = call.dispatch;
  const int64_t bytes = row_bytes(dispatch.dtype, dispatch.hidden);
  const CallDescriptor descriptor = describe(call, launcher.place_of(dispatch, dispatch.recv_tokens));
  if (dispatch.format.is_quantised()) return launch(launcher, MixedDispatch<QuantisedRows>{{dispatch, bytes}}, descriptor);
  return launch(launcher, MixedDispatch<PlainRows>{{dispatch, bytes}}, descriptor);
}

cudaError_t launch_combine_bwd(const Launcher& launcher, const CombineBwdCall& call) {
  const CallDescriptor descriptor = describe(call, launcher.place_of(call, call.grad_expert_out));
  if (call.format.is_quantised())
    return launch(launcher, QuantisedCombineBwd{call, row_bytes(call.dtype, call.hidden)}, descriptor);
  if (call.dtype == EPX_FLOAT32) return launch_combine_bwd_as<float>(launcher, call, descriptor);
  if (call.dtype == EPX_FLOAT16) return launch_combine_bwd_as<__half>(launcher, call, descriptor);
  return launch_combine_bwd_as<__nv_bfloat16>(launcher, call, descriptor);
}

} // namespace epx::cuda
