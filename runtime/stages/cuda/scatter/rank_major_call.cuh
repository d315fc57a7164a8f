// SPDX-License-Identifier: Apache-2.0
// A call of dispatch_rank_major as one thread sees it: how the numbers of rows, the outputs and the plan are written. Staging is
// used as by scatter: rows, sidecars and ready flags by (source, row) instead of (source, token).
//
// M decides which path the call takes (takes_ll_path), so that all ranks take the same path, and the launch knows it.
#pragma once

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
