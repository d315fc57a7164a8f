// SPDX-License-Identifier: Apache-2.0
// A call of dispatch_rank_major as one thread sees it: how the numbers of rows, the outputs and the plan are written. Staging is
// used as by scatter: rows, sidecars and ready flags by (source, row) instead of (source, token).
//
// M decides which path the call takes (takes_ll_path), so that all ranks take the same path, and the launch knows it.
#pragma once

#include <cmath>

#include "runtime/layout/rank_major.h"
#include "runtime/stages/cuda/bad_indices.cuh"
#include "runtime/stages/cuda/expert_ranks.cuh"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/staging.cuh"

namespace epx::cuda {

// The staging of the low-latency path has a limited number of rows for each source. A test hook makes about half of the calls
// that fit take the high-throughput path; the ranks of a test launch the same calls.
inline bool takes_ll_path(const DeviceGroup& group, const DispatchRankMajorCall& call) {
  const bool forces_ht_path =
      kTestHooks && group.hooks.alternates_paths && (group.launch * uint64_t{0x9e3779b97f4a7c15} >> 40 & 1) != 0;
  return call.slots_per_source <= group.context.layout.ll_tokens && !forces_ht_path;
}

struct RankMajorParams : MovementParams {
  DispatchRankMajorCall args;
  ExpertRanks experts;
};

// A value for each rank: each lane holds that of rank `lane` in `low` and that of rank 32 + `lane` in `high`.
template <typename T>
using PerRank = PerRoute<T>;

// The lanes that have the routes of a token, or of a row: a part of the warp where K allows it. Where K is larger than a warp, a
// lane has two.
class RouteLanes {
public:
  __device__ explicit RouteLanes(int top_k)
      : count_(top_k >= kWarp ? kWarp : SlotBatch::room_for(top_k)), first_(lane() / count_ * count_) {}

  __device__ int count() const { return count_; }
  __device__ int first() const { return first_; }
  __device__ int index() const { return lane() / count_; }
  __device__ int own_k() const { return lane() - first_; } // and 32 more, where a lane has two
  // Returns a mask of the k for whose values `holds` is true. All lanes call this; each gets that of its own routes.
  template <typename T, typename Holds>
  __device__ uint64_t mask_of(const PerRoute<T>& routes, const Holds& holds) const {
    const uint64_t mask = routes.mask_of(holds);
    return count_ < kWarp ? mask >> first_ & ((1u << count_) - 1) : mask;
  }

private:
  int count_, first_;
};

// A peer's routes that a warp has loaded so far, of one row for each RouteLanes.
class IncomingRoutes {
public:
  // Loads the packets of the `count` routes of the lane's row once; 0: it has none.
  __device__ IncomingRoutes(RankMajorRoute* staged, int count, const RouteLanes& lanes)
      : staged_(staged), count_(count), lanes_(lanes) {
    if (own_k() < count_) routes_.low = load_packet_relaxed_sys(staged_ + own_k());
    if (kWarp + own_k() < count_) routes_.high = load_packet_relaxed_sys(staged_ + kWarp + own_k());
  }

  // Waits until all packets carry the call's epoch; `peer` stores them. Returns false, in all lanes, when the group has failed.
  __device__ bool wait(const CallSession& call, int peer) {
    bool ok = wait_for(call, peer, own_k(), routes_.low);
    if (count_ > kWarp) ok &= wait_for(call, peer, kWarp + own_k(), routes_.high);
    return __all_sync(~0u, ok ? 1 : 0) != 0;
  }
  // Each lane's own, after wait() has returned true.
  __device__ const PerRoute<RankMajorRoute>& get() const { return routes_; }
  __device__ const RouteLanes& lanes() const { return lanes_; }
  __device__ int count() const { return count_; }
  __device__ int own_k() const { return lanes_.own_k(); }
  // See scribble_chunk().
  __device__ void scribble() const {
    for (int k = own_k(); k < count_; k += kWarp)
      staged_[k] = {0x5a5a, NAN, 0x5a5a, 0};
  }

private:
  __device__ bool wait_for(const CallSession& call, int peer, int k, RankMajorRoute& route) const {
    return k >= count_ || call.wait_for_loaded_packet(staged_ + k, route, peer);
  }

  RankMajorRoute* staged_;
  int count_;
  RouteLanes lanes_;
  PerRoute<RankMajorRoute> routes_{};
};

class RankMajorCall {
public:
  // `call` is a session of dispatch_rank_major.
  __device__ RankMajorCall(const RankMajorParams& params, CallSession& call)
      : params_(params), group_(params.group), args_(params.args), layout_(params.group.context.layout), call_(call),
        plan_(args_.plan, params.layout), staging_(params.group), row_bytes_(row_bytes(args_.dtype, args_.hidden)) {}

protected:
  // ---- Places ----

  __device__ int32_t row_of(int source, int32_t slot) const {
    return slot - static_cast<int32_t>(source * args_.slots_per_source);
  }
  __device__ int32_t slot_of(int source, int32_t row) const {
    return static_cast<int32_t>(source * args_.slots_per_source) + row;
  }
  __device__ LlPacket16* board_at(int owner, int source) const {
    return group_.window().at<LlPacket16>(owner, layout_.board.offset + source * kExchangeRecordBytes) + call_.parity();
  }
  // ---- Inputs ----

  __device__ float weight_of_route(int64_t route) const {
    return args_.topk_weights != nullptr ? args_.topk_weights[route] : 0.0f;
  }

  // A row of a peer. The receivers number the rows of all peers: first the first row of each, then the second, and so on.
  struct PeerRow {
    int source;
    int32_t row;
  };
  __device__ PeerRow peer_row(uint32_t index) const {
    const auto peers = static_cast<uint32_t>(call_.num_ranks() - 1);
    const auto row = static_cast<int32_t>(index / peers);
    return {peer_in_order(call_, row, static_cast<int>(index - static_cast<uint32_t>(row) * peers)), row};
  }
  // Returns the i-th rank that a token is stored to: the peers, rotated with the token, and then this rank.
  __device__ int rank_in_order(int64_t token, int i) const {
    return i < call_.num_ranks() - 1 ? peer_in_order(call_, token, i) : call_.rank();
  }

  // ---- Outputs and the plan ----

  __device__ static void store_integer(void* tensor, bool is_64, int64_t index, int32_t value) {
    if (is_64)
      static_cast<int64_t*>(tensor)[index] = value;
    else
      static_cast<int32_t*>(tensor)[index] = value;
  }
  // `row`: of the receive tensors.
  __device__ void store_route(int64_t row, int k, int32_t expert, float weight) const {
    const int64_t index = row * args_.top_k + k;
    store_integer(args_.recv_topk_idx, args_.recv_topk_idx_is_64, index, expert);
    if (args_.recv_weights != nullptr) args_.recv_weights[index] = weight;
  }
  // The lanes store the routes of the row that each has, and its record. `to`: the row of the receive tensors.
  __device__ void store_routes(const IncomingRoutes& incoming, int source, int32_t row, int64_t to) const {
    const PerRoute<RankMajorRoute>& routes = incoming.get();
    const int k = incoming.own_k();
    if (k < incoming.count()) store_route(to, k, routes.low.expert, routes.low.weight);
    if (kWarp + k < incoming.count()) store_route(to, kWarp + k, routes.high.expert, routes.high.weight);
    const PerRoute<bool> is_here{k < incoming.count() && routes.low.expert >= 0,
                                 kWarp + k < incoming.count() && routes.high.expert >= 0};
    const uint64_t mask = incoming.lanes().mask_of(is_here, [](bool here) { return here; });
    if (k == 0 && incoming.count() > 0) store_record(source, slot_of(source, row), routes.low.partial_row, mask);
    if (call_.scribbles_staging()) incoming.scribble();
  }
  // One lane stores the record of a row.
  __device__ void store_record(int source, int32_t slot, int32_t partial_row, uint64_t mask) const {
    const auto [token, rank_ordinal] = partial_row_at(group_.context.shape, partial_row, args_.top_k);
    plan_.slot_records[slot] = {token,
                                -1,
                                static_cast<uint16_t>(source),
                                static_cast<uint8_t>(mask == 0 ? 0 : lowest_bit(mask)),
                                1,
                                static_cast<uint8_t>(rank_ordinal & 0x7f)};
    if (args_.top_k > 1)
      plan_.masks(args_.num_slots(group_.context.shape))[slot] = {static_cast<uint32_t>(mask),
                                                                  static_cast<uint32_t>(mask >> 32), 0};
  }
  // One thread stores the header. Movements take the low-latency path if no rank has too many tokens for it.
  __device__ void store_header() const {
    int32_t ll_tokens = 0;
    bool all_ll = true;
#pragma unroll 1
    for (int source = 0; source < call_.num_ranks(); ++source) {
      all_ll &= may_take_ll_path(call_.descriptors().num_tokens[source]);
      ll_tokens = max(ll_tokens, call_.descriptors().num_tokens[source]);
    }
    HandleHeader header{};
    header.magic = kHandleMagic;
    header.group_id = group_.context.group_id;
    header.plan_id = call_.sequence();
    header.num_tokens = args_.num_tokens;
    header.rows_in_use = args_.num_slots(group_.context.shape);
    header.top_k = static_cast<uint16_t>(args_.top_k);
    header.is_compact = args_.is_compact ? 1 : 0;
    header.alignment = args_.alignment;
    header.rank = call_.rank();
    header.ll_tokens = all_ll ? ll_tokens : 0;
    header.rows_per_source = args_.rows_per_source;
    header.checksum = header_checksum(header);
    *plan_.header = header;
  }

  const RankMajorParams& params_;
  const DeviceGroup& group_;
  const DispatchRankMajorCall& args_;
  const WindowLayout& layout_;
  CallSession& call_;
  HandleWriter plan_;
  ScatterStaging staging_; // of the high-throughput path
  int64_t row_bytes_;

private:
  __device__ bool may_take_ll_path(int64_t num_tokens) const {
    return num_tokens <= layout_.ll_tokens && num_tokens * args_.top_k <= layout_.gathered_routes_per_rank &&
           !call_.forces_ht_path();
  }
};

} // namespace epx::cuda
