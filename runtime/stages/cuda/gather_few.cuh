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
    const auto items = static_cast<uint32_t>(movement_.most_tokens() * (call_.num_ranks() - 1)) * strips_;
#pragma unroll 1
    for (auto item = static_cast<uint32_t>(role_.index); item < items; item += static_cast<uint32_t>(role_.count)) {
      const uint32_t index = item / strips_;
      const Movement::PeerToken peer = movement_.peer_token(index);
      send_strip_of(peer.rank, peer.token, item - index * strips_);
    }
  }

  // Once the ranks have met.
  __device__ void sum() const {
    const auto items = static_cast<uint32_t>(args_.num_tokens) * strips_;
#pragma unroll 1
    for (auto item = static_cast<uint32_t>(role_.index); item < items; item += static_cast<uint32_t>(role_.count))
      if (const uint32_t token = item / strips_; !sum_strip(token, item - token * strips_)) return;
  }

private:
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
  __device__ int64_t bytes_of(uint32_t strip) const {
    return min(row_bytes_ - strip * kStripBytes, kStripBytes);
  }
  __device__ Strip load_slot(int64_t slot, uint32_t strip) const {
    return load_strip(params_.rows + slot * row_bytes_ + strip * kStripBytes, bytes_of(strip));
  }
  // Of a row here; the lane's slot names it, or none.
  __device__ float weight_of(int32_t slot) const {
    return params_.row_weights != nullptr && slot >= 0 ? params_.row_weights[slot] : 1.0f;
  }

  __device__ void send_strip_of(int home, int64_t token, uint32_t strip) const {
    const TokenSlots found = movement_.slots_of(home, token);
    const WarpList<int32_t>& slots = found.slots;
    if (slots.size() == 0) return;
    StripSum<T> sum;
    Strip ahead = load_slot(slots[0], strip);
    for (int first = 0; first < slots.size(); first += kWarp) {
      const int32_t mine = slots.has_own(first) ? slots.own(first) : -1;
      const float weight = weight_of(mine);
      for (int i = first; i < slots.size() && i < first + kWarp; ++i) {
        const Strip row = ahead;
        if (i + 1 < slots.size()) ahead = load_slot(slots[i + 1], strip);
        sum.add(row, from_lane(weight, i % kWarp));
      }
      if (strip == 0 && params_.carried_weights != nullptr && mine >= 0)
        store_whole_relaxed_sys(staged_weight(home, token, movement_.plan().slot_records[mine].k),
                                TaggedCount{std::bit_cast<int32_t>(params_.carried_weights[mine]), call_.tag()});
    }
    send_strip(staged_strip(home, token, found.order, strip), bytes_of(strip), sum.rounded(), call_.tag());
  }

  // False: the group has failed.
  __device__ bool sum_strip(int64_t token, uint32_t strip) const {
    const WarpRoutes routes = movement_.routes_of(token);
    const uint64_t live = routes.mask_of([&](const Route& route) { return movement_.is_live(route); });
    const uint64_t own = live & routes.mask_of([&](const Route& route) { return route.rank == call_.rank(); });
    Orders orders(routes, live & ~own);
    Order next = orders.take(); // a peer's sum is looked for while others are added
    IncomingStrip incoming = look(token, next, strip);
    StripSum<T> sum;
    const int own_order = own != 0 ? routes.order(first_of(own)) : kMaxTopK;
    bool owes_own = own != 0;
    const Strip own_sum = owes_own ? sum_own(routes, own, strip) : Strip{};
    while (next.order >= 0) {
      if (owes_own && own_order < next.order) {
        sum.add(own_sum, 1.0f);
        owes_own = false;
      }
      if (!incoming.wait(call_, next.rank)) return false;
      const Strip here = incoming.get();
      if (call_.poisons_staging()) poison_strip(staged_strip(call_.rank(), token, next.order, strip));
      next = orders.take();
      incoming = look(token, next, strip);
      sum.add(here, 1.0f);
    }
    if (owes_own) sum.add(own_sum, 1.0f);
    store_strip(params_.out + token * row_bytes_ + strip * kStripBytes, bytes_of(strip), sum.rounded());
    return strip != 0 || params_.carried_out == nullptr || collect_weights(token, routes, live);
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
  __device__ IncomingStrip look(int64_t token, const Order& order, uint32_t strip) const {
    return order.order < 0 ? IncomingStrip{}
                           : IncomingStrip(staged_strip(call_.rank(), token, order.order, strip), bytes_of(strip));
  }

  __device__ Strip sum_own(const WarpRoutes& routes, uint64_t own, uint32_t strip) const {
    const float low_weight = weight_of((own >> lane() & 1) != 0 ? routes.low.slot : -1);
    const float high_weight = weight_of((own >> kWarp >> lane() & 1) != 0 ? routes.high.slot : -1);
    StripSum<T> sum;
    Strip ahead = load_slot(routes.slot(first_of(own)), strip);
#pragma unroll 1
    while (own != 0) {
      const int k = first_of(own);
      own &= own - 1;
      const Strip row = ahead;
      if (own != 0) ahead = load_slot(routes.slot(first_of(own)), strip);
      sum.add(row, from_lane(k < kWarp ? low_weight : high_weight, k % kWarp));
    }
    return sum.rounded();
  }

  // False: the group has failed. The same in all lanes.
  __device__ bool collect_weights(int64_t token, const WarpRoutes& routes, uint64_t live) const {
    bool ok = true;
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int k = first + lane();
      if (k >= args_.top_k) continue;
      const Route& route = routes.own(first);
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
