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
// Rows are signaled in splits: each half of H has a ready flag of its own, or all of H where rows are short. Where warps have
// few tiles, a tile is one split of a token's rows: smaller tiles let receivers start earlier and leave them less to do when
// the last splits are ready, since the rows of all senders are in flight together. Where they have many, a tile is all splits
// of a token's rows, which spares looking up the token twice.
#include <cmath>

#include "runtime/stages/cuda/kernels.h"

#include "base/device/launch.h"
#include "runtime/stages/cuda/gather/gather_params.h"
#include "runtime/stages/cuda/gather/ll_gather.cuh"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"

namespace epx::cuda {
namespace {

// With kByLongTiles the sums read by long h-tiles where what a warp takes of a row consists of them.
template <typename T, bool kByLongTiles>
class Gather {
public:
  __device__ Gather(const GatherParams& params, const Movement& movement, TmaRowPipeline& pipeline)
      : params_(params), group_(params.group), args_(params.call), movement_(movement), call_(movement.call()),
        pipeline_(pipeline), layout_(params.group.context.layout),
        is_exact_(params.group.context.shape.precision == EPX_COMBINE_EXACT) {
    // Splits consist of long h-tiles where rows do, in both kernels: a peer may run the other one.
    constexpr int64_t kHTile = RowReader<T, true>::kHTile;
    const int64_t unit = LongTileReader<T>::takes(args_.hidden) ? LongTileReader<T>::kHTile : kHTile;
    const int64_t units = (args_.hidden + unit - 1) / unit;
    num_splits_ = args_.hidden <= (kMinHTilesToSplit - 1) * kHTile ? 1 : kMaxRowSplits;
    split_size_ = (units + num_splits_ - 1) / num_splits_ * unit;
  }

  __device__ void send(const WarpAssignment& warp) const {
    const int splits = splits_per_tile(movement_.num_peer_tokens(), warp);
    const int64_t tiles = movement_.num_peer_tokens() * (num_splits_ / splits);
#pragma unroll 1
    for (int64_t tile = warp.index; tile < tiles; tile = movement_.next_tile(warp, tiles)) {
      const Movement::PeerToken peer = movement_.peer_token(static_cast<uint32_t>(token_of(tile, splits)));
      if (movement_.is_active(peer.rank) && peer.token < movement_.tokens_of(peer.rank))
        send_splits(peer.rank, peer.token, splits_of(tile, splits));
    }
  }

  __device__ void sum(const WarpAssignment& warp) const {
    const int splits = splits_per_tile(args_.num_tokens, warp);
    const int64_t tiles = args_.num_tokens * (num_splits_ / splits);
#pragma unroll 1
    for (int64_t tile = movement_.first_tile(warp, tiles); tile < tiles; tile = movement_.next_tile(warp, tiles))
      if (!sum_splits(token_of(tile, splits), splits_of(tile, splits))) return;
  }

private:
  // Shorter rows are not split: each split looks up its token's routes and waits for flags.
  static constexpr int kMinHTilesToSplit = 4;
  // Warps take all splits of a token at a time when each of them has more than so many to take. On 84 SMs of 2 H200 (4096
  // tokens of bfloat16, top-8), where senders have 10 or 13, combine took 190.8 us by whole tokens and 203.0 by halves with
  // H = 7168, 132.8 and 149.4 with H = 4096.
  static constexpr int kManySplits = 8;

  // A warp takes elements [first, first + size) of a row, which are `count` splits from `index` on.
  struct RowSplits {
    int index;
    int count;
    int64_t first;
    int64_t size;
  };

  // All warps of a role, also those that join it, get the same result.
  __device__ int splits_per_tile(int64_t tokens, const WarpAssignment& warp) const {
    return tokens * num_splits_ > kManySplits * warp.count ? num_splits_ : 1;
  }
  // The scheduler's tiles are the splits of the first token, then those of the second, and so on.
  __device__ int64_t token_of(int64_t tile, int splits) const {
    return splits == num_splits_ ? tile : tile / kMaxRowSplits;
  }
  __device__ RowSplits splits_of(int64_t tile, int splits) const {
    const int index = splits == num_splits_ ? 0 : static_cast<int>(tile % kMaxRowSplits);
    const int64_t first = index * split_size_;
    return {index, splits, first, min(args_.hidden - first, splits * split_size_)};
  }

  __device__ const T* row_of(int64_t slot, const RowSplits& split) const {
    return reinterpret_cast<const T*>(params_.rows) + args_.row_of_slot(slot) * args_.hidden + split.first;
  }
  __device__ T* staged_row(int home, int64_t row, const RowSplits& split) const {
    return group_.window().at<T>(home, layout_.gather_rows.offset + row * layout_.row_stride) + split.first;
  }
  __device__ float* staged_weights(int home) const {
    return group_.window().at<float>(home, layout_.gather_weights.offset);
  }
  // The ready flag of the first of these splits; those of the others follow.
  __device__ Epoch* ready_flag_at(int home, int64_t token, int rank_ordinal, const RowSplits& split) const {
    return group_.window().at<Epoch>(home, layout_.gather_ready_flags.offset) +
           partial_staging_row(group_.context.shape, token, args_.top_k, rank_ordinal) * kMaxRowSplits + split.index;
  }

  // `index`: see Movement::slots_of.
  __device__ void send_splits(int home, int64_t index, const RowSplits& split) const {
    const TokenSlots found = movement_.slots_of(home, index);
    const int64_t token = found.token;
    const WarpList<int32_t>& slots = found.slots;
    if (slots.size() == 0) return;
    const float* weights = is_exact_ ? params_.row_weights : nullptr; // weights that these splits carry
    if (params_.carried_weights != nullptr) weights = split.index == 0 ? params_.carried_weights : nullptr;
    if (is_exact_ || weights != nullptr)
      for (int first = 0; first < slots.size(); first += kWarp)
        send_routes(home, token, split, slots.has_own(first) ? slots.own(first) : -1, weights);
    if (!is_exact_) {
      SumTerms<T> terms;
      terms.rows = slots.map([&](int32_t slot) { return row_of(slot, split); });
      terms.weights = slots.map([&](int32_t slot) { return weight_of(slot); });
      terms.address_bits = reinterpret_cast<uint64_t>(params_.rows) | static_cast<uint64_t>(args_.hidden) * sizeof(T);
      const int64_t row = partial_staging_row(group_.context.shape, token, args_.top_k, found.rank_ordinal);
      sum_rows<false, kByLongTiles>(pipeline_, terms, staged_row(home, row, split), split.size);
    }
    pipeline_.finish(); // what all lanes have stored comes before the releases
    if (lane() < split.count) call_.signal(ready_flag_at(home, token, found.rank_ordinal, split) + lane());
  }

  // Each lane passes a slot, or -1. In precision exact this sends the slots' rows; in both precisions it sends their weights
  // if `weights` is not NULL.
  __device__ void send_routes(int home, int64_t token, const RowSplits& split, int32_t slot, const float* weights) const {
    const int64_t route = slot >= 0 ? route_index(token, args_.top_k, movement_.k_of_slot(slot)) : 0;
    if (weights != nullptr && slot >= 0) staged_weights(home)[route] = weights[slot];
    if (!is_exact_) return;
    for (unsigned left = __ballot_sync(~0u, slot >= 0 ? 1 : 0); left != 0; left &= left - 1) {
      const int one = lowest_bit(left);
      begin_copy_row_to_destinations(pipeline_, reinterpret_cast<const std::byte*>(row_of(from_lane(slot, one), split)),
                                     split.size * static_cast<int64_t>(sizeof(T)),
                                     lane() == one ? reinterpret_cast<std::byte*>(staged_row(home, route, split))
                                                   : nullptr);
    }
  }

  // Returns the weight of this rank's own row in the lane's slot.
  __device__ float weight_of(int32_t slot) const {
    return params_.row_weights != nullptr && slot >= 0 ? params_.row_weights[slot] : 1.0f;
  }
  __device__ bool sum_splits(int64_t token, const RowSplits& split) const {
    const WarpRoutes routes = movement_.routes_of(token);
    const uint64_t live = routes.mask_of([&](const Route& route) { return movement_.is_live(route); });
    const uint64_t own = live & routes.mask_of([&](const Route& route) { return route.rank == call_.rank(); });
    if (!wait_for_peers(token, split, routes, live & ~own)) return false;
    const SumTerms<T> terms =
        is_exact_ ? terms_of_routes(token, split, routes, live, own) : terms_of_ranks(token, split, routes, live, own);
    sum_rows<true, kByLongTiles>(pipeline_, terms, reinterpret_cast<T*>(params_.out) + token * args_.hidden + split.first,
                                 split.size);
    if (params_.carried_out != nullptr && split.index == 0) collect_weights(token, routes, live);
    if (call_.scribbles_staging()) scribble_staging(token, split);
    return true;
  }

  // Each lane waits for the ready flags of its routes' ranks. `awaited` has a bit for each route.
  __device__ bool wait_for_peers(int64_t token, const RowSplits& split, const WarpRoutes& routes, uint64_t awaited) const {
    bool ok = true;
    for (int first = 0; first < args_.top_k; first += kWarp)
      for (int i = 0; i < split.count; ++i)
        if (const Route route = routes.own(first); ok && (awaited >> (first + lane()) & 1) != 0)
          ok = call_.wait_ready(
              ready_flag_at(call_.rank(), token, movement_.rank_ordinal_of(route.rank_ordinal), split) + i, route.rank);
    const bool all = __all_sync(~0u, ok ? 1 : 0) != 0;
    __syncwarp(); // all lanes see what each has acquired: a vote orders no memory
    return all;
  }

  // Precision exact: the terms are the routes' rows in k order.
  __device__ SumTerms<T> terms_of_routes(int64_t token, const RowSplits& split, const WarpRoutes& routes, uint64_t live,
                                         uint64_t own) const {
    const float* const weights = params_.row_weights != nullptr ? staged_weights(call_.rank()) : nullptr;
    SumTerms<T> terms;
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const bool is_own = (own >> (first + lane()) & 1) != 0;
      float weight = 1.0f; // weight of the lane's route
      if (is_own)
        weight = weight_of(routes.own(first).slot);
      else if (weights != nullptr && (live >> (first + lane()) & 1) != 0)
        weight = weights[route_index(token, args_.top_k, first + lane())];
      for (int k = first; k < args_.top_k && k < first + kWarp; ++k) {
        if ((live >> k & 1) == 0) continue;
        const T* const row = (own >> k & 1) != 0 ? row_of(routes.slot(k), split)
                                                 : staged_row(call_.rank(), route_index(token, args_.top_k, k), split);
        terms.append(row, from_lane(weight, k % kWarp));
      }
    }
    return terms;
  }

  // Precision wire: the terms are the ranks' partial sums in rank order; this rank's own rows are the inner terms, in k order.
  __device__ SumTerms<T> terms_of_ranks(int64_t token, const RowSplits& split, const WarpRoutes& routes, uint64_t live,
                                        uint64_t own) const {
    const PerRoute<float> weights{weight_of((own >> lane() & 1) != 0 ? routes.low.slot : -1),
                                  weight_of((own >> kWarp >> lane() & 1) != 0 ? routes.high.slot : -1)};
    SumTerms<T> terms;
    int own_ordinal = kMaxTopK; // rank ordinal of this rank, if the token goes here
#pragma unroll 1
    for (uint64_t left = own; left != 0; left &= left - 1) {
      const int k = lowest_bit(left);
      own_ordinal = routes.rank_ordinal(k);
      terms.append(row_of(routes.slot(k), split), weights[k]);
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
      terms.append(
          staged_row(call_.rank(), partial_staging_row(group_.context.shape, token, args_.top_k, rank_ordinal), split));
    }
    return terms;
  }

  __device__ void collect_weights(int64_t token, const WarpRoutes& routes, uint64_t live) const {
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int k = first + lane();
      if (k >= args_.top_k) continue;
      const Route route = routes.own(first);
      const int64_t index = route_index(token, args_.top_k, k);
      float weight = 0.0f;
      if ((live >> k & 1) != 0)
        weight = route.rank == call_.rank() ? params_.carried_weights[route.slot] : staged_weights(call_.rank())[index];
      params_.carried_out[index] = weight;
    }
  }

  __device__ void scribble_staging(int64_t token, const RowSplits& split) const {
    const int per_token = is_exact_ ? args_.top_k : min(args_.top_k, call_.num_ranks());
    for (int64_t row = token * per_token; row < (token + 1) * per_token; ++row)
      scribble_row(reinterpret_cast<std::byte*>(staged_row(call_.rank(), row, split)),
                   split.size * static_cast<int64_t>(sizeof(T)));
    // In precision exact both splits read the staged weights.
    if (is_exact_ ? split.count < num_splits_ : split.index != 0) return;
    for (int k = lane(); k < args_.top_k; k += kWarp)
      staged_weights(call_.rank())[route_index(token, args_.top_k, k)] = NAN;
  }

  const GatherParams& params_;
  const DeviceGroup& group_;
  const MovementCall& args_;
  const Movement& movement_;
  const CallSession& call_;
  TmaRowPipeline& pipeline_;
  const WindowLayout& layout_;
  bool is_exact_;
  int num_splits_;
  int64_t split_size_; // elements
};

// The block and its shared memory. Long h-tiles need a larger ring.
template <typename T, bool kByLongTiles>
struct GatherBlock {
  static constexpr int kThreads = kMovementThreads, kWarps = kThreads / kWarp;
  static constexpr int64_t kRingBytes = TmaRowPipeline::kStagesBytes;
};
template <typename T>
struct GatherBlock<T, true> {
  static constexpr int kThreads = kLongTileGatherThreads, kWarps = kThreads / kWarp;
  static constexpr int64_t kRingBytes = LongTileReader<T>::kRingBytes;
};

template <typename T, bool kByLongTiles>
__device__ __forceinline__ void gather_rows(const GatherParams& params) {
  using Block = GatherBlock<T, kByLongTiles>;
  Movement movement(params);
  movement.post();
  if constexpr (!kByLongTiles) { // the launch with long h-tiles is for more tokens
    if (params.group.context.shape.precision != EPX_COMBINE_EXACT && movement.takes_ll_path()) {
      ll_gather<T>(params, movement);
      return;
    }
  }
  if (!movement.begin()) return;
  TmaRowPipeline pipeline = pipeline_of_warp<Block::kWarps, Block::kRingBytes>();
  const Gather<T, kByLongTiles> gather(params, movement, pipeline);
  WarpAssignment warp = assign_warp_role(params.role_counts, params.group.context.shape.num_ranks);
  if (warp.role == WarpRole::send) {
    gather.send(warp);
    if (lane() == 0) movement.call().sent(static_cast<unsigned>(warp.count));
    warp = join_receivers(params.role_counts);
  }
  if (warp.role == WarpRole::receive) gather.sum(warp);
}

// There are two kernels because long h-tiles take fewer instructions for each element, but more registers. On 16 SMs of 2
// H200 (4096 tokens of 7168 bfloat16, top-8) combine took 483.9 us by long h-tiles in 12 warps, and 501.2 in 16.
template <typename T, bool kByLongTiles>
__global__ void __launch_bounds__(GatherBlock<T, kByLongTiles>::kThreads, kMovementBlocksPerSm)
    gather_kernel(const __grid_constant__ GatherParams params) {
  pdl_wait(params);
  gather_rows<T, kByLongTiles>(params);
  leave(params.group);
}

constexpr int64_t kMaxHidden = 1 << 30; // LongTileReader numbers the bytes of a row by an int

template <typename T>
cudaError_t launch_as(const DeviceGroup& group, LaunchPlan& plan, const MovementCall& call, const GatherTensors& tensors,
                      cudaStream_t stream) {
  const bool by_long_tiles =
      call.hidden < kMaxHidden && LongTileReader<T>::takes(call.hidden) && !plan.may_take_ll_path(call.num_tokens);
  const auto [grid, role_counts] =
      plan.next_gather(call.num_tokens, call.top_k, row_bytes(call.dtype, call.hidden), by_long_tiles, stream);
  const int32_t weights = (tensors.row_weights != nullptr ? 1 : 0) | (tensors.carried_weights != nullptr ? 2 : 0);
  const GatherParams params{make_movement_params(group, role_counts, call, weights, 0, kNotRegistered), tensors};
  if constexpr (LongTileReader<T>::kTakesType)
    if (by_long_tiles) return launch_cooperative(&gather_kernel<T, true>, grid, stream, params);
  return launch_cooperative(&gather_kernel<T, false>, grid, stream, params);
}
cudaError_t launch(const DeviceGroup& group, LaunchPlan& plan, const MovementCall& call, const GatherTensors& tensors,
                   cudaStream_t stream) {
  if (call.dtype == EPX_FLOAT32) return launch_as<float>(group, plan, call, tensors, stream);
  if (call.dtype == EPX_FLOAT16) return launch_as<__half>(group, plan, call, tensors, stream);
  return launch_as<__nv_bfloat16>(group, plan, call, tensors, stream);
}

} // namespace

std::vector<const void*> gather_kernels() {
  return {reinterpret_cast<const void*>(&gather_kernel<float, false>),
          reinterpret_cast<const void*>(&gather_kernel<__half, false>),
          reinterpret_cast<const void*>(&gather_kernel<__nv_bfloat16, false>)};
}
std::vector<const void*> long_tile_gather_kernels() {
  return {reinterpret_cast<const void*>(&gather_kernel<__half, true>),
          reinterpret_cast<const void*>(&gather_kernel<__nv_bfloat16, true>)};
}
size_t long_tile_gather_shared_bytes() {
  using Block = GatherBlock<__nv_bfloat16, true>; // as that of __half
  return Block::kWarps * (Block::kRingBytes + TmaRowPipeline::kBarriersBytes);
}

cudaError_t launch_combine(const DeviceGroup& group, LaunchPlan& plan, const CombineCall& call, cudaStream_t stream) {
  return launch(group, plan, call, {call.expert_out, call.recv_weights, nullptr, call.out, nullptr}, stream);
}

cudaError_t launch_dispatch_bwd(const DeviceGroup& group, LaunchPlan& plan, const DispatchBwdCall& call,
                                cudaStream_t stream) {
  return launch(group, plan, call,
                {call.grad_recv, nullptr, call.grad_recv_weights, call.grad_tokens, call.grad_topk_weights}, stream);
}

} // namespace epx::cuda
