// SPDX-License-Identifier: Apache-2.0
// Scatter: rows go from tokens to slots. dispatch copies them; in combine_bwd the receiver scales each row by its weight and
// computes its dot product with expert_out, which is the weight's gradient. The low-latency path of dispatch is in
// ll_dispatch.cuh. On the high-throughput path the warps are specialized:
//
//   warps    do                                                         wait for
//   send     store a token's row once to each peer that it goes to:     the entry barrier; a free cell of the signal warp
//            into the token's first live slot there when the receive
//            rows lie in an allocation of the group, else, and where
//            this rank stages its rows, into staging. Scales of
//            rows (row_format.cuh) always go into staging. dispatch
//            after prepare stores a row that it quantises, and that
//            arrives so, into its slots here, too
//   signal   store ready flags for the send warps of their CTA          the entry barrier; the CTA's pending flags
//            (signal_warp.cuh)
//            In a small grid send and signal warps receive when
//            nothing is left to send or to signal
//   receive  clear pads                                                 nothing
//            store the tokens of this rank into their slots here,       the entry barrier
//            unless senders do
//            store a peer's token into all its slots here, from one     the row's ready flag
//            read of the row
//
// A row and its ready flag, in this order:
//   cp.async.bulk      the send warp stores the row in the peer's window (TmaRowPipeline::begin_copy_to_destinations; a row that
//                      it quantises: begin_store_to_destinations). All lanes store its sidecar and scales
//   wait_group 0       its lane 0 waits until those stores are complete (TmaRowPipeline::finish); a __syncwarp() follows
//   fence.acq_rel.cta  the send warp enqueues the flag in shared memory by a CAS (SignalWarp::enqueue)
//   fence.acq_rel.sys  the signal warp has loaded the enqueued flags (SignalWarp::run)
//   st.relaxed.sys     and stores the epoch of the call in the flag (CallSession::signal_behind_fence); no flag is ever reset
//   ld.acquire.sys     lane 0 of a receive warp polls the flag (CallSession::wait_ready); a __syncwarp() follows
//   fence.proxy.async  orders that acquire before the bulk loads of the row, in every lane (TmaRowPipeline::begin); rows that
//                      are read by cp.async or by plain loads need none
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/scatter/scatter_kernel.cuh"

namespace epx::cuda {

size_t movement_shared_bytes() {
  return kMovementWarps * TmaRowPipeline::kSharedBytes;
}
std::vector<const void*> scatter_kernels() {
  return {reinterpret_cast<const void*>(&scatter_kernel<Dispatch<PlainRows>>),
          reinterpret_cast<const void*>(&scatter_kernel<Dispatch<QuantisedRows>>),
          reinterpret_cast<const void*>(&scatter_kernel<MixedDispatch<PlainRows>>),
          reinterpret_cast<const void*>(&scatter_kernel<MixedDispatch<QuantisedRows>>)};
}

cudaError_t launch_dispatch(const Launcher& launcher, const DispatchCall& call) {
  const int64_t bytes = input_row_bytes(call);
  const CallDescriptor descriptor = describe(call, launcher.place_of(call, call.recv_tokens));
  if (call.format.is_quantised()) return launch_scatter(launcher, Dispatch<QuantisedRows>{call, bytes}, descriptor);
  return launch_scatter(launcher, Dispatch<PlainRows>{call, bytes}, descriptor);
}

cudaError_t launch_second_half(const Launcher& launcher, const PrepareDispatchCall& call) {
  const DispatchCall& dispatch = call.dispatch;
  const int64_t bytes = input_row_bytes(dispatch);
  const CallDescriptor descriptor = describe(call, launcher.place_of(dispatch, dispatch.recv_tokens));
  if (dispatch.format.is_quantised())
    return launch_scatter(launcher, MixedDispatch<QuantisedRows>{{dispatch, bytes}}, descriptor);
  return launch_scatter(launcher, MixedDispatch<PlainRows>{{dispatch, bytes}}, descriptor);
}

} // namespace epx::cuda
