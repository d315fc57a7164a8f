// SPDX-License-Identifier: Apache-2.0
// The high-throughput path of scatter, and dispatch as what it moves. See scatter.cu.
#pragma once

#include <cmath>

#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/ll_rows.cuh"
#include "runtime/stages/cuda/rows/row_sender.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"
#include "runtime/stages/cuda/rows/staging.cuh"
#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"

namespace epx::cuda {

// An operation says what a scatter sends, and how a receive warp stores it. In store() one warp stores one token: each lane
// passes a slot of this rank, or -1, the row of the receive tensors that the slot is, and the slot's weight. Both are the same
// but in the rank-major layout (kTakesRankMajor), where slots have no weights.

// Says where this rank reads a token from: its own input, staging, or the receive rows.
struct SourceRow {
  int64_t token;
  ArrivedRow row;
  const std::byte* sidecar;
  int32_t slot_in_place; // the slot that the row lies in already; -1: none
  bool is_own;           // it is the input of this rank
};

template <typename WireFormat>
struct Dispatch {
  using Format = WireFormat;

  DispatchCall call;
  int64_t row_bytes; // of tokens: input_row_bytes()

  __device__ Format format() const { return Format(call); }
  // Of the receive rows, and of those in staging.
  __device__ int64_t recv_row_bytes() const {
    return Format::kIsReceiveFormat ? row_bytes : epx::row_bytes(call.recv_dtype, call.hidden);
  }
  __device__ int64_t wire_row_bytes() const {
    return Format::kIsReceiveFormat ? row_bytes : WireRow(call.format, call.hidden).bytes;
  }
  __device__ const std::byte* input_rows() const { return call.tokens; }
  __device__ const float* input_weights() const { return call.topk_weights; }
  __device__ const std::byte* input_sidecar() const { return call.sidecar; }
  constexpr int64_t sidecar_bytes() const { return call.sidecar_bytes; }
  __device__ std::byte* rows() const { return call.recv_tokens; }
  constexpr bool clears_pads() const { return call.clears_pads; }
  __device__ void store(TmaRowPipeline& pipeline, const SourceRow& source_row, int32_t slot, int64_t /*row*/,
                        float weight) const {
    const bool is_slot = slot >= 0;
    std::byte* const to =
        is_slot && slot != source_row.slot_in_place ? call.recv_tokens + slot * recv_row_bytes() : nullptr;
    if (source_row.is_own && !format().comes_as_sent())
      format().begin_send(pipeline, source_row.row.row, row_bytes, source_row.token, {to, nullptr, slot});
    else
      format().begin_receive(pipeline, source_row.row, row_bytes, slot, to);
    if (call.sidecar_bytes > 0)
      copy_row_to_destinations(source_row.sidecar, call.sidecar_bytes,
                               is_slot ? call.recv_sidecar + slot * call.sidecar_bytes : nullptr);
    if (call.recv_weights != nullptr && is_slot) call.recv_weights[slot] = weight;
  }
  static constexpr bool kMixesPaths = false, kTakesRankMajor = false;
  static constexpr bool kStagesOwnRows = false; // whether this rank reads its own rows from staging, too, as its peers do
  // Where a sender stores a row that stays here, in a slot.
  __device__ SendPlaces own_places(int32_t slot) const {
    return {{call.recv_tokens + slot * recv_row_bytes(), nullptr, slot},
            call.recv_sidecar + slot * call.sidecar_bytes,
            nullptr};
  }
  // Zeros what the slots that the lanes pass, and their rows, have beside the rows: weights, sidecars, scales; -1: none.
  __device__ void clear_beside_rows(int32_t slot, int64_t /*row*/) const {
    if (call.recv_weights != nullptr && slot >= 0) call.recv_weights[slot] = 0.0f;
    format().clear_scales(slot);
    if (call.sidecar_bytes == 0) return;
    for (unsigned left = __ballot_sync(~0u, slot >= 0 ? 1 : 0); left != 0; left &= left - 1)
      zero_row(call.recv_sidecar + from_lane(slot, lowest_bit(left)) * call.sidecar_bytes, call.sidecar_bytes);
  }
};

// The dispatch of prepare_dispatch: each source has chosen its path by its own number of tokens (sends_ll_lines). Weights are
// staged by token, since rows may leave before their slots are known.
template <typename WireFormat>
struct MixedDispatch : Dispatch<WireFormat> {
  static constexpr bool kMixesPaths = true;
};

// The warps of `partition` begin to zero the pads of the zones that the plan says.
template <typename Operation>
__device__ inline void clear_pads(const Operation& operation, const HandleReader& plan, const ExpertBlocks& experts,
                                  int rank, TmaRowPipeline& pipeline, const WorkPartition& partition) {
  const auto max_pads = static_cast<uint32_t>(operation.call.alignment - 1); // of each zone
  const uint32_t pads = static_cast<uint32_t>(experts.num_local_experts(rank)) * max_pads;
  const int64_t row_bytes = operation.recv_row_bytes();
  std::byte* const rows = operation.rows();
  const bool by_tma = !is_unaligned(reinterpret_cast<uint64_t>(rows), row_bytes);
  if (by_tma) pipeline.make_zeros();
#pragma unroll 1
  for (uint32_t first = 0; first < pads; first += static_cast<uint32_t>(partition.count) * kWarp) {
    // Each lane has the index of a possible pad; neighboring indices belong to different warps.
    const uint32_t pad = first + static_cast<uint32_t>(lane()) * static_cast<uint32_t>(partition.count) +
                         static_cast<uint32_t>(partition.index);
    int32_t slot = -1;
    if (pad < pads) {
      const uint32_t zone = pad / max_pads;
      // Handle memory is not trusted: `slot` ends up in [0, recv_rows), or negative.
      const auto rows_of_zone = static_cast<uint32_t>(plan.zone_rows[zone]);
      const uint32_t in_zone = pad - zone * max_pads;
      const auto here = static_cast<int32_t>(static_cast<uint32_t>(plan.zone_begin[zone]) + rows_of_zone + in_zone);
      const uint32_t pads_of_zone = max_pads - (rows_of_zone + max_pads) % (max_pads + 1);
      if (in_zone < pads_of_zone && here < plan.zone_begin[zone + 1] && here < operation.call.recv_rows) slot = here;
    }
    if (by_tma)
      pipeline.clear(row_bytes, slot >= 0 ? rows + slot * row_bytes : nullptr);
    else
      for (unsigned left = __ballot_sync(~0u, slot >= 0 ? 1 : 0); left != 0; left &= left - 1)
        zero_row(rows + from_lane(slot, lowest_bit(left)) * row_bytes, row_bytes);
    operation.clear_beside_rows(slot, slot);
  }
}

template <typename Operation>
struct ScatterParams : MovementParams {
  Operation operation;
};

// Returns whether a rank with so many tokens sends LL lines, where each source chooses its path (MixedDispatch).
template <typename Format>
__host__ __device__ inline bool sends_ll_lines(const GroupContext& context, int64_t num_tokens, int top_k) {
  return (Format::kIsReceiveFormat || context.shape.num_experts <= kMaxQuantisedLlExperts) &&
         fits_ll_staging(context.layout, num_tokens, top_k);
}
// Returns whether a rank is a peer that has sent its rows so.
template <typename Format>
__device__ inline bool is_ll_peer(const DeviceGroup& group, const CallSession& call, int top_k, int rank) {
  return rank != call.rank() && sends_ll_lines<Format>(group.context, call.descriptors().num_tokens[rank], top_k);
}

// Each warp has one.
template <typename Operation>
class Scatter {
public:
  // Whether senders may store the rows that stay here. Those of prepare_dispatch may leave before their slots are known, and
  // combine_bwd reads a row as it travelled.
  static constexpr bool kMaySendOwnRows =
      !Operation::Format::kIsReceiveFormat && !Operation::kMixesPaths && !Operation::kStagesOwnRows;

  __device__ Scatter(const ScatterParams<Operation>& params, const Movement& movement, TmaRowPipeline& pipeline)
      : group_(params.group), operation_(params.operation), movement_(movement), call_(movement.call()),
        pipeline_(pipeline),
        sender_(pipeline, params.role_counts, lanes_of_peers(movement.call().num_ranks()), params.operation.format()),
        staging_(params.group) {}

  __device__ SignalWarp signal_warp() const { return sender_.signal_warp(); }

  // Begins to zero the pads of the zones.
  __device__ void clear_pads(const WorkPartition& partition) const {
    cuda::clear_pads(operation_, movement_.plan(), ExpertBlocks{group_.context.shape.num_experts, call_.num_ranks()},
                     call_.rank(), pipeline_, partition);
  }

  // Sends tokens one after the other to all peers that have a live slot of them.
  __device__ void send(const WarpAssignment& warp) {
    const int64_t tokens = operation_.call.num_tokens;
#pragma unroll 1
    for (int64_t token = warp.index; token < tokens; token = movement_.next_tile(warp, tokens))
      send_token(token);
    sender_.close();
  }

  // Sends tokens likewise before there is a plan, into staging, whose rows lie by token (scatter_by_token). ranks_of(token)
  // returns the rank of each route; -1: it has none.
  template <typename RanksOf>
  __device__ void send_without_plan(const WarpAssignment& warp, const RanksOf& ranks_of) {
    static_assert(Operation::kMixesPaths); // others stage weights by slot
    const int64_t tokens = operation_.call.num_tokens;
#pragma unroll 1
    for (int64_t token = warp.index; token < tokens; token = movement_.next_tile(warp, tokens)) {
      const PerRoute<int> ranks = ranks_of(token);
      if (operation_.input_weights() != nullptr)
        for (int first = 0; first < operation_.call.top_k; first += kWarp)
          if (const int rank = ranks.own(first); rank >= 0 && rank != call_.rank())
            send_weight(rank, token, -1, first + lane());
      const RankMask destinations = set_of_ranks(ranks);
#pragma unroll 1
      for (int first = 0; first < call_.num_ranks() - 1; first += kWarp) { // each lane has one peer
        const int peer = first + lane() < call_.num_ranks() - 1 ? movement_.peer_in_order(token, first + lane()) : -1;
        const bool goes_there = peer >= 0 && destinations.contains(peer);
        if (__any_sync(~0u, goes_there ? 1 : 0) == 0) continue;
        const int64_t row = staging_.row_of(call_.rank(), token, -1);
        sender_.send(sent_rows(), token, goes_there ? staged_places(peer, token, row) : SendPlaces{});
      }
    }
    sender_.close();
  }

  // The tokens of this rank come first, unless the senders store them: they need no peer. Those of peers that have sent LL lines
  // are left to receive_ll_peers().
  __device__ void receive(const WarpAssignment& warp) const {
    const TokenTiles tiles = tiles_to_receive(warp);
#pragma unroll 1
    for (int64_t tile = movement_.first_tile(warp, tiles.count); tile < tiles.count;
         tile = movement_.next_tile(warp, tiles.count))
      if (!receive_tile(tiles.first_token(tile), tiles.first_token(tile + 1))) break;
    pipeline_.finish();
  }

private:
  // A receiver's tile is a batch of tokens where each warp has more than kManyTokens of them, since a look-up is a chain of
  // dependent loads with no row in flight. That takes most of the time where rows are short and prepare_dispatch receives the own
  // ones, too (docs/tuning.md).
  __device__ TokenTiles tiles_to_receive(const WarpAssignment& warp) const {
    constexpr bool kPrefersBatches = Operation::kMixesPaths && !Operation::Format::kIsReceiveFormat;
    constexpr int kManyTokens = kPrefersBatches ? 4 : 32, kSinglesPerWarp = kPrefersBatches ? 2 : 4;
    const auto tokens = own_tokens_to_receive() + static_cast<int32_t>(movement_.num_peer_tokens());
    if (call_.forces_ht_path()) return {tokens, max_batch_tokens(), 0}; // a test hook
    const auto receivers = static_cast<int32_t>(warp.count);
    return {tokens, tokens > kManyTokens * receivers ? max_batch_tokens() : 1,
            kSinglesPerWarp * (receivers + static_cast<int32_t>(warp.joining))};
  }
  __device__ int max_batch_tokens() const {
    return operation_.call.is_rank_major() || operation_.call.top_k > kWarp ? 1
                                                                            : SlotBatch::max_tokens(operation_.call.top_k);
  }

  // Receives the tokens [first, end); see token_at. Returns false when the group has failed.
  __device__ bool receive_tile(int32_t first, int32_t end) const {
    const bool is_batch = end - first > 1;
    SlotBatch batch;
    bool is_ready = false; // in lane t: the warp has acquired the ready flag of token t of the batch
    if (is_batch) {
      const Movement::PeerToken from = first + lane() < end ? token_at(first + lane()) : Movement::PeerToken{-1, 0};
      batch = movement_.slots_of_batch(from);
      if (batch.size > 0 && from.rank != call_.rank() && movement_.sends_rows(from.rank))
        is_ready = call_.is_ready(staging_.ready_flag(call_.rank(), from.rank, from.token));
      __syncwarp(); // all lanes see what each has acquired: a vote orders no memory
    }
#pragma unroll 1
    for (int32_t index = first; index < end; ++index) {
      const Movement::PeerToken from = token_at(index);
      if (from.token >= movement_.tokens_of(from.rank)) continue;
      if constexpr (Operation::kMixesPaths)
        if (is_ll_peer<typename Operation::Format>(group_, call_, operation_.call.top_k, from.rank)) continue;
      const TokenSlots found = is_batch ? batch.slots_of(index - first, operation_.call.top_k, from.token)
                                        : movement_.slots_of(from.rank, from.token);
      if (!receive_token(from.rank, found, from_lane(is_ready ? 1 : 0, index - first) != 0)) return false;
    }
    return true;
  }
  // Returns whether senders store the rows that stay here, too, and not the receivers.
  __device__ bool sends_own_rows() const {
    if constexpr (kMaySendOwnRows)
      return call_.num_ranks() > 1 && operation_.format().sends_own_rows() && movement_.sends_rows(call_.rank());
    return false;
  }
  __device__ int32_t own_tokens_to_receive() const {
    return sends_own_rows() ? 0 : static_cast<int32_t>(operation_.call.num_tokens);
  }
  // The tokens to receive: those of this rank, and then those of the peers.
  __device__ Movement::PeerToken token_at(int32_t index) const {
    const int32_t own = own_tokens_to_receive();
    return index < own ? Movement::PeerToken{call_.rank(), index}
                       : movement_.peer_token(static_cast<uint32_t>(index - own));
  }

  __device__ SourceTensors sent_rows() const {
    return {operation_.input_rows(), operation_.row_bytes, operation_.input_sidecar(), operation_.sidecar_bytes()};
  }
  __device__ SendPlaces staged_places(int peer, int64_t token, int64_t row) const {
    std::byte* const staged = staging_.row(peer, row);
    return {{staged, staged}, staging_.sidecar(peer, row), staging_.ready_flag(peer, call_.rank(), token)};
  }
  // The weight of a token's route k, which has the slot.
  __device__ float* staged_weight(int receiver, int source, int64_t token, int32_t slot, int k) const {
    if constexpr (Operation::kMixesPaths)
      return staging_.weight_of_route(receiver, source, token, k);
    else
      return staging_.weight_of_slot(receiver, slot);
  }

  // Returns whether a source stores its rows into the receive rows of a receiver. The source reads its own descriptor as its
  // peers do.
  __device__ bool is_in_place(int source, int receiver) const {
    if constexpr (Operation::kTakesRankMajor)
      if (movement_.is_compact()) return false;
    return operation_.format().sends_in_place() && has_registered_rows(call_, receiver) &&
           !call_.descriptors().stages_rows[source];
  }
  // Returns the row of the receive tensors that a slot of this rank is.
  __device__ int64_t row_of_slot(int32_t slot) const {
    if constexpr (Operation::kTakesRankMajor) return movement_.row_of_slot(slot);
    return slot;
  }

  __device__ void send_token(int64_t token) {
    if (!movement_.sends_rows(call_.rank())) return;
    const int top_k = operation_.call.top_k;
    const WarpRoutes routes = movement_.routes_of(token);
    const bool sends_own = sends_own_rows();
    if (operation_.input_weights() != nullptr) {
      send_weights(token, routes);
      if (sends_own) store_own_weights(token, routes);
    }
    uint64_t own_left =
        sends_own ? routes.mask_of([&](const Route& route) { return is_own(route); }) : 0; // by k: slots here
    for (int first = 0; first < call_.num_ranks() - 1; first += kWarp) {                   // each lane has one peer
      const int peer = first + lane() < call_.num_ranks() - 1 ? movement_.peer_in_order(token, first + lane()) : -1;
      int32_t first_slot = -1; // the token's first slot on that peer, live or not: it selects the staging row
      int32_t first_live = -1;
#pragma unroll 1
      for (int i = 0; i < kWarp && first + i < call_.num_ranks() - 1; ++i) {
        const int rank = from_lane(peer, i);
#pragma unroll 1
        for (int k = top_k > kWarp ? kWarp : 0; k >= 0; k -= kWarp) { // k descends: the lowest k overwrites the others
          const Route route = routes.own(k);
          const bool goes_there = route.slot >= 0 && route.rank == rank;
          const unsigned kept = __ballot_sync(~0u, goes_there ? 1 : 0);
          const unsigned live = __ballot_sync(~0u, goes_there && movement_.is_live(route) ? 1 : 0);
          const int32_t kept_slot = from_lane(route.slot, kept != 0 ? lowest_bit(kept) : 0);
          const int32_t live_slot = from_lane(route.slot, live != 0 ? lowest_bit(live) : 0);
          if (lane() == i && kept != 0) first_slot = kept_slot;
          if (lane() == i && live != 0) first_live = live_slot;
        }
      }
      const int32_t own_slot = next_slots(routes, own_left, min(call_.num_ranks() - 1 - first, kWarp));
      if (__any_sync(~0u, max(first_live, own_slot) >= 0 ? 1 : 0) != 0)
        send_to(peer, token, first_slot, first_live, own_slot);
    }
    while (own_left != 0)
      send_to(-1, token, -1, -1, next_slots(routes, own_left, 0));
  }
  // Gives the lanes from `next_lane` on the slots of the routes that `left` has, one each, and takes those routes out of it.
  // Returns the lane's; -1: none.
  __device__ static int32_t next_slots(const WarpRoutes& routes, uint64_t& left, int next_lane) {
    int32_t own = -1;
#pragma unroll 1
    for (; left != 0 && next_lane < kWarp; left &= left - 1, ++next_lane) {
      const int32_t slot = routes.slot(lowest_bit(left));
      if (lane() == next_lane) own = slot;
    }
    return own;
  }
  __device__ bool is_own(const Route& route) const {
    return route.rank == call_.rank() && movement_.is_live(route);
  }
  __device__ void store_own_weights(int64_t token, const WarpRoutes& routes) const {
    if constexpr (kMaySendOwnRows) {
      const int top_k = operation_.call.top_k;
      for (int first = 0; first < top_k; first += kWarp)
        if (const Route route = routes.own(first); is_own(route))
          operation_.call.recv_weights[route.slot] = operation_.input_weights()[route_index(token, top_k, first + lane())];
    }
  }
  __device__ void send_weights(int64_t token, const WarpRoutes& routes) const {
    const int top_k = operation_.call.top_k;
    for (int first = 0; first < top_k; first += kWarp)
      if (const Route route = routes.own(first); route.rank != call_.rank() && movement_.is_live(route))
        send_weight(route.rank, token, route.slot, first + lane());
  }
  __device__ void send_weight(int peer, int64_t token, int32_t slot, int k) const {
    *staged_weight(peer, call_.rank(), token, slot, k) =
        operation_.input_weights()[route_index(token, operation_.call.top_k, k)];
  }
  // Each lane passes a peer and the token's first slots there, or a slot of this rank. At least one lane has a live slot.
  __device__ void send_to(int peer, int64_t token, int32_t first_slot, int32_t first_live, int32_t own_slot) {
    SendPlaces to;
    if constexpr (kMaySendOwnRows)
      if (own_slot >= 0) to = operation_.own_places(own_slot);
    if (first_live >= 0) {
      to = staged_places(peer, token, staging_.row_of(call_.rank(), token, first_slot));
      if (is_in_place(call_.rank(), peer))
        to.row.row =
            registered_rows(group_, call_, peer) + operation_.call.row_of_slot(first_live) * operation_.recv_row_bytes();
    }
    sender_.send(sent_rows(), token, to);
  }

  // Stores one token into its slots here. Returns false when the group has failed. `is_ready`: the warp has acquired the row's
  // ready flag.
  __device__ bool receive_token(int source, const TokenSlots& found, bool is_ready) const {
    const int64_t token = found.token;
    const int rank = call_.rank();
    const int64_t row_bytes = operation_.recv_row_bytes();
    const WarpList<int32_t>& slots = found.slots;
    if (slots.size() == 0) return true;
    if (!movement_.sends_rows(source)) {
      for (int i = 0; i < slots.size(); ++i) {
        const int32_t slot = slots[i];
        const int64_t row = row_of_slot(slot);
        zero_row(operation_.rows() + row * row_bytes, row_bytes);
        operation_.clear_beside_rows(lane() == 0 ? slot : -1, row);
      }
      return true;
    }
    const int64_t sidecar_bytes = operation_.sidecar_bytes();
    const std::byte* const input = operation_.input_rows() + token * operation_.row_bytes;
    SourceRow source_row{token, {input, input}, operation_.input_sidecar() + token * sidecar_bytes, -1, true};
    const int64_t staging = staging_.row_of(source, token, found.first_slot);
    if (source != rank) {
      if (!is_ready) {
        bool ok = true;
        if (lane() == 0) ok = call_.wait_ready(staging_.ready_flag(rank, source, token), source);
        if (__all_sync(~0u, ok ? 1 : 0) == 0) return false;
        __syncwarp(); // all lanes see what lane 0 has acquired: a vote orders no memory
      }
      const int32_t first_live = slots[0];
      const bool in_place = is_in_place(source, rank);
      const std::byte* const staged = staging_.row(rank, staging);
      source_row = {token,
                    {in_place ? operation_.rows() + operation_.call.row_of_slot(first_live) * row_bytes : staged, staged},
                    staging_.sidecar(rank, staging),
                    in_place ? first_live : -1,
                    false};
    }
    if constexpr (Operation::kStagesOwnRows) {
      if (source == rank) {
        std::byte* const staged = staging_.row(rank, staging);
        operation_.format().begin_send(pipeline_, source_row.row.row, operation_.row_bytes, token,
                                       lane() == 0 ? RowPlace{staged, staged} : RowPlace{});
        pipeline_.finish();
        __syncwarp(); // all lanes see what each has stored
        source_row.row = {staged, staged};
      }
    }
    for (int first = slots.size() > kWarp ? kWarp : 0; first >= 0;
         first -= kWarp) { // the first slot, which may be in place, comes last
      const int32_t slot = slots.has_own(first) ? slots.own(first) : -1;
      float weight = 0.0f;
      float* staged = nullptr; // the weight of the lane's slot in staging
      if (operation_.input_weights() != nullptr && slot >= 0) {
        const int k = source == rank || Operation::kMixesPaths ? movement_.k_of_slot(slot) : 0;
        if (source != rank) staged = staged_weight(rank, source, token, slot, k);
        weight = staged != nullptr ? *staged : operation_.input_weights()[route_index(token, operation_.call.top_k, k)];
      }
      operation_.store(pipeline_, source_row, slot, row_of_slot(max(slot, 0)), weight);
      if (call_.scribbles_staging() && staged != nullptr) *staged = NAN;
    }
    if (call_.scribbles_staging() && source != rank) {
      pipeline_.finish();
      scribble_row(staging_.row(rank, staging), operation_.wire_row_bytes());
      scribble_row(staging_.sidecar(rank, staging), sidecar_bytes);
    }
    return true;
  }

  const DeviceGroup& group_;
  const Operation& operation_;
  const Movement& movement_;
  const CallSession& call_;
  TmaRowPipeline& pipeline_;
  RowSender<typename Operation::Format> sender_;
  ScatterStaging staging_;
};

// Each warp takes a chunk of a row at a time.
template <bool kUnaligned, typename Format>
__device__ inline void receive_ll_chunks(const ScatterParams<MixedDispatch<Format>>& params, const Movement& movement,
                                         const WorkPartition& partition, std::byte* scratch) {
  const CallSession& call = movement.call();
  const DispatchCall& args = params.operation.call;
  const LlRows<typename Format::template LlChunks<kUnaligned>> rows(params.group, call, args, scratch);
  const auto tokens = static_cast<uint32_t>(params.group.context.layout.ll_tokens * (call.num_ranks() - 1));
#pragma unroll 1
  for (auto tile = static_cast<uint32_t>(partition.index);; tile += static_cast<uint32_t>(partition.count)) {
    const uint32_t index = tile / rows.num_chunks();
    if (index >= tokens) return;
    const auto [source, token] = movement.peer_token(index);
    if (!is_ll_peer<Format>(params.group, call, args.top_k, source) || token >= movement.tokens_of(source)) continue;
    const TokenSlots found = movement.slots_of(source, token);
    if (found.slots.size() == 0) continue;
    const auto slot_of = [&](int first) { return found.slots.has_own(first) ? found.slots.own(first) : -1; };
    const LlSlots slots(slot_of(0), slot_of(kWarp)); // in k order, but not by k
    const auto k_of = [&](int first) { return movement.k_of_slot(slots.own(first)); };
    if (!rows.receive_chunk(source, token, rows.range_at(tile - index * rows.num_chunks()), slots,
                            movement.sends_rows(source), k_of))
      return;
  }
}
// It is not inlined, and gets copies: the chunks would take registers of the loop in Scatter::receive(), and whatever that loop
// shares with a function by its address would lie in local memory, which each acquire empties out of the L1 cache.
template <typename Format>
__device__ __noinline__ void receive_all_ll_chunks(const ScatterParams<MixedDispatch<Format>>& params,
                                                   const CallSession call, const WorkPartition partition,
                                                   std::byte* scratch) {
  const Movement movement(params, call);
  if (has_unaligned_rows(params.operation.call))
    receive_ll_chunks<true>(params, movement, partition, scratch);
  else
    receive_ll_chunks<false>(params, movement, partition, scratch);
}
// Receives the tokens of those peers that have sent LL lines, if there are any. A warp that has joined has no part in it. The
// warp's pipeline has nothing left to do.
template <typename Format>
__device__ inline void receive_ll_peers(const ScatterParams<MixedDispatch<Format>>& params, const CallSession& call,
                                        const WorkPartition& partition, const TmaRowPipeline& pipeline) {
  static_assert(TmaRowPipeline::kStagesBytes >= kLlChunkBytes);
  bool any = false;
#pragma unroll 1
  for (int rank = 0; rank < call.num_ranks(); ++rank)
    any |= is_ll_peer<Format>(params.group, call, params.call.top_k, rank);
  if (any && partition.index >= 0) receive_all_ll_chunks(params, call, partition, pipeline.stages());
}

} // namespace epx::cuda
