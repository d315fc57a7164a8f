// combine and dispatch_bwd with few tokens, in precision wire. As in dispatch_few.cuh rows travel as tagged words, into staging
// that may be written at any time, and a warp takes a strip of a row at a time.
//
//   send  A warp takes a strip of a peer's token that has slots here, sums those, and stores the sum into the home rank's staging.
//         It waits for nobody.
//   sum   Once the ranks have met, a warp takes a strip of a token of this rank, sums its slots here, and adds what has come home.
#pragma once

#include <bit>
#include <cmath>

#include "runtime/stages/cuda/gather_params.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/tagged_rows.cuh"

namespace epx::cuda {

template <typename T>
class FewGather {
public:
  __device__ FewGather(const GatherParams& params, const Movement& movement)
      : params_(params), group_(params.group), args_(params.call), movement_(movement), call_(movement.call()),
        layout_(params.group.context.layout), row_bytes_(args_.hidden * static_cast<int64_t>(sizeof(T))),
        strips_(static_cast<uint32_t>(strips_of(row_bytes_))),
        role_(role_among(true, true, 0, static_cast<int>(blockDim.x) / kWarp, 0, static_cast<int>(gridDim.x))) {}

  __device__ void send() const {
    const auto items = static_cast<uint32_t>(movement_.few_tokens() * (call_.num_ranks() - 1)) * strips_;
#pragma unroll 1
    for (auto item = static_cast<uint32_t>(role_.index); item < items; item += static_cast<uint32_t>(role_.count)) {
      const uint32_t index = item / strips_;
      const Movement::PeerToken peer = movement_.peer_token(index);
      send_strip_of(peer.rank, peer.token, item - index * strips_);
    }
  }

  // A strip of a token of this rank, as far as it can be without the peers.
  struct Look {
    bool is_item = false;
    uint32_t token, strip;
    WarpRoutes routes;
    uint64_t kept;            // routes, a bit each
    uint64_t own;             // of these, those with a live slot here
    Strip own_sum;            // of those
    IncomingStrip from_first; // of the first peer that the token goes to
  };
  // The warp's first, while the ranks meet.
  __device__ Look look_at_first() const {
    return look_at(first_item_of_sum());
  }
  // Once the ranks have met.
  __device__ void sum(const Look& first) const {
    Look look = first;
#pragma unroll 1
    for (uint32_t item = first_item_of_sum(); look.is_item;) {
      if (!sum_strip(look)) return;
      item += static_cast<uint32_t>(role_.count);
      look = look_at(item);
    }
  }

private:
  // Other warps than in send(), when there is not enough for all.
  __device__ uint32_t first_item_of_sum() const {
    return static_cast<uint32_t>(role_.count - 1 - role_.index);
  }
  __device__ int64_t parity() const {
    return static_cast<int64_t>(call_.sequence() & 1);
  }
  __device__ TaggedTriple* staged_strip(int home, int64_t token, int order, uint32_t strip) const {
    return group_.window().at<TaggedTriple>(home, layout_.few_gather_rows.offset) +
           few_gather_word(layout_, group_.context.shape, parity(), token, order, strip);
  }
  __device__ TaggedCount* staged_weight(int home, int64_t token, int k) const {
    return group_.window().at<TaggedCount>(home, layout_.few_gather_weights.offset) +
           few_gather_weight(layout_, group_.context.shape, parity(), token, k);
  }
  __device__ int bytes_of(uint32_t strip) const {
    return static_cast<int>(min(row_bytes_ - static_cast<int64_t>(strip) * kStripBytes, int64_t{kStripBytes}));
  }
  __device__ Strip load_slot(int64_t slot, uint32_t strip) const {
    return load_strip(params_.rows + slot * row_bytes_ + static_cast<int64_t>(strip) * kStripBytes, bytes_of(strip));
  }
  // Of rows here, in k order, rounded. There are some.
  __device__ Strip sum_slots(const FewSlots& slots, uint32_t strip) const {
    const auto weight_of = [&](int32_t slot) {
      return params_.row_weights != nullptr && slot >= 0 ? params_.row_weights[slot] : 1.0f;
    };
    const float low_weight = weight_of(slots.low);
    const float high_weight = weight_of(slots.high);
    StripSum<T> sum;
    Strip ahead = load_slot(slots[first_of(slots.live)], strip);
#pragma unroll 1
    for (uint64_t left = slots.live; left != 0;) {
      const int k = first_of(left);
      left &= left - 1;
      const Strip row = ahead;
      if (left != 0) ahead = load_slot(slots[first_of(left)], strip);
      sum.add(row, from_lane(k < kWarp ? low_weight : high_weight, k % kWarp));
    }
    return sum.rounded();
  }

  __device__ void send_strip_of(int home, int64_t token, uint32_t strip) const {
    const FewSlots slots = movement_.few_slots_of(home, token);
    if (slots.live == 0) return;
    const int order = movement_.plan().slot_records[slots[first_of(slots.live)]].order;
    send_strip(staged_strip(home, token, order, strip), bytes_of(strip), sum_slots(slots, strip), call_.tag());
    if (strip == 0 && params_.carried_weights != nullptr)
      for (int first = 0; first < args_.top_k; first += kWarp)
        if (const int32_t slot = slots.own(first); slot >= 0)
          store_whole_relaxed_sys(staged_weight(home, token, first + lane()),
                                  TaggedCount{std::bit_cast<int32_t>(params_.carried_weights[slot]), call_.tag()});
  }

  __device__ Look look_at(uint32_t item) const {
    const uint32_t token = item / strips_;
    if (token >= args_.num_tokens) return {};
    const uint32_t strip = item - token * strips_;
    const WarpRoutes routes = movement_.routes_of(token);
    const uint64_t kept = routes.mask_of([](const Route& route) { return route.slot >= 0; });
    const uint64_t here = routes.mask_of([&](const Route& route) { return route.rank == call_.rank(); });
    const FewSlots own = movement_.few_slots_here(routes);
    const Order first = Orders(routes, kept & ~here).take();
    const IncomingStrip from_first = look_for(token, first, strip); // begun before what takes longer
    return {true, token, strip, routes, kept, own.live, own.live != 0 ? sum_slots(own, strip) : Strip{}, from_first};
  }

  // False: the group has failed.
  __device__ bool sum_strip(const Look& look) const {
    const WarpRoutes& routes = look.routes;
    const uint64_t live = look.kept & routes.mask_of([&](const Route& route) { return movement_.is_live(route); });
    const uint64_t others = routes.mask_of([&](const Route& route) { return route.rank != call_.rank(); });
    Orders orders(routes, live & others);
    Order next = orders.take();
    IncomingStrip incoming = next.order == Orders(routes, look.kept & others).take().order
                                 ? look.from_first
                                 : look_for(look.token, next, look.strip);
    StripSum<T> sum;
    const int own_order = look.own != 0 ? routes.order(first_of(look.own)) : kMaxTopK;
    bool owes_own = look.own != 0;
    while (next.order >= 0) {
      if (owes_own && own_order < next.order) {
        sum.add(look.own_sum, 1.0f);
        owes_own = false;
      }
      if (!incoming.wait(call_, next.rank)) return false;
      const Strip here = incoming.get();
      if (call_.poisons_staging()) poison_strip(staged_strip(call_.rank(), look.token, next.order, look.strip));
      next = orders.take();
      incoming = look_for(look.token, next, look.strip);
      sum.add(here, 1.0f);
    }
    if (owes_own) sum.add(look.own_sum, 1.0f);
    store_strip(params_.out + look.token * row_bytes_ + static_cast<int64_t>(look.strip) * kStripBytes,
                bytes_of(look.strip), sum.rounded());
    return look.strip != 0 || params_.carried_out == nullptr || collect_weights(look.token, routes, live);
  }

  __device__ static int first_of(uint64_t routes) {
    return __ffsll(static_cast<long long>(routes)) - 1;
  }

  // The peers that a token goes to, in rank order.
  struct Order {
    int order; // -1: none
    int rank;
  };
  class Orders {
  public:
    __device__ Orders(const WarpRoutes& routes, uint64_t live) : routes_(routes), left_(live) {}
    __device__ Order take() {
      Order first{kMaxTopK, -1};
      for (uint64_t left = left_; left != 0; left &= left - 1)
        if (const int k = first_of(left); routes_.order(k) < first.order) first = {routes_.order(k), routes_.rank(k)};
      if (first.rank < 0) return {-1, -1};
      left_ &= ~routes_.mask_of([&](const Route& route) { return route.rank == first.rank; });
      return first;
    }

  private:
    const WarpRoutes& routes_;
    uint64_t left_;
  };
  __device__ IncomingStrip look_for(int64_t token, const Order& order, uint32_t strip) const {
    return order.order < 0 ? IncomingStrip{}
                           : IncomingStrip(staged_strip(call_.rank(), token, order.order, strip), bytes_of(strip));
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
        TaggedCount* const staged = staged_weight(call_.rank(), token, k);
        TaggedCount word{};
        ok = call_.wait_for_word(staged, word, route.rank);
        weight = std::bit_cast<float>(word.value);
        if (call_.poisons_staging()) *staged = {std::bit_cast<int32_t>(NAN), 0};
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
  Role role_;
};

} // namespace epx::cuda
