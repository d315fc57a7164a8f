// SPDX-License-Identifier: Apache-2.0
// dispatch_rank_major on the low-latency (LL) path. Rows travel as LL lines, and routes as LL packets, into staging that is
// keyed by (source, row) and may be written at any time, so that nothing is sent behind the entry barrier. All warps do the
// same, unless there are many tiles: then some of them send, and the others receive from the beginning (LlWorkPartition):
//
//   vote     each block that sends, and the last one, learns by itself which ranks each token   barriers of the block
//            goes to, and so the rows of all tokens; the last one stores how many there are
//            for each rank on that rank's exchange board
//   send     store a chunk of a token, or its routes and weights, into the staging of each     nothing
//            peer that the token goes to; what stays here, into the outputs
//   receive  store a chunk of a peer's row, or its routes and weights, into the outputs        the peer's counts; the LL lines,
//                                                                                              packets
//   report   one warp stores the counts, the header and what was dropped                       the entry barrier; the counts
//
// Compact rows (EPX_ROWS_COMPACT) that stay here go through staging too, as those of a peer: the outputs take them when the counts
// of the ranks below this one are there.
//
// A rank that has stored its counts has begun the call, so that one warp alone passes the entry barrier, where it checks that
// the ranks agree.
//
// Such a call takes as long as its instructions, which are fetched into a cold instruction cache, and the loads that wait for
// each other. So a warp begins to load its first chunk or weights before the votes, and a thread its first indices before the
// barrier that comes before them.
#include "runtime/stages/cuda/scatter/ll_rank_major_dispatch.cuh"

#include <cmath>

#include "base/device/launch.h"
#include "runtime/stages/cuda/rows/ll_row.cuh"
#include "runtime/stages/cuda/rows/ll_rows.cuh"
#include "runtime/stages/cuda/rows/row_format.cuh"
#include "runtime/stages/cuda/scatter/rank_major_counts.cuh"

namespace epx::cuda {
namespace {

constexpr uint32_t kVoteTokens = kMovementWarps * kWarp; // tokens whose votes a block has at a time

struct LlRankMajorShared {
  PeerDescriptors descriptors; // of the warp that reports
  // Bit t % 32 of votes[rank][t / 32] says whether token t goes to the rank. The lanes of a warp read the same word of 32
  // ranks; one more word for each rank puts these into different banks.
  uint32_t votes[kMaxDeviceRanks][kVoteTokens / kWarp + 1];
  int32_t rows_before[kMaxDeviceRanks]; // by rank: rows of the tokens before
  int32_t dropped[kMaxDeviceRanks];     // by rank: routes whose row is at or above M; of the last block
  BadIndices bad;                       // of the last block
};

static_assert(sizeof(LlRankMajorShared) <= kLlScratchOffset);

template <typename Chunks, bool kCompact>
class LlRankMajorDispatch : public RankMajorRowCounts<kCompact> {
  using Counts = RankMajorRowCounts<kCompact>;
  using Counts::args_, Counts::call_, Counts::group_, Counts::params_, Counts::plan_;
  using Counts::load_counts, Counts::most_rows, Counts::most_rows_of_peers, Counts::peer_row, Counts::rank_in_order,
      Counts::recv_row, Counts::report_counts, Counts::report_plan, Counts::rows_of, Counts::slot_of, Counts::store_counts,
      Counts::store_record, Counts::store_route, Counts::store_routes, Counts::wait_for_counts, Counts::weight_of_route;
  using typename Counts::PeerRow;

  // A tile is a part of a row: each chunk is one, and so are the routes, which come last.
  struct Tile {
    uint32_t row; // a token of this rank, or an index for peer_row()
    uint32_t part;
  };
  // What a warp needs to send a tile.
  struct TileData {
    LlChunk chunk;
    PerRoute<float> weights;
  };

public:
  __device__ LlRankMajorDispatch(const RankMajorParams& params, CallSession& call)
      : Counts(params, call), shared_(*dynamic_shared_memory<LlRankMajorShared>()),
        rows_(group_, call_, args_, ll_scratch_of_warp()), ll_staging_(group_, call_.parity()),
        partition_(call_, kMovementWarps, 0, call_.num_ranks() > 1 ? tiles_to_send() : 0, params.role_counts.ll_senders) {}

  // All threads of the block call this before the entry barrier. Returns false, the same in all threads, when another call of
  // this rank is in progress; the group has then failed.
  __device__ bool send() {
    const auto tokens = static_cast<uint32_t>(args_.num_tokens);
    LlTilesToSend tiles = partition_.to_send(call_, tiles_to_send());
    Tile tile = tile_at(tiles.tile());
    TileData data = load(tile);
#pragma unroll 1
    for (uint32_t first = 0;;) {
      const uint32_t end = min(tokens, first + kVoteTokens);
      if (partition_.block_sends() || is_last_block()) vote(first, end); // no others need them
      if (first > 0)
        __syncthreads();
      else if (!call_.begin_ll()) // its barrier is also the one behind the votes
        return false;
      if (is_last_block()) {
        count_dropped(first, end);
        if (end == tokens && is_warp(kPublishWarp)) publish_counts(end - first);
      }
#pragma unroll 1
      while (tile.row < end) {
        tiles.begin_next();
        send_tile(tile, first, data);
        tiles.finish_next();
        tile = tile_at(tiles.tile());
        data = load(tile);
      }
      if (end == tokens) break;
      first = end;
      __syncthreads(); // all warps have used the votes
    }
    call_.sent_by_warp(kMovementWarps);
    return true;
  }

  // Each warp calls this after send().
  __device__ void receive() {
    bool has_counts = is_last_block() && is_warp(kReportWarp);
    if (has_counts && !report()) return;
    uint32_t rows = has_counts ? most_rows_to_receive() : static_cast<uint32_t>(args_.slots_per_source);
    const auto sources = static_cast<uint32_t>(kCompact ? call_.num_ranks() : call_.num_ranks() - 1);
    const auto tiles = partition_.to_receive_late(rows * sources * parts_of_row(), tiles_to_send() * sources);
#pragma unroll 1
    for (uint32_t index = tiles.first; index < tiles.end; index += tiles.step) {
      const Tile tile = tile_at(index);
      if (tile.row >= rows * sources) return;
      if (!has_counts) {
        load_counts();
        if (!wait_for_counts()) return;
        rows = most_rows_to_receive();
        has_counts = true;
      }
      const auto [source, row] = row_to_receive(tile.row);
      if (row >= rows_of(source)) continue;
      ChunkRange range = rows_.range_at(tile.part);
      if (!has_chunk(tile)) range.bytes = 0;
      IncomingLlChunk chunk = rows_.incoming(source, row, range);
      IncomingRoutes routes(ll_staging_.routes(call_.rank(), source, row), has_chunk(tile) ? 0 : args_.top_k,
                            RouteLanes(kWarp));
      if (!(has_chunk(tile) ? receive_chunk(source, row, range, chunk) : receive_routes(source, row, routes))) return;
    }
  }

private:
  // ---- The block's part ----

  // Warps of the last block that do something beside their tiles. The last warp of a block is not among them, since it waits
  // for an atomic in begin_ll().
  static constexpr int kPublishWarp = kMovementWarps - 3, kReportWarp = kMovementWarps - 2;
  __device__ static bool is_last_block() {
    return blockIdx.x == gridDim.x - 1;
  }
  __device__ static bool is_warp(int warp) {
    return static_cast<int>(threadIdx.x) / kWarp == warp;
  }
  __device__ uint32_t parts_of_row() const {
    return rows_.num_chunks() + 1;
  }
  __device__ uint32_t tiles_to_send() const {
    return static_cast<uint32_t>(args_.num_tokens) * parts_of_row();
  }
  __device__ Tile tile_at(uint32_t index) const {
    const uint32_t parts = parts_of_row();
    const uint32_t row = index / parts;
    return {row, index - row * parts};
  }
  __device__ bool has_chunk(const Tile& tile) const {
    return tile.part < rows_.num_chunks();
  }
  // One warp passes the entry barrier, before which no kernel ends, and reports. Returns false when the group has failed.
  __device__ bool report() {
    if (!call_.enter_warp(params_.descriptor, CallSession::Fields::all, shared_.descriptors)) return false;
    load_counts();
    report_plan();
    if (!wait_for_counts()) return false;
    report_counts();
    return true;
  }

  // ---- Votes ----

  // Learns which ranks the tokens [first, end) go to. All threads of the block call this; a barrier must follow. The first
  // indices are loaded before the barrier in between.
  __device__ void vote(uint32_t first, uint32_t end) const {
    const auto top_k = static_cast<uint32_t>(args_.top_k);
    const uint32_t begin_route = first * top_k;
    const uint32_t routes = (end - first) * top_k;
    IndexBatch batch = load_indices(threadIdx.x, routes, begin_route);
    clear_votes(first);
    __syncthreads();
#pragma unroll 1
    for (uint32_t from = threadIdx.x; from < routes;) {
#pragma unroll
      for (uint32_t i = 0; i < IndexBatch::kSize; ++i)
        if (const uint32_t route = from + i * kMovementThreads; route < routes)
          vote_for(route, batch.indices[i], begin_route);
      from += IndexBatch::kSize * kMovementThreads;
      batch = load_indices(from, routes, begin_route);
    }
  }
  // Indices that a thread loads at a time, of every kMovementThreads-th route.
  struct IndexBatch {
    static constexpr uint32_t kSize = 4;
    int64_t indices[kSize];
  };
  __device__ IndexBatch load_indices(uint32_t from, uint32_t routes, uint32_t begin_route) const {
    IndexBatch batch{};
#pragma unroll
    for (uint32_t i = 0; i < IndexBatch::kSize; ++i)
      if (const uint32_t route = from + i * kMovementThreads; route < routes)
        batch.indices[i] = index_at(args_, begin_route + route);
    return batch;
  }
  // The votes that are there are of the tokens before `first`: their sums go to rows_before before they are cleared.
  __device__ void clear_votes(uint32_t first) const {
    if (threadIdx.x >= kMaxDeviceRanks) return;
    const auto rank = static_cast<int>(threadIdx.x);
    if (first == 0) {
      shared_.rows_before[rank] = shared_.dropped[rank] = 0;
      if (rank == 0) shared_.bad = {0, 0};
    } else {
      shared_.rows_before[rank] += votes_for(rank, kVoteTokens);
    }
    for (uint32_t& word : shared_.votes[rank])
      word = 0;
  }
  __device__ void vote_for(uint32_t route, int64_t index, uint32_t begin_route) const {
    const uint32_t token = route / static_cast<uint32_t>(args_.top_k);
    if (is_expert(index)) {
      atomicOr(&shared_.votes[rank_of(index)][token / kWarp], 1u << token % kWarp);
    } else if (index != -1 && is_last_block()) {
      count_bad_index(shared_.bad, begin_route + route);
    }
  }
  __device__ bool is_expert(int64_t index) const {
    return index >= 0 && index < params_.experts.blocks.num_experts;
  }
  __device__ int rank_of(int64_t index) const {
    return params_.experts.rank_of(static_cast<int>(index));
  }

  // The votes of the first `tokens` tokens.
  __device__ int32_t votes_for(int rank, uint32_t tokens) const {
    int32_t votes = 0;
#pragma unroll 1
    for (uint32_t word = 0; word * kWarp < tokens; ++word)
      votes += __popc(shared_.votes[rank][word]);
    return votes;
  }
  // Returns the row of a token on a rank, below M or not; -1: it does not go there. `token` counts from the first one of the
  // votes.
  __device__ int32_t row_on(int rank, uint32_t token) const {
    const uint32_t* const votes = shared_.votes[rank];
    const uint32_t word = votes[token / kWarp];
    if ((word >> token % kWarp & 1) == 0) return -1;
    int32_t row = shared_.rows_before[rank] + __popc(word & ((1u << token % kWarp) - 1));
#pragma unroll 1
    for (uint32_t before = 0; before < token / kWarp; ++before)
      row += __popc(votes[before]);
    return row;
  }
  // The rows of a token that are kept; -1: none on the rank.
  __device__ PerRank<int32_t> kept_rows(uint32_t token) const {
    const auto kept_row = [&](int rank) {
      const int32_t row = rank < call_.num_ranks() ? row_on(rank, token) : -1;
      return row < args_.rows_per_source ? row : -1;
    };
    return {kept_row(lane()), call_.num_ranks() > kWarp ? kept_row(kWarp + lane()) : -1};
  }

  // All threads of the last block call this.
  __device__ void count_dropped(uint32_t first, uint32_t end) const {
    const auto has_dropped = [&](int rank) {
      return rank < call_.num_ranks() && shared_.rows_before[rank] + votes_for(rank, end - first) > args_.rows_per_source;
    };
    if (__any_sync(~0u, has_dropped(lane()) || has_dropped(kWarp + lane()) ? 1 : 0) == 0) return; // the same in all warps
    const auto top_k = static_cast<uint32_t>(args_.top_k);
#pragma unroll 1
    for (uint32_t route = first * top_k + threadIdx.x; route < end * top_k; route += kMovementThreads) {
      const int64_t index = index_at(args_, route);
      if (is_expert(index) && row_on(rank_of(index), route / top_k - first) >= args_.rows_per_source)
        atomicAdd(&shared_.dropped[rank_of(index)], 1);
    }
    __syncthreads();
  }
  // One warp calls this when the votes of the last `tokens` tokens are there.
  __device__ void publish_counts(uint32_t tokens) const {
#pragma unroll 1
    for (int rank = lane(); rank < call_.num_ranks(); rank += kWarp)
      store_counts(rank, shared_.rows_before[rank] + votes_for(rank, tokens), shared_.dropped[rank]);
    if (lane() == 0) report_bad_indices(call_.context(), args_, shared_.bad);
  }

  // ---- Sending ----

  // Begins to load what a tile sends; nothing when it is beyond the last token.
  __device__ TileData load(const Tile& tile) const {
    TileData data{};
    if (tile.row >= args_.num_tokens) return data;
    if (has_chunk(tile)) {
      data.chunk = rows_.load(tile.row, rows_.range_at(tile.part));
    } else {
      const int64_t first = route_index(tile.row, args_.top_k, 0);
      if (lane() < args_.top_k) data.weights.low = weight_of_route(first + lane());
      if (kWarp + lane() < args_.top_k) data.weights.high = weight_of_route(first + kWarp + lane());
    }
    return data;
  }
  __device__ void send_tile(const Tile& tile, uint32_t first, const TileData& data) const {
    const PerRank<int32_t> rows = kept_rows(tile.row - first);
    RankMask own_ranks;
    if (rows.low >= 0) own_ranks.set(lane());
    if (rows.high >= 0) own_ranks.set(kWarp + lane());
    const RankMask kept = RankMask::from_bits(or_of_lanes(own_ranks.bits()));
    if (has_chunk(tile))
      send_chunk_of(tile, rows, kept, data.chunk);
    else
      send_routes(tile.row, rows, kept, data.weights);
  }
  // Calls take(rank, row) for each rank that keeps the token.
  template <typename Take>
  __device__ void for_each_destination(uint32_t token, const PerRank<int32_t>& rows, RankMask kept,
                                       const Take& take) const {
#pragma unroll 1
    for (int i = 0; i < call_.num_ranks(); ++i)
      if (const int rank = rank_in_order(token, i); kept.contains(rank)) take(rank, rows[rank]);
  }
  __device__ void send_chunk_of(const Tile& tile, const PerRank<int32_t>& rows, RankMask kept, const LlChunk& chunk) const {
    const ChunkRange range = rows_.range_at(tile.part);
    rows_.send(tile.row, range, kept, chunk, [&](int peer) { return rows[peer]; });
    if (const int rank = call_.rank(); kept.contains(rank)) {
      if constexpr (kCompact)
        rows_.send_to(rank, rows[rank], range, chunk);
      else
        rows_.store(recv_row(rank, rows[rank]), range, chunk);
    }
  }

  // Returns whether what goes to a rank is stored into the outputs by its sender: what stays here, unless it is compact.
  __device__ bool stores_at_once(int rank) const {
    return !kCompact && rank == call_.rank();
  }

  // Sends each rank that keeps the token the experts that its routes go to there, and stores the routes into the plan.
  __device__ void send_routes(uint32_t token, const PerRank<int32_t>& rows, RankMask kept,
                              const PerRoute<float>& weights) const {
    const auto top_k = args_.top_k;
    const int64_t first_route = route_index(token, top_k, 0);
    const auto expert_of = [&](int k) {
      const int64_t index = k < top_k ? index_at(args_, first_route + k) : -1;
      return is_expert(index) ? static_cast<int>(index) : -1;
    };
    const auto rank_of_expert = [&](int expert) { return expert >= 0 ? rank_of(expert) : -1; };
    const PerRoute<int> experts{expert_of(lane()), top_k > kWarp ? expert_of(kWarp + lane()) : -1};
    const PerRoute<int> ranks{rank_of_expert(experts.low), rank_of_expert(experts.high)};
    const auto first_partial_row = static_cast<int32_t>(partial_staging_row(group_.context.shape, token, top_k, 0));
    for_each_destination(token, rows, kept, [&](int rank, int32_t row) {
      const int32_t slot = slot_of(call_.rank(), row);
      const int32_t rank_ordinal = kept.count_below(rank);
      const int first_expert = params_.experts.first_expert(rank);
      const uint64_t mask = ranks.mask_of([&](int of_route) { return of_route == rank; });
#pragma unroll 1
      for (int first = 0; first < top_k; first += kWarp) {
        const int k = first + lane();
        if (k >= top_k) continue;
        const bool goes_there = ranks.own(first) == rank;
        const RankMajorRoute route{goes_there ? experts.own(first) - first_expert : -1,
                                   goes_there ? weights.own(first) : 0.0f, first_partial_row + rank_ordinal, call_.epoch()};
        if (stores_at_once(rank))
          store_route(recv_row(rank, row), k, route.expert, route.weight);
        else
          store_packet_relaxed_sys(ll_staging_.routes(rank, call_.rank(), row) + k, route);
        if (goes_there) plan_.routes[first_route + k] = {encode_slot(slot, k == lowest_bit(mask)), rank, rank_ordinal};
      }
      if (stores_at_once(rank) && lane() == 0) store_record(rank, slot, first_partial_row + rank_ordinal, mask);
    });
    for (int first = 0; first < top_k; first += kWarp)
      if (const int rank = ranks.own(first); first + lane() < top_k && (rank < 0 || !kept.contains(rank)))
        plan_.routes[first_route + first + lane()] = {-1, -1, 0};
  }

  // ---- Receiving ----

  // The rows of the peers and, where they are compact, of this rank too, are numbered as by peer_row().
  __device__ PeerRow row_to_receive(uint32_t index) const {
    if constexpr (!kCompact) return peer_row(index);
    const auto ranks = static_cast<uint32_t>(call_.num_ranks());
    const uint32_t row = index / ranks;
    return {rank_in_order(row, static_cast<int>(index - row * ranks)), static_cast<int32_t>(row)};
  }
  __device__ uint32_t most_rows_to_receive() const {
    return static_cast<uint32_t>(kCompact ? most_rows() : most_rows_of_peers());
  }

  // These return false, in all lanes, when the group has failed.
  __device__ bool receive_chunk(int source, int32_t row, const ChunkRange& range, IncomingLlChunk& incoming) const {
    const int64_t to = recv_row(source, row);
    return rows_.receive(incoming, source, row, range, [&](const LlChunk& chunk) { rows_.store(to, range, chunk); });
  }
  __device__ bool receive_routes(int source, int32_t row, IncomingRoutes& incoming) const {
    if (!incoming.wait(call_, source)) return false;
    store_routes(incoming, source, row, recv_row(source, row));
    return true;
  }

  LlRankMajorShared& shared_;
  LlRows<Chunks> rows_;
  LlScatterStaging ll_staging_;
  LlWorkPartition partition_;
};

template <typename Chunks, bool kCompact>
__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    ll_rank_major_kernel(const __grid_constant__ RankMajorParams params) {
  pdl_wait(params);
  CallSession call(params.group, EPX_OP_DISPATCH_RANK_MAJOR);
  if (blockIdx.x == 0) call.post(params.descriptor, 0);
  LlRankMajorDispatch<Chunks, kCompact> dispatch(params, call);
  if (dispatch.send()) dispatch.receive();
  leave(params.group);
}

template <typename Format>
auto kernel_of(bool is_unaligned, bool is_compact) {
  using Aligned = typename Format::template LlChunks<false>;
  using Unaligned = typename Format::template LlChunks<true>;
  if (is_compact) return is_unaligned ? &ll_rank_major_kernel<Unaligned, true> : &ll_rank_major_kernel<Aligned, true>;
  return is_unaligned ? &ll_rank_major_kernel<Unaligned, false> : &ll_rank_major_kernel<Aligned, false>;
}

} // namespace

std::vector<const void*> ll_rank_major_kernels() {
  std::vector<const void*> kernels;
  for (bool is_unaligned : {false, true})
    for (bool is_compact : {false, true}) {
      kernels.push_back(reinterpret_cast<const void*>(kernel_of<PlainRows>(is_unaligned, is_compact)));
      kernels.push_back(reinterpret_cast<const void*>(kernel_of<QuantisedRows>(is_unaligned, is_compact)));
    }
  return kernels;
}

cudaError_t launch_ll_dispatch_rank_major(const RankMajorParams& params, const Grid& grid, cudaStream_t stream) {
  const bool is_unaligned = has_unaligned_rows(params.args);
  const auto kernel = params.args.format.is_quantised() ? kernel_of<QuantisedRows>(is_unaligned, params.args.is_compact)
                                                        : kernel_of<PlainRows>(is_unaligned, params.args.is_compact);
  return launch_cooperative(kernel, grid, stream, params);
}

} // namespace epx::cuda
