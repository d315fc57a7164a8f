// SPDX-License-Identifier: Apache-2.0
// What the receivers of dispatch_rank_major do on the high-throughput path: they store the peers' rows, routes and weights into
// the outputs, and the plan into the handle memory.
#pragma once

#include "runtime/stages/cuda/rows/row_format.cuh"
#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"
#include "runtime/stages/cuda/scatter/rank_major_counts.cuh"

namespace epx::cuda {

// Behind the entry barrier; each warp has one.
template <typename Format, bool kCompact>
class RankMajorReceiver : public RankMajorRowCounts<kCompact> {
  using Counts = RankMajorRowCounts<kCompact>;

protected:
  using Counts::args_, Counts::call_, Counts::group_, Counts::row_bytes_, Counts::staging_;
  using Counts::most_rows_of_peers, Counts::peer_row, Counts::recv_row, Counts::rows_of, Counts::slot_of,
      Counts::store_routes;
  using typename Counts::PeerRow;

public:
  using Counts::Counts;

  // Stores the peers' rows into the outputs, and their records into the plan.
  __device__ void receive(TmaRowPipeline& pipeline, const WarpAssignment& warp) const {
    const auto rows = static_cast<uint32_t>(most_rows_of_peers()) * static_cast<uint32_t>(call_.num_ranks() - 1);
    const RowBatches batches(rows, max_batch_rows(), warp, call_.forces_many_tokens());
    const auto next_tile = [&] {
      return warp.count + call_.take_tile(group_.state->receive_tiles_taken, batches.count + warp.joining);
    };
#pragma unroll 1
    for (int64_t tile = warp.index >= 0 ? warp.index : next_tile(); tile < batches.count; tile = next_tile())
      if (!receive_batch(pipeline, batches.first_row(tile), batches.first_row(tile + 1))) break;
    pipeline.finish();
  }

protected:
  __device__ Format format() const {
    return Format(args_);
  }
  __device__ std::byte* recv_row_at(int64_t row) const {
    return recv_row_at(row, args_.recv_tokens);
  }
  // The same of a peer whose receive rows are at `rows`.
  __device__ std::byte* recv_row_at(int64_t row, std::byte* rows) const {
    return rows + row * (Format::kIsReceiveFormat ? row_bytes_ : epx::row_bytes(args_.recv_dtype, args_.hidden));
  }
  // Returns whether a rank's rows are stored in place.
  __device__ bool is_in_place(int rank) const {
    return format().sends_in_place() && has_registered_rows(call_, rank);
  }

private:
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
  __device__ int max_batch_rows() const {
    return kWarp / RouteLanes(args_.top_k).count();
  }

  // Receives the rows [first, end) of peer_row(). Returns false when the group has failed.
  __device__ bool receive_batch(TmaRowPipeline& pipeline, uint32_t first, uint32_t end) const {
    const int rank = call_.rank();
    const RouteLanes lanes(args_.top_k);
    const uint32_t index = first + static_cast<uint32_t>(lanes.index());
    PeerRow own = index < end ? peer_row(index) : PeerRow{0, 0}; // the row whose routes this lane receives
    const bool has_row = own.row < rows_of(own.source) && index < end;
    if (!has_row) own.source = -1;
    IncomingRoutes routes(staging_.routes(rank, has_row ? slot_of(own.source, own.row) : 0, args_.top_k),
                          has_row ? args_.top_k : 0, lanes);
    bool ok = true;
    if (has_row && lanes.own_k() == 0) ok = call_.wait_ready(staging_.ready_flag(rank, own.source, own.row), own.source);
    if (__all_sync(~0u, ok ? 1 : 0) == 0) return false;
    __syncwarp(); // all lanes see what the first lane of a row has acquired: a vote orders no memory
    if (!routes.wait(call_, own.source)) return false;
    store_routes(routes, own.source, own.row, recv_row(own.source, own.row));
    const bool in_place = is_in_place(rank);
    const bool receives_rows = !in_place || !Format::kIsReceiveFormat;
    if (receives_rows || args_.sidecar_bytes > 0)
      for_each_row(own, [&](int source, int32_t row) {
        const int32_t slot = slot_of(source, row);
        const int64_t to = recv_row(source, row);
        if (receives_rows) {
          const std::byte* const staged = staging_.row(rank, slot);
          std::byte* const received = recv_row_at(to);
          format().begin_receive(pipeline, {in_place ? received : staged, staged}, row_bytes_, lane() == 0 ? to : -1,
                                 lane() == 0 && !in_place ? received : nullptr);
        }
        if (args_.sidecar_bytes > 0)
          copy_row_to_destinations(staging_.sidecar(rank, slot), args_.sidecar_bytes,
                                   lane() == 0 ? args_.recv_sidecar + to * args_.sidecar_bytes : nullptr);
      });
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
    for (int from = 0; from < kWarp; from += RouteLanes(args_.top_k).count())
      if (const int source = from_lane(own.source, from); source >= 0) take(source, from_lane(own.row, from));
  }
  __device__ void scribble(int32_t slot) const {
    const int rank = call_.rank();
    scribble_row(staging_.row(rank, slot),
                 Format::kIsReceiveFormat ? row_bytes_ : WireRow(args_.format, args_.hidden).bytes);
    scribble_row(staging_.sidecar(rank, slot), args_.sidecar_bytes);
  }
};

} // namespace epx::cuda
