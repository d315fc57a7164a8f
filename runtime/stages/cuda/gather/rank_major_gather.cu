// SPDX-License-Identifier: Apache-2.0
// combine and dispatch_bwd of the rank-major layout. The caller has summed the rows of a token on a rank, so a rank sends the
// row home as it is, by the means of scatter: multi-destination copies (with one destination) and a signal warp. The
// low-latency path is that of gather (ll_gather.cuh). On the high-throughput path:
//
//   warps    do                                                         wait for
//   send     store a peer's row into the home rank's staging            the entry barrier; a free cell of the signal warp
//   signal   store ready flags for the send warps of their CTA          the entry barrier; the CTA's pending flags
//            (signal_warp.cuh)
//            In a small grid send and signal warps receive when
//            nothing is left to send or to signal
//   receive  sum a part of what the peers have sent of a token of this  the entry barrier; the ready flag of each row
//            rank, and of the row here, in rank order
//
// A row and its ready flag are ordered as in scatter.cu. A copy has the bits that wire asks for: a row that goes home is the
// sum of one term, +0 + x, rounded to its own type, which is x but for the sign of a zero; and that sign is lost when the home
// rank adds the row to +0.
#include "runtime/stages/cuda/gather/rank_major_gather.h"

#include "base/device/launch.h"
#include "runtime/stages/cuda/gather/gather_rows.cuh"
#include "runtime/stages/cuda/gather/ll_gather.cuh"
#include "runtime/stages/cuda/gather/quantised_gather.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/row_sender.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"
#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"

namespace epx::cuda {
namespace {

// Each warp has one.
template <typename T>
class RankMajorGather {
public:
  __device__ RankMajorGather(const GatherParams& params, const Movement& movement, TmaRowPipeline& pipeline)
      : params_(params), args_(params.call), movement_(movement), call_(movement.call()), pipeline_(pipeline),
        sender_(pipeline, params.role_counts, 1), rows_(params, movement.call()),
        row_bytes_(params.call.hidden * static_cast<int64_t>(sizeof(T))) {}

  __device__ SignalWarp signal_warp() const { return sender_.signal_warp(); }

  __device__ void send(const WarpAssignment& warp) {
    const int64_t tiles = movement_.num_peer_tokens();
#pragma unroll 1
    for (int64_t tile = warp.index; tile < tiles; tile = movement_.next_tile(warp, tiles)) {
      const Movement::PeerToken peer = movement_.peer_token(static_cast<uint32_t>(tile));
      if (movement_.is_active(peer.rank)) send_row(peer.rank, movement_.slot_of_row(peer.rank, peer.token));
    }
    sender_.close();
  }

  // Where the tokens are few, several warps sum a row, a part of it each.
  __device__ void sum(const WarpAssignment& warp) const {
    const auto tokens = static_cast<uint32_t>(args_.num_tokens);
    if (tokens == 0) return;
    const auto h_tiles =
        static_cast<uint32_t>((row_bytes_ + TmaRowPipeline::kStageBytes - 1) / TmaRowPipeline::kStageBytes);
    const bool is_whole =
        h_tiles < kMinHTilesToSplit || tokens * kMinParts > kManyParts * static_cast<uint32_t>(warp.count);
    const uint32_t parts_at_least = is_whole ? 1 : kMinParts;
    const uint32_t wanted = max(parts_at_least, min(static_cast<uint32_t>(warp.count) / tokens, h_tiles));
    const uint32_t h_tiles_of_part = (h_tiles + wanted - 1) / wanted;
    const uint32_t parts = (h_tiles + h_tiles_of_part - 1) / h_tiles_of_part;
    constexpr int64_t kHTileElements = TmaRowPipeline::kStageBytes / sizeof(T);
    const int64_t size = h_tiles_of_part * kHTileElements;
    const int64_t tiles = static_cast<int64_t>(tokens) * parts;
#pragma unroll 1
    for (int64_t tile = movement_.first_tile(warp, tiles); tile < tiles; tile = movement_.next_tile(warp, tiles)) {
      const uint32_t token = static_cast<uint32_t>(tile) / parts;
      const int64_t first = (static_cast<uint32_t>(tile) - token * parts) * size;
      if (!sum_part(token, first, min(args_.hidden - first, size))) return;
    }
  }

private:
  // Shorter rows are not split where tokens are many: each part looks up its token's routes and waits for flags.
  static constexpr uint32_t kMinHTilesToSplit = 4;
  static constexpr uint32_t kMinParts = 2;
  // Warps take whole tokens when each of them, those that join later not counted, has more than so many parts to take.
  static constexpr uint32_t kManyParts = 20;

  // A part of a row; all parts have one ready flag.
  __device__ static RowSplits part_of_row(int64_t first, int64_t size) {
    return {0, 1, first, size};
  }

  __device__ void send_row(int home, const TokenSlots& found) {
    if (found.slots.size() == 0) return;
    const int32_t slot = found.first_slot;
    const RowSplits whole = part_of_row(0, args_.hidden);
    SendPlaces to;
    if (lane() == 0) {
      to.row.row = reinterpret_cast<std::byte*>(rows_.staged_sum(home, found.token, found.rank_ordinal, whole));
      to.ready_flag = rows_.ready_flag_at(home, found.token, found.rank_ordinal, whole);
    }
    sender_.send({params_.rows, row_bytes_, nullptr, 0}, movement_.row_of_slot(slot), to);
    if (params_.weight_grads != nullptr) rows_.send_weight_grads(movement_, home, found.token, slot);
  }

  // Sums elements [first, first + size) of a token's rows. Returns false when the group has failed.
  __device__ bool sum_part(int64_t token, int64_t first, int64_t size) const {
    const WarpRoutes routes = movement_.routes_of(token);
    const uint64_t live = routes.mask_of([&](const Route& route) { return movement_.is_live(route); });
    const uint64_t own = live & routes.mask_of([&](const Route& route) { return route.rank == call_.rank(); });
    const RowSplits part = part_of_row(first, size);
    if (!rows_.wait_for_peers(movement_, token, part, routes, live & ~own)) return false;
    const T* own_row = nullptr;
    int own_ordinal = kMaxTopK;
    uint64_t rank_ordinals = 0; // a bit for each rank that has a row of the token; rank ordinals ascend with the rank
#pragma unroll 1
    for (uint64_t left = live; left != 0; left &= left - 1) {
      const int k = lowest_bit(left);
      const int rank_ordinal = movement_.rank_ordinal_of(routes.rank_ordinal(k));
      rank_ordinals |= uint64_t{1} << rank_ordinal;
      if ((own >> k & 1) == 0) continue;
      own_row = rows_.row_at(movement_.row_of_slot(routes.slot(k)), part);
      own_ordinal = rank_ordinal;
    }
    SumTerms<T> terms;
#pragma unroll 1
    for (; rank_ordinals != 0; rank_ordinals &= rank_ordinals - 1) {
      const int rank_ordinal = lowest_bit(rank_ordinals);
      terms.append(rank_ordinal == own_ordinal ? own_row : rows_.staged_sum(call_.rank(), token, rank_ordinal, part));
    }
    sum_rows<false>(pipeline_, terms, rows_.out(token, part), size);
    if (params_.weight_grads_out != nullptr && first == 0) rows_.collect_weight_grads(movement_, token);
    if (call_.scribbles_staging()) rows_.scribble_staging(token, part);
    return true;
  }

  const GatherParams& params_;
  const MovementCall& args_;
  const Movement& movement_;
  const CallSession& call_;
  TmaRowPipeline& pipeline_;
  RowSender<PlainRows> sender_;
  GatherRows<T> rows_;
  int64_t row_bytes_;
};

template <typename T>
__device__ __forceinline__ void gather_rows(const GatherParams& params) {
  Movement movement(params);
  movement.post();
  if (movement.takes_ll_path()) {
    ll_gather<T, true>(params, movement);
    return;
  }
  TmaRowPipeline pipeline = pipeline_of_warp();
  RankMajorGather<T> gather(params, movement, pipeline);
  WarpAssignment warp = assign_warp_role(params.role_counts, params.group.context.shape.num_ranks);
  if (warp.role == WarpRole::signal) gather.signal_warp().clear();
  if (!movement.begin()) return;
  warp = send_and_signal(gather, movement.call(), params.role_counts, warp);
  if (warp.role == WarpRole::receive) gather.sum(warp);
}

template <typename T>
__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    rank_major_gather_kernel(const __grid_constant__ GatherParams params) {
  pdl_wait(params);
  gather_rows<T>(params);
  leave(params.group);
}

template <typename Call>
cudaError_t launch(const Launcher& launcher, const Call& call, const GatherTensors& tensors) {
  const CallDescriptor descriptor = describe(call, kNotRegistered);
  if (call.format.is_quantised()) return launch_quantised_gather(launcher, call, descriptor, tensors);
  const auto [grid, role_counts] = launcher.plan.next_scatter(call.num_tokens, row_bytes(call.dtype, call.hidden), 1,
                                                              SenderWork::copies, ReceiverWork::sums, launcher.stream);
  const GatherParams params{make_movement_params(launcher.group, role_counts, call, descriptor), tensors};
  if (call.dtype == EPX_FLOAT32) return launch_cooperative(&rank_major_gather_kernel<float>, grid, launcher.stream, params);
  if (call.dtype == EPX_FLOAT16)
    return launch_cooperative(&rank_major_gather_kernel<__half>, grid, launcher.stream, params);
  return launch_cooperative(&rank_major_gather_kernel<__nv_bfloat16>, grid, launcher.stream, params);
}

} // namespace

std::vector<const void*> rank_major_gather_kernels() {
  return {reinterpret_cast<const void*>(&rank_major_gather_kernel<float>),
          reinterpret_cast<const void*>(&rank_major_gather_kernel<__half>),
          reinterpret_cast<const void*>(&rank_major_gather_kernel<__nv_bfloat16>)};
}

cudaError_t launch_combine_rank_major(const Launcher& launcher, const CombineCall& call) {
  return launch(launcher, call, {call.expert_out, nullptr, nullptr, call.out, nullptr});
}

cudaError_t launch_dispatch_rank_major_bwd(const Launcher& launcher, const DispatchBwdCall& call) {
  return launch(launcher, call,
                {call.grad_recv, nullptr, call.grad_recv_weights, call.grad_tokens, call.grad_topk_weights});
}

} // namespace epx::cuda
