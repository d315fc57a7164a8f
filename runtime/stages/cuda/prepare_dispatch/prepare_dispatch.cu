// SPDX-License-Identifier: Apache-2.0
// prepare_dispatch of a rank with few tokens (sends_ll_lines), on the low-latency path. Its rows leave as LL lines before any
// slot is known, since their staging is keyed by (source, token): to each rank that a valid expert of the token lives on. A
// rank with more tokens takes the kernel of ht_prepare_dispatch.cu where staging is keyed by (source, token), rows have no format,
// and that kernel pays (LaunchPlan::has_ht_prepare_dispatch()); otherwise it takes two kernels, prepare's and then scatter's
// (launch_first_half, launch_second_half), which make one call. Each rank learns from the descriptors which path its peers have
// taken, so the ranks of a call may take different ones.
//
//   blocks          do                                                        wait for
//   those that      post the call descriptor (block 0); publish routes or     the entry barrier; LL packets of routes, counts,
//   prepare, the    counts, assign slots, deliver the plan and the outputs,   slot records and first slots; then, of many
//   first ones      as prepare does (prepare.cu); where all ranks have few    tiles, what receivers wait for
//                   tokens, slots go to the other blocks as LL packets, and
//                   of many tiles these blocks receive some afterwards
//   those that      send: store a chunk of a token of this rank into the      nothing
//   move rows, the  staging of each peer that the token goes to
//   others          receive: store a chunk of any rank's token into its       the entry barrier of the warp; then the LL
//                   slots here; of many tiles, some warps send, and the       packets of the token's slots and the lines of
//                   others receive from the beginning (LlWorkPartition)       the chunk
//                   pad warps clear pads (kPadWarps)                          the totals of the plan
//   the same, where receive by the path of each token's source                the whole plan; then what the path of the token's
//   a rank has many                                                           source makes a receiver wait for
//   tokens
//
// In a grid of few blocks all blocks do both, one after the other: rows are sent before any wait, so ranks cannot wait for each
// other in a ring.
#include <algorithm>

#include "runtime/stages/cuda/kernels.h"

#include "base/device/launch.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/prepare_dispatch/prepare_dispatch.cuh"

namespace epx::cuda {
namespace {

// DeviceGroup::plan_packets has those of plan_parts.cuh, and then the slots that PrepareRole::slot_packets describes.
__device__ __forceinline__ LlPacket8* slot_packets(const DeviceGroup& group) {
  return group.plan_packets + plan_part_words(group.context.shape.num_ranks);
}

// The rows of a rank with few tokens: a warp takes a chunk of a row at a time.
template <typename Format, bool kUnaligned>
class LlRowsOfNewPlan {
  using Params = PrepareDispatchParams<Format>;
  using Rows = LlRows<typename Format::template LlChunks<kUnaligned>>;

public:
  __device__ LlRowsOfNewPlan(const Params& params, const CallSession& call)
      : params_(params), args_(params.operation.call), layout_(params.group.context.layout), call_(call),
        rows_(params.group, call, args_, ll_scratch_of_warp()),
        partition_(call, num_copy_warps(), static_cast<int>(params.blocks.first_of_rows),
                   params.blocks.first_of_rows > 0 && call.num_ranks() > 1 ? tiles_to_send() : 0,
                   params.role_counts.ll_senders) {}

  // Returns whether the blocks that prepare receive rows afterwards.
  __device__ bool has_helpers() const { return partition_.has_helpers(); }

  // Before the entry barrier.
  __device__ void send() const {
    if (call_.num_ranks() == 1) return;
#pragma unroll 1
    for (LlTilesToSend tiles = partition_.to_send(call_, tiles_to_send()); tiles.has_tile(); tiles.finish_next()) {
      tiles.begin_next();
      const uint32_t token = tiles.tile() / rows_.num_chunks();
      const ChunkRange range = rows_.range_at(tiles.tile() - token * rows_.num_chunks());
      const LlChunk chunk = rows_.load(token, range);
      const PerRoute<int> ranks = ranks_by_experts(params_, token);
      rows_.send(token, range, set_of_ranks(ranks), chunk);
      if (range.chunk == 0 && args_.topk_weights != nullptr) send_weights(token, ranks);
    }
  }

  // Behind the entry barrier, where all ranks have few tokens.
  __device__ void receive() const {
    const int num_ranks = call_.num_ranks();
    const auto tokens = static_cast<uint32_t>(max_tokens() * num_ranks);
    const auto tiles = partition_.to_receive_late(tokens * rows_.num_chunks());
#pragma unroll 1
    for (uint32_t tile = tiles.first; tile < tiles.end; tile += tiles.step) {
      const uint32_t index = tile / rows_.num_chunks();
      const auto token = static_cast<int32_t>(index / static_cast<uint32_t>(num_ranks));
      const int i = static_cast<int>(index) - token * num_ranks;
      const int source = i < num_ranks - 1 ? peer_in_order(call_, token, i) : call_.rank();
      if (token >= call_.descriptors().num_tokens[source]) continue;
      const ChunkRange range = rows_.range_at(tile - index * rows_.num_chunks());
      if (!(source == call_.rank() ? store_own(token, range) : receive_chunk(source, token, range))) return;
    }
  }

  // Returns whether the calling warp is a pad warp.
  __device__ bool is_pad_warp() const {
    return static_cast<int>(threadIdx.x) / kWarp >= num_copy_warps();
  }
  __device__ WorkPartition pad_partition() const {
    const auto first_block = static_cast<int>(params_.blocks.first_of_rows);
    return partition_warps(num_copy_warps(), kMovementWarps - num_copy_warps(), first_block,
                           static_cast<int>(gridDim.x) - first_block);
  }

private:
  __device__ int num_copy_warps() const {
    return args_.alignment > 1 && args_.clears_pads ? kMovementWarps - kPadWarps : kMovementWarps;
  }
  __device__ uint32_t tiles_to_send() const {
    return static_cast<uint32_t>(args_.num_tokens) * rows_.num_chunks();
  }
  __device__ int32_t max_tokens() const {
    int32_t tokens = 0;
#pragma unroll 1
    for (int rank = 0; rank < call_.num_ranks(); ++rank)
      tokens = max(tokens, call_.descriptors().num_tokens[rank]);
    return tokens;
  }

  __device__ void send_weights(int64_t token, const PerRoute<int>& ranks) const {
    for (int first = 0; first < args_.top_k; first += kWarp)
      if (const int rank = ranks.own(first); rank >= 0 && rank != call_.rank())
        rows_.send_weight_of(rank, token, first + lane());
  }

  // The live slots of a token on this rank, once the blocks that prepare have assigned them. Returns false, the same in all
  // lanes, when the group has failed.
  struct FoundSlots {
    bool ok;
    LlSlots slots;
  };
  __device__ FoundSlots wait_for_slots(int source, int32_t token) const {
    const LlPacket8* const packets = slot_packets(params_.group) + (source * layout_.ll_tokens + token) * args_.top_k;
    bool ok = true;
    const auto live_slot = [&](int k) {
      LlPacket8 packet{-1, 0};
      if (k < args_.top_k && ok) ok = call_.wait_for_packet(packets + k, packet, call_.rank());
      return ok && packet.value < args_.recv_rows ? packet.value : -1;
    };
    const int32_t low = live_slot(lane());
    const int32_t high = args_.top_k > kWarp ? live_slot(lane() + kWarp) : -1;
    return {__all_sync(~0u, ok ? 1 : 0) != 0, {low, high}};
  }

  // These return false when the group has failed.
  __device__ bool store_own(int32_t token, const ChunkRange& range) const {
    const LlChunk chunk = rows_.load(token, range); // overlaps the wait
    const auto [ok, slots] = wait_for_slots(call_.rank(), token);
    if (!ok) return false;
    rows_.store_into(slots, range, chunk);
    if (range.chunk == 0 && args_.topk_weights != nullptr)
      for (int first = 0; first < args_.top_k; first += kWarp)
        if (const int32_t slot = slots.own(first); slot >= 0)
          args_.recv_weights[slot] = args_.topk_weights[route_index(token, args_.top_k, first + lane())];
    return true;
  }
  __device__ bool receive_chunk(int source, int32_t token, const ChunkRange& range) const {
    IncomingLlChunk incoming = rows_.incoming(source, token, range); // overlaps the wait
    const FoundSlots found = wait_for_slots(source, token);
    if (!found.ok) return false;
    if (found.slots.live == 0) return true; // the token may not have been sent to this rank
    const auto store = [&](const LlChunk& chunk) { rows_.store_into(found.slots, range, chunk); };
    if (!rows_.receive(incoming, source, token, range, store)) return false;
    return range.chunk != 0 || args_.recv_weights == nullptr ||
           rows_.receive_weights(source, token, found.slots, true, Rows::k_of_place);
  }

  const Params& params_;
  const DispatchCall& args_;
  const WindowLayout& layout_;
  const CallSession& call_;
  Rows rows_;
  LlWorkPartition partition_;
};

// Behind the entry barrier: returns whether all ranks have sent LL lines, and exchange their routes.
template <typename Format>
__device__ __forceinline__ bool all_ranks_send_ll(const PrepareDispatchParams<Format>& params, const CallSession& call) {
  bool all = !call.forces_ht_path();
#pragma unroll 1
  for (int rank = 0; rank < call.num_ranks(); ++rank)
    all &= sends_ll_lines<Format>(params.group.context, call.descriptors().num_tokens[rank], params.call.top_k);
  return all;
}

template <bool kUnaligned, typename Format>
__device__ __forceinline__ void receive_rows(const PrepareDispatchParams<Format>& params, const CallSession& call) {
  const LlRowsOfNewPlan<Format, kUnaligned> rows(params, call);
  if (!rows.is_pad_warp()) {
    rows.receive();
    return;
  }
  if (blockIdx.x < params.blocks.first_of_rows) return;            // the others clear pads, and these warps do nothing more
  const auto leader = static_cast<int>(params.blocks.prepare) - 1; // delivers the totals
  if (!wait_for_plan_parts(params.group, call, leader, leader + 1)) return;
  TmaRowPipeline pipeline = pipeline_of_warp();
  clear_pads(params.operation, HandleReader(params.call.handle_mem, params.layout), params.experts.blocks, call.rank(),
             pipeline, rows.pad_partition());
  pipeline.finish();
}

template <typename Format>
__device__ __noinline__ void send_unaligned_rows(const PrepareDispatchParams<Format>& params, const CallSession call) {
  LlRowsOfNewPlan<Format, true>(params, call).send();
}
template <typename Format>
__device__ __noinline__ void receive_unaligned_rows(const PrepareDispatchParams<Format>& params, const CallSession call) {
  receive_rows<true>(params, call);
}

// Some rank has many tokens, and its rows come with ready flags.
template <typename Format>
__device__ __noinline__ void receive_mixed_rows(const PrepareDispatchParams<Format>& params, const CallSession call) {
  const auto first_block = static_cast<int>(params.blocks.first_of_rows);
  const WarpAssignment warp{partition_warps(0, kMovementWarps, first_block, static_cast<int>(gridDim.x) - first_block),
                            WarpRole::receive};
  TmaRowPipeline pipeline = pipeline_of_warp();
  receive_by_plan(params, call, pipeline, warp);
}

template <typename Format>
__device__ __forceinline__ void prepare_dispatch(const PrepareDispatchParams<Format>& params) {
  // Nearly all shared memory is dynamic, so that movements have their pipelines there.
  PrepareShared& shared = *dynamic_shared_memory<PrepareShared>();
  CallSession call(params.group, EPX_OP_PREPARE_DISPATCH);
  const bool prepares = blockIdx.x < params.blocks.prepare;
  if (prepares) begin_prepare(call, params.descriptor, shared);
  const bool moves_rows = blockIdx.x >= params.blocks.first_of_rows;
  const PrepareRole role{params.blocks.prepare, gridDim.x, false, slot_packets(params.group)};
  const PrepareContext c(params.group, params.prepare, params.experts, params.layout, call, role, shared,
                         reinterpret_cast<int32_t*>(&shared + 1));
  __shared__ int failed; // whether a warp that enters by itself has found that the group has failed
  if (threadIdx.x == 0) failed = 0;
  if (!(prepares ? call.begin() : call.begin_ll())) return;
  if (moves_rows) {
    if (has_unaligned_rows(params.operation.call))
      send_unaligned_rows(params, call);
    else
      LlRowsOfNewPlan<Format, false>(params, call).send();
  }
  if (prepares) {
    if (!publish(c)) return;
    if (!call.enter_begun(params.descriptor)) return; // the entry barrier
  } else {
    // Each warp enters by itself, so that those that receive need not wait for those that send. The blocks that prepare check
    // that the ranks agree.
    call.sent_by_warp(kMovementWarps); // the blocks that prepare send slot records, too
    if (!call.enter_warp(params.descriptor, CallSession::Fields::ll_path,
                         dynamic_shared_memory<PeerDescriptors>()[threadIdx.x / kWarp])) {
      if (lane() == 0) failed = 1;
      return;
    }
  }
  const PreparedPart part = prepares ? prepare_behind_entry(c) : PreparedPart{true, false};
  const bool all_ll = all_ranks_send_ll(params, call);
  if (prepares) {
    if (__syncthreads_and(part.ok ? 1 : 0) == 0) return;
    if (!all_ll || (params.operation.clears_pads() && params.call.alignment > 1)) signal_plan_part(params.group, call);
    if (part.has_totals && threadIdx.x == 0) report_events(call.context(), params, call.descriptors(), true);
  }
  // Of many rows, the blocks that prepare receive some afterwards.
  if (!moves_rows && !(all_ll && LlRowsOfNewPlan<Format, false>(params, call).has_helpers())) return;
  if (!all_ll) {
    if (!prepares) {
      // The pipelines need the shared memory in which the warps have their descriptors, so the block enters once more, as a
      // whole.
      __syncthreads(); // meets the one of leave(), which warps that have failed call; `failed` is then complete
      if (failed != 0 || !c.call.enter_again(params.descriptor)) return;
    }
    receive_mixed_rows(params, c.call);
  } else if (has_unaligned_rows(params.operation.call)) {
    receive_unaligned_rows(params, call);
  } else {
    receive_rows<false>(params, call);
  }
}

template <typename Format>
__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    prepare_dispatch_kernel(const __grid_constant__ PrepareDispatchParams<Format> params) {
  pdl_wait(params);
  prepare_dispatch(params);
  leave(params.group);
}

} // namespace

std::vector<const void*> ll_prepare_dispatch_kernels() {
  return {reinterpret_cast<const void*>(&prepare_dispatch_kernel<PlainRows>),
          reinterpret_cast<const void*>(&prepare_dispatch_kernel<QuantisedRows>)};
}
size_t prepare_dispatch_shared_bytes(int num_experts) {
  return std::max(movement_shared_bytes(), sizeof(PrepareShared) + dynamic_shared_bytes(num_experts));
}
size_t plan_packet_words(const GroupShape& shape) {
  return plan_part_words(shape.num_ranks) + static_cast<size_t>(shape.num_ranks * max_ll_tokens(shape) * shape.max_top_k);
}

static_assert(sizeof(PrepareShared) + dynamic_shared_bytes(kMaxQuantisedLlExperts) <= kLlScratchOffset);

namespace {

template <typename Format>
cudaError_t launch(const Launcher& launcher, const PrepareDispatchCall& call) {
  const DispatchCall& dispatch = call.dispatch;
  const GroupContext& context = launcher.group.context;
  const int64_t row_bytes = input_row_bytes(dispatch);
  const CallDescriptor descriptor = describe(call, launcher.place_of(dispatch, dispatch.recv_tokens));
  MovementParams movement = make_movement_params(launcher.group, {}, dispatch, descriptor);
  const ExpertRanks experts(ExpertBlocks{context.shape.num_experts, context.shape.num_ranks});
  if (sends_ll_lines<Format>(context, dispatch.num_tokens, dispatch.top_k)) {
    const int alignment = dispatch.clears_pads ? dispatch.alignment : 1; // of zones that have pads to clear
    const auto [grid, blocks, ll_senders] =
        launcher.plan.next_prepare_dispatch(dispatch.num_tokens, dispatch.top_k, row_bytes, alignment, launcher.stream);
    movement.role_counts.ll_senders = ll_senders;
    const PrepareDispatchParams<Format> params{{movement, {{dispatch, row_bytes}}}, call.prepare, experts, blocks};
    return launch_cooperative(&prepare_dispatch_kernel<Format>, grid, launcher.stream, params);
  }
  if constexpr (Format::kIsReceiveFormat) {
    if (context.layout.scatter_by_token &&
        launcher.plan.has_ht_prepare_dispatch(dispatch.num_tokens * dispatch.top_k * row_bytes)) {
      const auto [grid, role_counts, prepare] =
          launcher.plan.next_ht_prepare_dispatch(dispatch.num_tokens, dispatch.top_k, launcher.stream);
      movement.role_counts = role_counts;
      movement.descriptor.stages_rows = 1;
      return launch_ht_prepare_dispatch(
          {{movement, {{dispatch, row_bytes}}}, call.prepare, experts, {static_cast<unsigned>(prepare), 0}}, grid,
          launcher.stream);
    }
  }
  const cudaError_t error = launch_first_half(launcher, call.prepare, descriptor);
  return error != cudaSuccess ? error : launch_second_half(launcher, call);
}

} // namespace

cudaError_t launch_prepare_dispatch(const Launcher& launcher, const PrepareDispatchCall& call) {
  return call.dispatch.format.is_quantised() ? launch<QuantisedRows>(launcher, call) : launch<PlainRows>(launcher, call);
}

} // namespace epx::cuda
