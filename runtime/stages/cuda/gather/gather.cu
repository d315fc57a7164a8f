// SPDX-License-Identifier: Apache-2.0
// Gather: rows go from slots to their tokens' home ranks and are summed. combine weights them; dispatch_bwd does not, and
// carries the weights' gradients along. The low-latency path is in ll_gather.cuh. On the high-throughput path the warps are
// specialized:
//
//   warps    do                                                         wait for
//   send     wire: sum the rows of a peer's token that has slots here,  the entry barrier
//            and store the sum into the home rank's staging;
//            exact: store each of the rows there;
//            then store the row's ready flags.
//            Below 128 blocks they receive when nothing is left to send
//   receive  sum what the peers have sent of a token of this rank with  the entry barrier; the ready flags of each peer that
//            the rows of this rank's own slots, which stay here         the token goes to
//
// Where warps have few tiles, a tile is one split of a token's rows (gather_rows.cuh): smaller tiles let receivers start
// earlier and leave them less to do when the last splits are ready, since the rows of all senders are in flight together. Where
// they have more, a tile is all splits of a token's rows, which spares looking up the token twice. On few SMs, and where they
// have many, batch_gather_kernel takes a batch of tokens as a tile (LaunchPlan::next_gather; batch_gather.cuh).
#include "runtime/stages/cuda/gather/quantised_gather.h"
#include "runtime/stages/cuda/gather/rank_major_gather.h"
#include "runtime/stages/cuda/kernels.h"

#include <algorithm>

#include "base/device/launch.h"
#include "runtime/stages/cuda/gather/batch_gather.cuh"
#include "runtime/stages/cuda/gather/gather_params.h"
#include "runtime/stages/cuda/gather/gather_rows.cuh"
#include "runtime/stages/cuda/gather/ll_gather.cuh"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"

namespace epx::cuda {
namespace {

// kByList: sums read rows through a ListReader where it takes them. It is false in the kernel that has the low-latency path.
template <typename T, bool kByList>
class Gather {
public:
  __device__ Gather(const GatherParams& params, const Movement& movement, TmaRowPipeline& pipeline)
      : params_(params), args_(params.call), movement_(movement), call_(movement.call()), pipeline_(pipeline),
        rows_(params, movement.call()), is_exact_(params.group.context.shape.precision == EPX_COMBINE_EXACT) {}

  __device__ void send(const WarpAssignment& warp) const {
    const int splits = splits_per_tile(movement_.num_peer_tokens(), warp);
    const int64_t tiles = movement_.num_peer_tokens() * (rows_.num_splits() / splits);
#pragma unroll 1
    for (int64_t tile = warp.index; tile < tiles; tile = movement_.next_tile(warp, tiles)) {
      const Movement::PeerToken peer = movement_.peer_token(static_cast<uint32_t>(token_of(tile, splits)));
      if (movement_.is_active(peer.rank) && peer.token < movement_.tokens_of(peer.rank))
        send_splits(peer.rank, peer.token, splits_of(tile, splits));
    }
  }

  __device__ void sum(const WarpAssignment& warp) const {
    const int splits = splits_per_tile(args_.num_tokens, warp);
    const int64_t tiles = args_.num_tokens * (rows_.num_splits() / splits);
#pragma unroll 1
    for (int64_t tile = movement_.first_tile(warp, tiles); tile < tiles; tile = movement_.next_tile(warp, tiles))
      if (!sum_splits(token_of(tile, splits), splits_of(tile, splits))) return;
  }

private:
  // Warps take all splits of a token at a time when each of them has more than so many to take (docs/tuning.md).
  static constexpr int kManySplits = 8;

  // All warps of a role, also those that join it, get the same result.
  __device__ int splits_per_tile(int64_t tokens, const WarpAssignment& warp) const {
    return tokens * rows_.num_splits() > kManySplits * warp.count ? rows_.num_splits() : 1;
  }
  // The scheduler's tiles are the splits of the first token, then those of the second, and so on.
  __device__ int64_t token_of(int64_t tile, int splits) const {
    return splits == rows_.num_splits() ? tile : tile / kMaxRowSplits;
  }
  __device__ RowSplits splits_of(int64_t tile, int splits) const {
    return rows_.splits(splits == rows_.num_splits() ? 0 : static_cast<int>(tile % kMaxRowSplits), splits);
  }

  // `index`: see Movement::slots_of.
  __device__ void send_splits(int home, int64_t index, const RowSplits& split) const {
    const TokenSlots found = movement_.slots_of(home, index);
    const int64_t token = found.token;
    const WarpList<int32_t>& slots = found.slots;
    if (slots.size() == 0) return;
    const float* weights = is_exact_ ? params_.row_weights : nullptr; // weights that these splits carry
    if (params_.weight_grads != nullptr) weights = split.index == 0 ? params_.weight_grads : nullptr;
    if (is_exact_ || weights != nullptr)
      for (int first = 0; first < slots.size(); first += kWarp)
        send_routes(home, token, split, slots.has_own(first) ? slots.own(first) : -1, weights);
    if (!is_exact_) {
      SumTerms<T> terms;
      terms.rows = slots.map([&](int32_t slot) { return rows_.row_of(slot, split); });
      terms.weights = slots.map([&](int32_t slot) { return rows_.weight_of(slot); });
      terms.address_bits = reinterpret_cast<uint64_t>(params_.rows) | static_cast<uint64_t>(args_.hidden) * sizeof(T);
      sum_rows<false, kByList>(pipeline_, terms, rows_.staged_sum(home, token, found.rank_ordinal, split), split.size);
    }
    pipeline_.finish(); // what all lanes have stored comes before the releases
    if (lane() < split.count) call_.signal(rows_.ready_flag_at(home, token, found.rank_ordinal, split) + lane());
  }

  // Each lane passes a slot, or -1. In precision exact this sends the slots' rows; in both precisions it sends their weights
  // if `weights` is not NULL.
  __device__ void send_routes(int home, int64_t token, const RowSplits& split, int32_t slot, const float* weights) const {
    const int64_t route = slot >= 0 ? route_index(token, args_.top_k, movement_.k_of_slot(slot)) : 0;
    if (weights != nullptr && slot >= 0) rows_.staged_weights(home)[route] = weights[slot];
    if (!is_exact_) return;
    for (unsigned left = __ballot_sync(~0u, slot >= 0 ? 1 : 0); left != 0; left &= left - 1) {
      const int one = lowest_bit(left);
      begin_copy_row_to_destinations(
          pipeline_, reinterpret_cast<const std::byte*>(rows_.row_of(from_lane(slot, one), split)),
          split.size * static_cast<int64_t>(sizeof(T)),
          lane() == one ? reinterpret_cast<std::byte*>(rows_.staged_row(home, route, split)) : nullptr);
    }
  }

  __device__ bool sum_splits(int64_t token, const RowSplits& split) const {
    const WarpRoutes routes = movement_.routes_of(token);
    const uint64_t live = routes.mask_of([&](const Route& route) { return movement_.is_live(route); });
    const uint64_t own = live & routes.mask_of([&](const Route& route) { return route.rank == call_.rank(); });
    if (!rows_.wait_for_peers(movement_, token, split, routes, live & ~own)) return false;
    const SumTerms<T> terms =
        is_exact_ ? terms_of_routes(token, split, routes, live, own) : terms_of_ranks(token, split, routes, live, own);
    sum_rows<true, kByList>(pipeline_, terms, rows_.out(token, split), split.size);
    if (params_.weight_grads_out != nullptr && split.index == 0) collect_weight_grads(token, routes, live);
    if (call_.scribbles_staging()) rows_.scribble_staging(token, split);
    return true;
  }

  // Precision exact: the terms are the routes' rows in k order.
  __device__ SumTerms<T> terms_of_routes(int64_t token, const RowSplits& split, const WarpRoutes& routes, uint64_t live,
                                         uint64_t own) const {
    const float* const weights = params_.row_weights != nullptr ? rows_.staged_weights(call_.rank()) : nullptr;
    SumTerms<T> terms;
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const bool is_own = (own >> (first + lane()) & 1) != 0;
      float weight = 1.0f; // weight of the lane's route
      if (is_own)
        weight = rows_.weight_of(routes.own(first).slot);
      else if (weights != nullptr && (live >> (first + lane()) & 1) != 0)
        weight = weights[route_index(token, args_.top_k, first + lane())];
      for (int k = first; k < args_.top_k && k < first + kWarp; ++k) {
        if ((live >> k & 1) == 0) continue;
        const T* const row = (own >> k & 1) != 0
                                 ? rows_.row_of(routes.slot(k), split)
                                 : rows_.staged_row(call_.rank(), route_index(token, args_.top_k, k), split);
        terms.append(row, from_lane(weight, k % kWarp));
      }
    }
    return terms;
  }

  // Precision wire: the terms are the ranks' partial sums in rank order; this rank's own rows are the inner terms, in k order.
  __device__ SumTerms<T> terms_of_ranks(int64_t token, const RowSplits& split, const WarpRoutes& routes, uint64_t live,
                                        uint64_t own) const {
    const PerRoute<float> weights{rows_.weight_of((own >> lane() & 1) != 0 ? routes.low.slot : -1),
                                  rows_.weight_of((own >> kWarp >> lane() & 1) != 0 ? routes.high.slot : -1)};
    SumTerms<T> terms;
    int own_ordinal = kMaxTopK; // rank ordinal of this rank, if the token goes here
#pragma unroll 1
    for (uint64_t left = own; left != 0; left &= left - 1) {
      const int k = lowest_bit(left);
      own_ordinal = routes.rank_ordinal(k);
      terms.append(rows_.row_of(routes.slot(k), split), weights[k]);
    }
    terms.num_inner = terms.size();
    uint64_t rank_ordinals = 0; // a bit for each peer that has live slots; rank ordinals ascend with the rank
#pragma unroll 1
    for (uint64_t left = live & ~own; left != 0; left &= left - 1)
      rank_ordinals |= uint64_t{1} << movement_.rank_ordinal_of(routes.rank_ordinal(lowest_bit(left)));
#pragma unroll 1
    for (; rank_ordinals != 0; rank_ordinals &= rank_ordinals - 1) {
      const int rank_ordinal = lowest_bit(rank_ordinals);
      if (rank_ordinal < own_ordinal) ++terms.own_position;
      terms.append(rows_.staged_sum(call_.rank(), token, rank_ordinal, split));
    }
    return terms;
  }

  __device__ void collect_weight_grads(int64_t token, const WarpRoutes& routes, uint64_t live) const {
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int k = first + lane();
      if (k >= args_.top_k) continue;
      rows_.collect_weight_grad(token, k, routes.own(first), (live >> k & 1) != 0);
    }
  }

  const GatherParams& params_;
  const MovementCall& args_;
  const Movement& movement_;
  const CallSession& call_;
  TmaRowPipeline& pipeline_;
  GatherRows<T> rows_;
  bool is_exact_;
};

// What the warps do behind the entry barrier.
template <typename Gather>
__device__ __forceinline__ void send_and_sum(const GatherParams& params, const Movement& movement,
                                             TmaRowPipeline& pipeline) {
  const Gather gather(params, movement, pipeline);
  WarpAssignment warp = assign_warp_role(params.role_counts, params.group.context.shape.num_ranks);
  if (warp.role == WarpRole::send) {
    gather.send(warp);
    if (lane() == 0) movement.call().sent(static_cast<unsigned>(warp.count));
    warp = join_receivers(params.role_counts);
  }
  if (warp.role == WarpRole::receive) gather.sum(warp);
}

template <typename T, bool kByList>
__device__ __forceinline__ void gather_rows(const GatherParams& params) {
  Movement movement(params);
  movement.post();
  if constexpr (!kByList) { // the launches of the other are for more tokens
    if (params.group.context.shape.precision != EPX_COMBINE_EXACT && movement.takes_ll_path()) {
      ll_gather<T>(params, movement);
      return;
    }
  }
  if (!movement.begin()) return;
  TmaRowPipeline pipeline = pipeline_of_warp();
  send_and_sum<Gather<T, kByList>>(params, movement, pipeline);
}

// Lists have a kernel of their own because the other one has the low-latency path, too, and its sums spill registers. What each
// of the kernels buys is in docs/tuning.md.
template <typename T, bool kByList>
__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    gather_kernel(const __grid_constant__ GatherParams params) {
  pdl_wait(params);
  gather_rows<T, kByList>(params);
  leave(params.group);
}

// Batches have a kernel of their own because with them in gather_kernel, calls without them take longer; and their long h-tiles
// take fewer instructions for each element, but more registers, so that it has fewer warps, and a larger ring for each.
constexpr int kBatchGatherWarps = kBatchGatherThreads / kWarp;
template <typename T>
__global__ void __launch_bounds__(kBatchGatherThreads, kMovementBlocksPerSm)
    batch_gather_kernel(const __grid_constant__ GatherParams params) {
  pdl_wait(params);
  const Movement movement(params);
  movement.post();
  if (movement.begin()) {
    TmaRowPipeline pipeline = pipeline_of_warp<kBatchGatherWarps, LongTileReader<T>::kRingBytes>();
    send_and_sum<BatchGather<T>>(params, movement, pipeline);
  }
  leave(params.group);
}

constexpr int64_t kMaxHidden = 1 << 30; // ListReader numbers the bytes of a row by an int

// Returns whether batch_gather_kernel can make a call of more tokens than the low-latency path may take.
template <typename T>
bool can_take_batches(const GroupShape& shape, const MovementCall& call, const GatherTensors& tensors) {
  const uint64_t address_bits = reinterpret_cast<uint64_t>(tensors.rows) | reinterpret_cast<uint64_t>(tensors.out);
  return LongTileReader<T>::takes(call.hidden) && shape.precision != EPX_COMBINE_EXACT &&
         call.top_k <= BatchGather<T>::kMaxTopK && !is_unaligned(address_bits, row_bytes(call.dtype, call.hidden));
}

template <typename T>
cudaError_t launch_as(const Launcher& launcher, const MovementCall& call, const CallDescriptor& descriptor,
                      const GatherTensors& tensors) {
  const bool takes_list_reader = call.hidden < kMaxHidden && !launcher.plan.may_take_ll_path(call.num_tokens);
  bool can_batch = false;
  if constexpr (LongTileReader<T>::kTakesType)
    can_batch = takes_list_reader && can_take_batches<T>(launcher.group.context.shape, call, tensors);
  const GatherGrid grid = launcher.plan.next_gather(call.num_tokens, call.top_k, row_bytes(call.dtype, call.hidden),
                                                    can_batch, launcher.stream);
  const GatherParams params{make_movement_params(launcher.group, grid.role_counts, call, descriptor), tensors};
  if constexpr (LongTileReader<T>::kTakesType) {
    if (grid.takes_batches) return launch_cooperative(&batch_gather_kernel<T>, grid.grid, launcher.stream, params);
    if (takes_list_reader && ShortTileReader<T>::takes(call.hidden))
      return launch_cooperative(&gather_kernel<T, true>, grid.grid, launcher.stream, params);
  }
  return launch_cooperative(&gather_kernel<T, false>, grid.grid, launcher.stream, params);
}
template <typename Call>
cudaError_t launch(const Launcher& launcher, const Call& call, const GatherTensors& tensors) {
  const CallDescriptor descriptor = describe(call, kNotRegistered);
  if (call.format.is_quantised()) return launch_quantised_gather(launcher, call, descriptor, tensors);
  if (call.dtype == EPX_FLOAT32) return launch_as<float>(launcher, call, descriptor, tensors);
  if (call.dtype == EPX_FLOAT16) return launch_as<__half>(launcher, call, descriptor, tensors);
  return launch_as<__nv_bfloat16>(launcher, call, descriptor, tensors);
}

} // namespace

std::vector<const void*> gather_kernels() {
  return {reinterpret_cast<const void*>(&gather_kernel<float, false>),
          reinterpret_cast<const void*>(&gather_kernel<__half, false>),
          reinterpret_cast<const void*>(&gather_kernel<__nv_bfloat16, false>),
          reinterpret_cast<const void*>(&gather_kernel<__half, true>),
          reinterpret_cast<const void*>(&gather_kernel<__nv_bfloat16, true>)};
}
std::vector<const void*> batch_gather_kernels() {
  return {reinterpret_cast<const void*>(&batch_gather_kernel<__half>),
          reinterpret_cast<const void*>(&batch_gather_kernel<__nv_bfloat16>)};
}
size_t batch_gather_shared_bytes() {
  return kBatchGatherWarps *
         (LongTileReader<__nv_bfloat16>::kRingBytes + TmaRowPipeline::kBarriersBytes); // as that of __half
}

cudaError_t launch_combine(const Launcher& launcher, const CombineCall& call) {
  if (call.is_rank_major()) return launch_combine_rank_major(launcher, call);
  return launch(launcher, call, {call.expert_out, call.recv_weights, nullptr, call.out, nullptr});
}

cudaError_t launch_dispatch_bwd(const Launcher& launcher, const DispatchBwdCall& call) {
  if (call.is_rank_major()) return launch_dispatch_rank_major_bwd(launcher, call);
  return launch(launcher, call,
                {call.grad_recv, nullptr, call.grad_recv_weights, call.grad_tokens, call.grad_topk_weights});
}

} // namespace epx::cuda
