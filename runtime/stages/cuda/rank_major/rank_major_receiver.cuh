// SPDX-License-Identifier: Apache-2.0
// What the receivers of dispatch_rank_major do: they store the peers' rows, routes and weights into the outputs, and the plan into
// the handle memory. One warp reports the totals.
#pragma once

#include "runtime/stages/cuda/rank_major/rank_major_call.cuh"
#include "runtime/stages/cuda/rows/ll_row.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"
#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"

namespace epx::cuda {

// Behind the entry barrier; each warp has one.
class RankMajorReceiver : public RankMajorCall {
public:
  using RankMajorCall::RankMajorCall;

  // A warp that receives or reports calls this first: it learns how many rows each rank has for this one. Returns false when
  // the group has failed.
  __device__ bool wait_for_counts() {
    bool ok = true;
#pragma unroll 1
    for (int first = 0; first < call_.num_ranks(); first += kWarp) {
      const int source = first + lane();
      if (source >= call_.num_ranks() || !ok) continue;
      LlPacket16& counts = first == 0 ? low_counts_ : high_counts_;
      ok = call_.wait_for_packet(board_at(call_.rank(), source), counts, source);
    }
    return __all_sync(~0u, ok ? 1 : 0) != 0;
  }

  // Stores the peers' rows into the outputs, and their records into the plan.
  template <bool kUnaligned>
  __device__ void receive(TmaRowPipeline& pipeline, const WarpAssignment& warp) const {
    int32_t ll_rows = 0, rows = 0; // of the peer that has the most, by path
#pragma unroll 1
    for (int source = 0; source < call_.num_ranks(); ++source)
      if (source != call_.rank()) {
        int32_t& most = is_ll_source(source) ? ll_rows : rows;
        most = max(most, rows_of(source));
      }
    const auto peers = static_cast<uint32_t>(call_.num_ranks() - 1);
    const uint32_t ll_tiles = static_cast<uint32_t>(ll_rows) * peers * chunks_;
    if (warp.index >= 0) // a warp that has joined takes no LL chunks
#pragma unroll 1
      for (auto tile = static_cast<uint32_t>(warp.index); tile < ll_tiles; tile += static_cast<uint32_t>(warp.count)) {
        const uint32_t index = tile / chunks_;
        const auto [source, row] = peer_row(index);
        if (!is_ll_source(source) || row >= rows_of(source)) continue;
        if (!receive_chunk<kUnaligned>(source, row, places().range_at(tile - index * chunks_))) return;
      }
    const RowBatches batches(static_cast<uint32_t>(rows) * peers, max_batch_rows(), warp, call_.has_many_tokens());
    const auto next_tile = [&] {
      return warp.count + call_.take_tile(group_.state->receive_tiles_taken, batches.count + warp.joining);
    };
#pragma unroll 1
    for (int64_t tile = warp.index >= 0 ? warp.index : next_tile(); tile < batches.count; tile = next_tile())
      if (!receive_batch(pipeline, batches.first_row(tile), batches.first_row(tile + 1))) break;
    pipeline.finish();
  }

  // One warp stores what concerns all rows.
  __device__ void report() const {
    int64_t dropped = 0;
    int32_t most_rows = 0;
#pragma unroll 1
    for (int first = 0; first < call_.num_ranks(); first += kWarp) {
      const int source = first + lane();
      const LlPacket16& counts = first == 0 ? low_counts_ : high_counts_;
      const int32_t rows = rows_of_own_lane(first);
      if (source >= call_.num_ranks()) continue;
      plan_.source_rows[source] = rows;
      store_integer(args_.counts, args_.counts_are_64, source, rows);
      dropped += counts.values[1];
      most_rows = max(most_rows, static_cast<int32_t>(counts.values[0]));
    }
#pragma unroll 1
    for (int distance = 1; distance < kWarp; distance *= 2)
      dropped += __shfl_xor_sync(~0u, dropped, distance);
    most_rows = static_cast<int32_t>(__reduce_max_sync(~0u, static_cast<unsigned>(most_rows)));
    if (lane() == 0) {
      store_header();
      if (dropped > 0)
        record_event(call_.context(), EPX_EVENT_TOO_FEW_ROWS, dropped, dropped, args_.rows_per_source, most_rows);
    }
    if (group_.context.checks_handle_mem) store_pad_records();
  }

private:
  // Returns the rows of a source that this rank keeps; the peer's number may be anything.
  __device__ int32_t rows_of_own_lane(int first) const {
    const int source = first + lane();
    if (source >= call_.num_ranks()) return 0;
    const auto sent = static_cast<int32_t>((first == 0 ? low_counts_ : high_counts_).values[0]);
    const int32_t kept = min(sent, static_cast<int32_t>(args_.slots_per_source)); // M is larger only where no source can be
    return max(0, is_ll_source(source) ? min(kept, call_.descriptors().num_tokens[source]) : kept);
  }
  // `source` may differ by lane; all lanes call this.
  __device__ int32_t rows_of(int source) const {
    const int32_t low = from_lane(rows_of_own_lane(0), source % kWarp);
    if (call_.num_ranks() <= kWarp) return low;
    const int32_t high = from_lane(rows_of_own_lane(kWarp), source % kWarp);
    return source < kWarp ? low : high;
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

  // A receiver's tile on the high-throughput path is a batch of rows, whose ready flags and routes it loads at the same time,
  // since each is a chain of dependent loads. Where receivers have few rows, a batch is one row.
  struct RowBatches {
    uint32_t num_rows;
    uint32_t batch_rows;
    int64_t count;

    // In tests `all` gives each batch as many rows as fit.
    __device__ RowBatches(uint32_t rows, int max_batch_rows, const WarpAssignment& warp, bool all) : num_rows(rows) {
      constexpr uint32_t kBatchesPerWarp = 2;
      const auto warps = static_cast<uint32_t>(warp.count + warp.joining);
      const auto most = static_cast<uint32_t>(max_batch_rows);
      batch_rows = all ? most : min(most, max(rows / (kBatchesPerWarp * warps), 1u));
      count = (rows + batch_rows - 1) / batch_rows;
    }
    __device__ uint32_t first_row(int64_t batch) const { return min(static_cast<uint32_t>(batch) * batch_rows, num_rows); }
  };
  // Returns how many lanes receive the routes of a row; where K is larger, each takes several.
  __device__ int lanes_per_row() const {
    return args_.top_k >= kWarp ? kWarp : SlotBatch::room_for(args_.top_k);
  }
  __device__ int max_batch_rows() const {
    return kWarp / lanes_per_row();
  }

  // Returns false when the group has failed.
  template <bool kUnaligned>
  __device__ bool receive_chunk(int source, int32_t row, const ChunkRange& range) const {
    LlPacket16* const staged = places().staged_chunk(call_.rank(), source, row, range);
    IncomingLlChunk incoming(staged, range.bytes);
    if (!incoming.wait(call_, source)) return false;
    store_chunk<kUnaligned>(places().recv_data(range, recv_row(source, row)), range.bytes, incoming.get());
    if (call_.scribbles_staging()) scribble_chunk(staged);
    return range.chunk != 0 || receive_ll_routes(source, row);
  }
  // Returns false, in all lanes, when the group has failed.
  __device__ bool receive_ll_routes(int source, int32_t row) const {
    bool ok = true;
    uint64_t mask = 0;
    int32_t packed = 0; // of the lane's last route
#pragma unroll 1
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int k = first + lane();
      RankMajorRoute route{-1, 0.0f, 0, 0};
      if (k < args_.top_k && ok) {
        LlPacket8 packet{};
        ok = call_.wait_for_packet(staged_ll_route(call_.rank(), source, row, k), packet, source);
        packed = packet.value;
        route = unpack_ll_route(packed);
        if (ok && route.expert >= 0 && args_.recv_weights != nullptr)
          ok = receive_weight(call_, places().staged_weight(call_.rank(), source, row, k), source, route.weight);
        if (ok) store_route(source, row, k, route.expert, route.weight);
      }
      mask |= static_cast<uint64_t>(__ballot_sync(~0u, route.expert >= 0 ? 1 : 0)) << first;
    }
    if (__all_sync(~0u, ok ? 1 : 0) == 0) return false;
    if (lane() == 0) store_record(source, slot_of(source, row), unpack_ll_route(packed).partial_row, mask);
    return true;
  }

  // Receives the rows [first, end) of peer_row(). Returns false when the group has failed.
  __device__ bool receive_batch(TmaRowPipeline& pipeline, uint32_t first, uint32_t end) const {
    const int rank = call_.rank();
    const uint32_t index = first + static_cast<uint32_t>(lane() / lanes_per_row());
    PeerRow own = index < end ? peer_row(index) : PeerRow{0, 0}; // the row whose routes this lane receives
    const bool has_row = own.row < rows_of(own.source) && index < end && !is_ll_source(own.source);
    bool ok = true;
    if (has_row && lane() % lanes_per_row() == 0)
      ok = call_.wait_ready(ready_flag_at(rank, own.source, own.row), own.source);
    if (__all_sync(~0u, ok ? 1 : 0) == 0) return false;
    __syncwarp(); // all lanes see what the first lane of a row has acquired: a vote orders no memory
    if (!has_row) own.source = -1;
    const bool copies_rows = call_.descriptors().rows_allocation[rank] < 0;
    if (copies_rows || args_.sidecar_bytes > 0)
      for_each_row(own, [&](int source, int32_t row) {
        const int32_t slot = slot_of(source, row);
        const int64_t to = recv_row(source, row);
        if (copies_rows)
          begin_copy_row_to_destinations(pipeline, staged_row(rank, slot), row_bytes_,
                                         lane() == 0 ? args_.recv_tokens + to * row_bytes_ : nullptr);
        if (args_.sidecar_bytes > 0)
          copy_row_to_destinations(staged_sidecar(rank, slot), args_.sidecar_bytes,
                                   lane() == 0 ? args_.recv_sidecar + to * args_.sidecar_bytes : nullptr);
      });
    receive_routes(own);
    if (call_.scribbles_staging()) {
      pipeline.finish();
      for_each_row(own, [&](int source, int32_t row) { scribble(slot_of(source, row)); });
    }
    return true;
  }
  // Calls take(source, row) for each row of a batch, of which each lane passes its own; source -1: none.
  template <typename Take>
  __device__ void for_each_row(const PeerRow& own, const Take& take) const {
#pragma unroll 1
    for (int from = 0; from < kWarp; from += lanes_per_row())
      if (const int source = from_lane(own.source, from); source >= 0) take(source, from_lane(own.row, from));
  }
  __device__ void scribble(int32_t slot) const {
    const int rank = call_.rank();
    scribble_row(staged_row(rank, slot), row_bytes_);
    scribble_row(staged_sidecar(rank, slot), args_.sidecar_bytes);
    scribble_row(reinterpret_cast<std::byte*>(staged_routes(rank, slot)),
                 args_.top_k * static_cast<int64_t>(sizeof(RankMajorRoute)));
  }
  // The lanes of each row of a batch receive its routes.
  __device__ void receive_routes(const PeerRow& own) const {
    const int lanes = lanes_per_row();
    const int first_lane = lane() / lanes * lanes;
    const bool has_row = own.source >= 0;
    const int32_t slot = has_row ? slot_of(own.source, own.row) : 0;
    const RankMajorRoute* const routes = staged_routes(call_.rank(), slot);
    uint64_t mask = 0;
    int32_t partial_row = 0; // of the first lane, which has a route each time
#pragma unroll 1
    for (int first = 0; first < args_.top_k; first += lanes) {
      const int k = first + lane() - first_lane;
      RankMajorRoute route{-1, 0.0f, 0, 0};
      if (has_row && k < args_.top_k) {
        route = routes[k];
        store_route(own.source, own.row, k, route.expert, route.weight);
      }
      const unsigned here = __ballot_sync(~0u, route.expert >= 0 ? 1 : 0) >> first_lane;
      mask |= static_cast<uint64_t>(lanes < kWarp ? here & ((1u << lanes) - 1) : here) << first;
      partial_row = route.partial_row;
    }
    if (has_row && lane() == first_lane) store_record(own.source, slot, partial_row, mask);
  }

  // EPX_CHECK_HANDLE_MEM sums up the records of all slots, so those without a row need contents. One warp stores them.
  __device__ void store_pad_records() const {
    const auto slots = static_cast<int32_t>(args_.slots_per_source);
#pragma unroll 1
    for (int source = 0; source < call_.num_ranks(); ++source)
#pragma unroll 1
      for (int32_t row = rows_of(source) + lane(); row < slots; row += kWarp) {
        plan_.slot_records[slot_of(source, row)] = kPadRecord;
        if (args_.top_k > 1) plan_.masks(args_.num_slots(group_.context.shape))[slot_of(source, row)] = {0, 0, 0};
      }
  }

  LlPacket16 low_counts_{}, high_counts_{}; // of the sources `lane` and 32 + `lane`
};

} // namespace epx::cuda
