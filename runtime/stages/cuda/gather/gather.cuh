// SPDX-License-Identifier: Apache-2.0
// Gather is the high-throughput path of combine and dispatch_bwd. Its warps are specialized:
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
// they have more, a tile is all splits of a token's rows, which spares looking up the token twice.
//
// How partial sums travel is a policy, PlainSums or QuantisedSums (quantised_sums.cuh). `terms` have the rows of this rank first:
//   kTakesExact, kTakesRankMajor   whether it is for calls in precision exact, and of the rank-major layout
//   staged(split)                  where a sum's address in staging points, in elements of T
//   send(pipeline, terms, to, split)   stores the sum of this rank's rows in staging
//   sum(pipeline, terms, to, split)    stores the sum of this rank's rows and the peers' sums in a row of T
//   scribble(rows, token, split)       GatherRows::scribble_staging of these sums
#pragma once

#include "runtime/stages/cuda/gather/gather_params.h"
#include "runtime/stages/cuda/gather/gather_rows.cuh"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"

namespace epx::cuda {

// Partial sums travel as rows of T. kByList: sums read rows through a ListReader where it takes them.
template <typename T, bool kByList>
struct PlainSums {
  static constexpr bool kTakesExact = true, kTakesRankMajor = false;

  __device__ explicit PlainSums(const MovementCall& /*call*/) {}

  __device__ static RowSplits staged(const RowSplits& split) { return split; }
  __device__ static void send(TmaRowPipeline& pipeline, const SumTerms<T>& terms, T* to, const RowSplits& split) {
    sum_rows<false, kByList>(pipeline, terms, to, split.size);
  }
  __device__ static void sum(TmaRowPipeline& pipeline, const SumTerms<T>& terms, T* to, const RowSplits& split) {
    sum_rows<true, kByList>(pipeline, terms, to, split.size);
  }
  __device__ static void scribble(const GatherRows<T>& rows, int64_t token, const RowSplits& split) {
    rows.scribble_staging(token, split);
  }
};

// Each warp has one.
template <typename T, typename Sums>
class Gather {
public:
  __device__ Gather(const GatherParams& params, const Movement& movement, TmaRowPipeline& pipeline)
      : params_(params), args_(params.call), movement_(movement), call_(movement.call()), pipeline_(pipeline),
        rows_(params, movement.call()), sums_(params.call),
        is_exact_(Sums::kTakesExact && params.group.context.shape.precision == EPX_COMBINE_EXACT) {}

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
    if (is_rank_major()) {
      if (weights != nullptr) rows_.send_weight_grads(movement_, home, token, found.first_slot);
    } else if (is_exact_ || weights != nullptr)
      for (int first = 0; first < slots.size(); first += kWarp)
        send_routes(home, token, split, slots.has_own(first) ? slots.own(first) : -1, weights);
    if (!is_exact_) {
      SumTerms<T> terms;
      terms.rows = slots.map([&](int32_t slot) { return rows_.row_at(row_of(slot), split); });
      terms.weights = slots.map([&](int32_t slot) { return rows_.weight_of(slot); });
      terms.address_bits = reinterpret_cast<uint64_t>(params_.rows) | static_cast<uint64_t>(args_.hidden) * sizeof(T);
      sums_.send(pipeline_, terms, rows_.staged_sum(home, token, found.rank_ordinal, sums_.staged(split)), split);
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
          pipeline_, reinterpret_cast<const std::byte*>(rows_.row_at(row_of(from_lane(slot, one)), split)),
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
    if (params_.out != nullptr) sums_.sum(pipeline_, terms, rows_.out(token, split), split);
    if (params_.weight_grads_out != nullptr && split.index == 0) collect_weight_grads(token, routes, live);
    if (call_.scribbles_staging()) sums_.scribble(rows_, token, split);
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
                                 ? rows_.row_at(row_of(routes.slot(k)), split)
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
      terms.append(rows_.row_at(row_of(routes.slot(k)), split), weights[k]);
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
      terms.append(rows_.staged_sum(call_.rank(), token, rank_ordinal, sums_.staged(split)));
    }
    return terms;
  }

  __device__ bool is_rank_major() const {
    return Sums::kTakesRankMajor && args_.is_rank_major();
  }
  // Returns the row of the receive tensors that a slot of this rank is.
  __device__ int64_t row_of(int32_t slot) const {
    if constexpr (Sums::kTakesRankMajor) return movement_.row_of_slot(slot);
    return args_.row_of_slot(slot); // see LlGather::is_rank_major()
  }

  __device__ void collect_weight_grads(int64_t token, const WarpRoutes& routes, uint64_t live) const {
    if (is_rank_major()) {
      rows_.collect_weight_grads(movement_, token);
      return;
    }
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
  Sums sums_;
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

} // namespace epx::cuda
