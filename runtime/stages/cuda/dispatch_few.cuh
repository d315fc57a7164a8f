// dispatch with few tokens. What takes long then is not the bytes but one thing waiting for the other, so rows travel as
// tagged words, into staging that may be written at any time: it lies by parity of the call, and as long as this grid runs
// no peer is still in the call before the last (call.cuh). A warp takes a strip of a row at a time.
//
//   send     A warp takes a strip of a token of this rank: it stores it into the staging of each peer that the token goes
//            to, and into its slots here. It waits for nobody.
//   receive  A warp takes a strip of a peer's token, waits for it alone, and stores it into its slots, once the ranks have
//            met.
//   pads     are cleared by some warps of each block, which do nothing else.
#pragma once

#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/tagged_rows.cuh"

namespace epx::cuda {

template <bool kRagged>
class FewDispatch {
  // A strip of a row or of its sidecar.
  struct Part {
    uint32_t strip; // in staging
    bool is_sidecar;
    int64_t row_bytes;
    int64_t first; // byte of the row or sidecar
    int bytes;
  };

public:
  __device__ FewDispatch(const DeviceGroup& group, const Movement& movement, const DispatchCall& args)
      : group_(group), movement_(movement), call_(movement.call()), args_(args), layout_(group.context.layout),
        row_bytes_(args.hidden * element_bytes(args.dtype)), row_strips_(static_cast<uint32_t>(strips_of(row_bytes_))),
        strips_(row_strips_ + static_cast<uint32_t>(strips_of(args.sidecar_bytes))) {}

  // Of the warps that clear pads.
  __device__ bool clears_pads() const { return static_cast<int>(threadIdx.x) / kWarp >= num_movers(); }
  __device__ Share pad_share() const { return share_of_warps(num_movers(), num_warps()); }
  // The other warps of the block.
  __device__ int num_movers() const { return args_.alignment > 1 ? num_warps() - kPadWarps : num_warps(); }

  __device__ void send() const {
    const Share share = mover_share();
    const auto items = static_cast<uint32_t>(args_.num_tokens) * strips_;
#pragma unroll 1
    for (auto item = static_cast<uint32_t>(share.index); item < items; item += static_cast<uint32_t>(share.count)) {
      const uint32_t token = item / strips_;
      const Part part = part_at(item - token * strips_);
      const WarpRoutes routes = movement_.routes_of(token);
      const Strip strip = load_strip<kRagged>(source_of(part) + token * part.row_bytes + part.first, part.bytes);
      send_to_peers(token, part, routes, strip);
      store_into(movement_.few_slots_here(routes), part, strip);
      if (part.strip == 0 && args_.topk_weights != nullptr) send_weights(token, routes);
    }
  }

  // arrive() tells whether the ranks have met; false: the group has failed.
  template <typename Arrive>
  __device__ void receive(const Arrive& arrive) const {
    const Share share = mover_share();
    const auto tokens = static_cast<uint32_t>(movement_.few_tokens() * (call_.num_ranks() - 1));
    bool has_arrived = false;
#pragma unroll 1
    for (auto item = static_cast<uint32_t>(share.turned_index());; item += static_cast<uint32_t>(share.count)) {
      const uint32_t index = item / strips_;
      if (index >= tokens) break;
      const Movement::PeerToken peer = movement_.peer_token(index);
      const FewSlots slots = movement_.few_slots_of(peer.rank, peer.token); // while the ranks meet
      if (slots.live == 0) continue;
      if (!has_arrived && !arrive()) return;
      has_arrived = true;
      if (!receive_strip(peer.rank, peer.token, part_at(item - index * strips_), slots)) return;
    }
    if (!has_arrived && movement_.must_arrive()) arrive();
  }

private:
  __device__ Part part_at(uint32_t index) const {
    const bool is_sidecar = index >= row_strips_;
    const uint32_t strip = is_sidecar ? index - row_strips_ : index;
    const int64_t row_bytes = is_sidecar ? args_.sidecar_bytes : row_bytes_;
    const int64_t first = static_cast<int64_t>(strip) * kStripBytes;
    return {strip + (is_sidecar ? static_cast<uint32_t>(layout_.few_row_strips) : 0), is_sidecar, row_bytes, first,
            static_cast<int>(min(row_bytes - first, int64_t{kStripBytes}))};
  }
  __device__ const std::byte* source_of(const Part& part) const {
    return part.is_sidecar ? args_.sidecar : args_.tokens;
  }
  __device__ std::byte* place_of(const Part& part, int64_t slot) const {
    return (part.is_sidecar ? args_.recv_sidecar : args_.recv_tokens) + slot * part.row_bytes + part.first;
  }
  __device__ TaggedTriple* staged_strip(int receiver, int source, int64_t token, const Part& part) const {
    return group_.window().at<TaggedTriple>(receiver, layout_.few_scatter_rows.offset) +
           few_scatter_word(layout_, group_.context.shape, call_.parity(), source, token, part.strip);
  }
  __device__ TaggedCount* staged_weight(int receiver, int source, int64_t token, int k) const {
    return group_.window().at<TaggedCount>(receiver, layout_.few_scatter_weights.offset) +
           few_scatter_weight(layout_, group_.context.shape, call_.parity(), source, token, k);
  }

  static constexpr int kPadWarps = 4;
  __device__ static int num_warps() {
    return static_cast<int>(blockDim.x) / kWarp;
  }
  __device__ Share mover_share() const {
    return share_of_warps(0, num_movers());
  }
  __device__ static Share share_of_warps(int first, int end) {
    return share_among(first, end - first, 0, static_cast<int>(gridDim.x));
  }

  // Whether the token's slots there are live, the peer knows.
  __device__ void send_to_peers(int64_t token, const Part& part, const WarpRoutes& routes, const Strip& strip) const {
    const uint64_t ranks = routes.ranks_of([](const Route& route) { return route.slot >= 0; });
#pragma unroll 1
    for (int i = 0; i < call_.num_ranks() - 1; ++i)
      if (const int peer = movement_.peer_in_order(token, i); (ranks >> peer & 1) != 0)
        send_strip(staged_strip(peer, call_.rank(), token, part), part.bytes, strip, call_.tag());
  }
  __device__ void send_weights(int64_t token, const WarpRoutes& routes) const {
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const Route route = routes.own(first);
      if (route.slot < 0) continue;
      const float weight = args_.topk_weights[route_index(token, args_.top_k, first + lane())];
      if (movement_.is_live_here(route))
        args_.recv_weights[route.slot] = weight;
      else if (route.rank != call_.rank())
        send_weight(staged_weight(route.rank, call_.rank(), token, first + lane()), weight, call_.tag());
    }
  }

  __device__ void store_into(const FewSlots& slots, const Part& part, const Strip& strip) const {
#pragma unroll 1
    for (uint64_t left = slots.live; left != 0; left &= left - 1)
      store_strip<kRagged>(place_of(part, slots[lowest_bit(left)]), part.bytes, strip);
  }

  // False: the group has failed.
  __device__ bool receive_strip(int source, int64_t token, const Part& part, const FewSlots& slots) const {
    const bool is_active = movement_.is_active(source);
    TaggedTriple* const staged = staged_strip(call_.rank(), source, token, part);
    Strip strip{};
    if (is_active) {
      IncomingStrip incoming(staged, part.bytes);
      if (!incoming.wait(call_, source)) return false;
      strip = incoming.get();
    }
    store_into(slots, part, strip);
    if (call_.poisons_staging()) poison_strip(staged);
    return part.strip != 0 || args_.recv_weights == nullptr || receive_weights(source, token, slots, is_active);
  }
  // False: the group has failed. The same in all lanes.
  __device__ bool receive_weights(int source, int64_t token, const FewSlots& slots, bool is_active) const {
    bool ok = true;
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int32_t slot = slots.own(first);
      if (slot < 0) continue;
      float weight = 0.0f;
      if (is_active && ok)
        ok = receive_weight(call_, staged_weight(call_.rank(), source, token, first + lane()), source, weight);
      if (ok) args_.recv_weights[slot] = weight;
    }
    return __all_sync(~0u, ok ? 1 : 0) != 0;
  }

  const DeviceGroup& group_;
  const Movement& movement_;
  const Call& call_;
  const DispatchCall& args_;
  const WindowLayout& layout_;
  int64_t row_bytes_;
  uint32_t row_strips_, strips_; // of this call
};

} // namespace epx::cuda
