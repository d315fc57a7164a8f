// combine and dispatch_bwd with few tokens, in precision wire. As in dispatch_few.cuh rows travel as tagged words, into
// staging that may be written at any time, and a warp takes a strip of a row at a time.
//
//   send  A warp takes a strip of a peer's token that has slots here, sums those, and stores the sum into the home rank's
//         staging. It waits for nobody.
//   sum   Once the ranks have met, a warp takes a strip of a token of this rank, sums its slots here, and adds what has
//         come home.
#pragma once

#include "runtime/stages/cuda/gather_params.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/tagged_rows.cuh"

namespace epx::cuda {

template <typename T, bool kRagged>
class FewGather {
public:
  __device__ FewGather(const GatherParams& params, const Movement& movement)
      : params_(params), group_(params.group), args_(params.call), movement_(movement), call_(movement.call()),
        layout_(params.group.context.layout), row_bytes_(args_.hidden * static_cast<int64_t>(sizeof(T))),
        strips_(static_cast<uint32_t>(strips_of(row_bytes_))),
        share_(share_among(0, static_cast<int>(blockDim.x) / kWarp, 0, static_cast<int>(gridDim.x))) {}

  __device__ void send() const {
    const auto items = static_cast<uint32_t>(movement_.few_tokens() * (call_.num_ranks() - 1)) * strips_;
#pragma unroll 1
    for (auto item = static_cast<uint32_t>(share_.index); item < items; item += static_cast<uint32_t>(share_.count)) {
      const uint32_t index = item / strips_;
      const Movement::PeerToken peer = movement_.peer_token(index);
      send_strip_of(peer.rank, peer.token, item - index * strips_);
    }
  }

  // arrive() tells whether the ranks have met; false: the group has failed.
  template <typename Arrive>
  __device__ void sum(const Arrive& arrive) const {
    bool has_arrived = false;
#pragma unroll 1
    for (auto item = static_cast<uint32_t>(share_.turned_index());; item += static_cast<uint32_t>(share_.count)) {
      const uint32_t token = item / strips_;
      if (token >= args_.num_tokens) break;
      const uint32_t strip = item - token * strips_;
      const WarpRoutes routes = movement_.routes_of(token);
      const FewSlots own = movement_.few_slots_here(routes);
      const Strip own_sum = own.live != 0 ? sum_slots(own, strip) : Strip{}; // while the ranks meet
      if (!has_arrived && !arrive()) return;
      has_arrived = true;
      if (!sum_strip(token, strip, routes, own_sum)) return;
    }
    if (!has_arrived && movement_.must_arrive()) arrive();
  }

private:
  __device__ TaggedTriple* staged_strip(int home, int64_t token, int order, uint32_t strip) const {
    return group_.window().at<TaggedTriple>(home, layout_.few_gather_rows.offset) +
           few_gather_word(layout_, group_.context.shape, call_.parity(), token, order, strip);
  }
  __device__ TaggedCount* staged_weight(int home, int64_t token, int k) const {
    return group_.window().at<TaggedCount>(home, layout_.few_gather_weights.offset) +
           few_gather_weight(layout_, group_.context.shape, call_.parity(), token, k);
  }
  __device__ int bytes_of(uint32_t strip) const {
    return static_cast<int>(min(row_bytes_ - static_cast<int64_t>(strip) * kStripBytes, int64_t{kStripBytes}));
  }
  __device__ Strip load_slot(int64_t slot, uint32_t strip) const {
    return load_strip<kRagged>(params_.rows + slot * row_bytes_ + static_cast<int64_t>(strip) * kStripBytes,
                               bytes_of(strip));
  }
  // Of rows here, in k order, rounded. There are some.
  __device__ Strip sum_slots(const FewSlots& slots, uint32_t strip) const {
    const auto weight_of = [&](int32_t slot) {
      return params_.row_weights != nullptr && slot >= 0 ? params_.row_weights[slot] : 1.0f;
    };
    const float low_weight = weight_of(slots.low);
    const float high_weight = weight_of(slots.high);
    StripSum<T> sum;
#pragma unroll 1
    for (uint64_t left = slots.live; left != 0;) {
      const int k = lowest_bit(left);
      left &= left - 1;
      sum.add(load_slot(slots[k], strip), from_lane(k < kWarp ? low_weight : high_weight, k % kWarp));
    }
    return sum.rounded();
  }

  __device__ void send_strip_of(int home, int64_t token, uint32_t strip) const {
    const FewSlots slots = movement_.few_slots_of(home, token);
    if (slots.live == 0) return;
    const int order = movement_.order_of_slot(slots[lowest_bit(slots.live)]);
    send_strip(staged_strip(home, token, order, strip), bytes_of(strip), sum_slots(slots, strip), call_.tag());
    if (strip == 0 && params_.carried_weights != nullptr)
      for (int first = 0; first < args_.top_k; first += kWarp)
        if (const int32_t slot = slots.own(first); slot >= 0)
          send_weight(staged_weight(home, token, first + lane()), params_.carried_weights[slot], call_.tag());
  }

  // Adds up, in rank order, what this rank has and what comes home. False: the group has failed.
  __device__ bool sum_strip(int64_t token, uint32_t strip, const WarpRoutes& routes, const Strip& own_sum) const {
    const auto is_live = [&](const Route& route) { return movement_.is_live(route); };
    const uint64_t kept_ranks = routes.ranks_of([](const Route& route) { return route.slot >= 0; });
    const int bytes = bytes_of(strip);
    StripSum<T> sum;
#pragma unroll 1
    for (uint64_t ranks = routes.ranks_of(is_live); ranks != 0; ranks &= ranks - 1) {
      const int rank = lowest_bit(ranks);
      if (rank == call_.rank()) {
        sum.add(own_sum, 1.0f);
        continue;
      }
      const int order = __popcll(kept_ranks & ((uint64_t{1} << rank) - 1));
      TaggedTriple* const staged = staged_strip(call_.rank(), token, order, strip);
      IncomingStrip incoming(staged, bytes);
      if (!incoming.wait(call_, rank)) return false;
      sum.add(incoming.get(), 1.0f);
      if (call_.poisons_staging()) poison_strip(staged);
    }
    store_strip<kRagged>(params_.out + token * row_bytes_ + static_cast<int64_t>(strip) * kStripBytes, bytes,
                         sum.rounded());
    return strip != 0 || params_.carried_out == nullptr || collect_weights(token, routes, routes.mask_of(is_live));
  }

  // False: the group has failed. The same in all lanes.
  __device__ bool collect_weights(int64_t token, const WarpRoutes& routes, uint64_t live) const {
    bool ok = true;
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int k = first + lane();
      if (k >= args_.top_k) continue;
      const Route route = routes.own(first);
      float weight = 0.0f;
      if ((live >> k & 1) != 0 && route.rank == call_.rank()) {
        weight = params_.carried_weights[route.slot];
      } else if ((live >> k & 1) != 0 && ok) {
        ok = receive_weight(call_, staged_weight(call_.rank(), token, k), route.rank, weight);
      }
      if (ok) params_.carried_out[route_index(token, args_.top_k, k)] = weight;
    }
    return __all_sync(~0u, ok ? 1 : 0) != 0;
  }

  const GatherParams& params_;
  const DeviceGroup& group_;
  const MovementCall& args_;
  const Movement& movement_;
  const Call& call_;
  const WindowLayout& layout_;
  int64_t row_bytes_;
  uint32_t strips_; // of this call
  Share share_;
};

} // namespace epx::cuda
