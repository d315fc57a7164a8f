// SPDX-License-Identifier: Apache-2.0
// dispatch_rank_major on the low-latency (LL) path. Rows and routes travel as LL packets into staging that is keyed by (source,
// row) and may be written at any time, so that nothing is sent behind the entry barrier. All warps do the same:
//
//   vote     each block learns by itself which ranks each token goes to, and so the rows of    barriers of the block
//            all tokens; the last one stores how many there are for each rank on that
//            rank's exchange board
//   send     store a chunk of a token, or its routes and weights, into the staging of each     nothing
//            peer that the token goes to; what stays here, into the outputs
//   receive  store a chunk of a peer's row, or its routes and weights, into the outputs        the entry barrier; the peer's
//                                                                                              counts; the LL packets
//   report   one warp stores the counts, the header and what was dropped                       the counts of all ranks
//
// A warp begins to load what it handles first before it waits: its first chunk to send before the votes, its first one to receive
// and the counts before the entry barrier.
#include "runtime/stages/cuda/rank_major/ll_dispatch_rank_major.cuh"

#include <cmath>

#include "base/device/launch.h"
#include "runtime/stages/cuda/rank_major/rank_major_counts.cuh"
#include "runtime/stages/cuda/rows/ll_row.cuh"
#include "runtime/stages/cuda/scatter/ll_dispatch_rows.cuh"

namespace epx::cuda {
namespace {

constexpr uint32_t kVoteTokens = kMovementWarps * kWarp; // tokens whose votes a block has at a time

struct LlRankMajorShared {
  PeerDescriptors descriptors[kMovementWarps]; // each warp passes the entry barrier by itself
  // Bit t % 32 of votes[rank][t / 32] says whether token t goes to the rank. The lanes of a warp read those of 32 ranks.
  uint32_t votes[kMaxDeviceRanks][kVoteTokens / kWarp + 1];
  int32_t rows_before[kMaxDeviceRanks]; // by rank: rows of the tokens before
  int32_t dropped[kMaxDeviceRanks];     // by rank: routes whose row is at or above M; of the last block
  BadRouteTotals bad;                   // of the last block
};

static_assert(sizeof(LlRankMajorShared) <=
              kMovementWarps * TmaRowPipeline::kStagesBytes); // movement_shared_bytes() and more

// A value for each rank: each lane holds that of rank `lane` in `low` and that of rank 32 + `lane` in `high`.
template <typename T>
using PerRank = PerRoute<T>;

template <bool kUnaligned>
class LlRankMajorDispatch : public RankMajorRowCounts {
  using ChunkRange = LlDispatchPlaces::ChunkRange;

public:
  __device__ explicit LlRankMajorDispatch(const RankMajorParams& params)
      : RankMajorRowCounts(params), shared_(*dynamic_shared_memory<LlRankMajorShared>()), places_(group_, call_, args_),
        partition_(partition_warps(0, kMovementWarps, 0, static_cast<int>(gridDim.x))) {}

  // All threads of the block call this before the entry barrier. Returns false, the same in all threads, when another call of
  // this rank is in progress; the group has then failed.
  __device__ bool send() {
    const auto tokens = static_cast<uint32_t>(args_.num_tokens);
    auto tile = static_cast<uint32_t>(partition_.index);
    LlChunk chunk = load_tile(tile);
    uint32_t first = 0, end = min(tokens, kVoteTokens);
    vote(first, end);
    if (!call_.begin_ll()) return false; // its barrier is also the one behind the votes
    while (true) {
      if (is_last_block()) {
        count_dropped(first, end);
        if (end == tokens && reports()) publish_counts();
      }
#pragma unroll 1
      for (; tile < end * parts(); tile += static_cast<uint32_t>(partition_.count)) {
        const LlChunk to_send = chunk;
        chunk = load_tile(tile + static_cast<uint32_t>(partition_.count));
        send_tile(tile, first, to_send);
      }
      if (end == tokens) break;
      first = end;
      end = min(tokens, first + kVoteTokens);
      __syncthreads(); // all warps have used the votes
      vote(first, end);
      __syncthreads();
    }
    call_.sent_by_warp(kMovementWarps);
    return true;
  }

  // The other half, which begins before the entry barrier.
  __device__ void receive() {
    load_counts();
    uint32_t rows = static_cast<uint32_t>(args_.slots_per_source); // of the peer that has the most; M before that is known
    bool has_entered = false;
#pragma unroll 1
    for (auto tile = static_cast<uint32_t>(partition_.rotated_index());; tile += static_cast<uint32_t>(partition_.count)) {
      const uint32_t index = tile / parts();
      const uint32_t part = tile - index * parts();
      if (index >= rows * static_cast<uint32_t>(call_.num_ranks() - 1)) break;
      const auto [source, row] = peer_row(index);
      const ChunkRange range = places_.range_at(part);
      LlPacket16* const staged = places_.staged_chunk(call_.rank(), source, row, range);
      IncomingLlChunk incoming(staged, part < places_.num_chunks() ? range.bytes : 0);
      if (!has_entered) {
        if (!enter()) return;
        has_entered = true;
        rows = static_cast<uint32_t>(most_rows_of_peers());
      }
      if (row >= rows_of(source)) continue;
      if (part == places_.num_chunks()) {
        if (!receive_routes(source, row)) return;
        continue;
      }
      if (!incoming.wait(call_, source)) return;
      store_chunk<kUnaligned>(places_.recv_data(range, recv_row(source, row)), range.bytes, incoming.get());
      if (call_.scribbles_staging()) scribble_chunk(staged);
    }
    if (!reports()) return;
    if (has_entered || enter()) report(); // the kernel must not end before the entry barrier
  }

private:
  // ---- The block's part ----

  // A tile is a part of a token of this rank, or of a row of a peer: each chunk is one, and so are the routes.
  __device__ uint32_t parts() const {
    return places_.num_chunks() + 1;
  }
  __device__ bool is_last_block() const {
    return blockIdx.x == gridDim.x - 1;
  }
  // Returns whether this is the warp that stores what concerns the whole call.
  __device__ bool reports() const {
    return is_last_block() && static_cast<int>(threadIdx.x) / kWarp == kMovementWarps - 1;
  }
  __device__ bool enter() {
    return call_.enter_warp(params_.descriptor, shared_.descriptors[threadIdx.x / kWarp]) && wait_for_counts();
  }

  // ---- Votes ----

  // Learns which ranks the tokens [first, end) go to. All threads of the block call this; a barrier must follow.
  __device__ void vote(uint32_t first, uint32_t end) const {
    const auto top_k = static_cast<uint32_t>(args_.top_k);
    const uint32_t begin_route = first * top_k;
    const uint32_t routes = (end - first) * top_k;
    constexpr uint32_t kAhead = 4; // routes of each thread that are loaded before the barrier
    int64_t ahead[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i)
      if (const uint32_t route = threadIdx.x + i * kMovementThreads; route < routes)
        ahead[i] = index_of_route(begin_route + route);
    add_batch_before(first);
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i)
      if (const uint32_t route = threadIdx.x + i * kMovementThreads; route < routes) vote_for(route, ahead[i], begin_route);
#pragma unroll 1
    for (uint32_t route = threadIdx.x + kAhead * kMovementThreads; route < routes; route += kMovementThreads)
      vote_for(route, index_of_route(begin_route + route), begin_route);
  }
  // Clears the votes, whose tokens are behind those of the next ones.
  __device__ void add_batch_before(uint32_t first) const {
    if (threadIdx.x >= kMaxDeviceRanks) return;
    const auto rank = static_cast<int>(threadIdx.x);
    if (first == 0) {
      shared_.rows_before[rank] = shared_.dropped[rank] = 0;
      if (rank == 0) shared_.bad = {0, 0};
    } else {
      shared_.rows_before[rank] += rows_of_votes(rank);
    }
    for (uint32_t& word : shared_.votes[rank])
      word = 0;
  }
  __device__ void vote_for(uint32_t route, int64_t index, uint32_t begin_route) const {
    const uint32_t token = route / static_cast<uint32_t>(args_.top_k);
    if (is_expert(index)) {
      atomicOr(&shared_.votes[rank_of(index)][token / kWarp], 1u << token % kWarp);
    } else if (index != -1 && is_last_block()) {
      atomicAdd(&shared_.bad.number, 1);
      atomicMax(&shared_.bad.first_inverted, ~(begin_route + route));
    }
  }
  __device__ bool is_expert(int64_t index) const {
    return index >= 0 && index < params_.experts.blocks.num_experts;
  }
  __device__ int rank_of(int64_t index) const {
    return params_.experts.rank_of(static_cast<int>(index));
  }

  __device__ int32_t rows_of_votes(int rank) const {
    int32_t rows = 0;
    for (const uint32_t word : shared_.votes[rank])
      rows += __popc(word);
    return rows;
  }
  // Returns the row of a token on a rank, below M or not; -1: it does not go there. `token` counts from the first one of the votes.
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
      return rank < call_.num_ranks() && shared_.rows_before[rank] + rows_of_votes(rank) > args_.rows_per_source;
    };
    if (__any_sync(~0u, has_dropped(lane()) || has_dropped(kWarp + lane()) ? 1 : 0) == 0) return; // the same in all warps
    const auto top_k = static_cast<uint32_t>(args_.top_k);
#pragma unroll 1
    for (uint32_t route = first * top_k + threadIdx.x; route < end * top_k; route += kMovementThreads) {
      const int64_t index = index_of_route(route);
      if (is_expert(index) && row_on(rank_of(index), route / top_k - first) >= args_.rows_per_source)
        atomicAdd(&shared_.dropped[rank_of(index)], 1);
    }
    __syncthreads();
  }
  // One warp calls this when the votes of the last tokens are there.
  __device__ void publish_counts() const {
#pragma unroll 1
    for (int rank = lane(); rank < call_.num_ranks(); rank += kWarp) {
      const int32_t rows = shared_.rows_before[rank] + rows_of_votes(rank);
      store_packet_relaxed_sys(
          board_at(rank, call_.rank()),
          LlPacket16{{static_cast<uint32_t>(rows), static_cast<uint32_t>(shared_.dropped[rank]), 0}, call_.epoch()});
    }
    if (lane() == 0 && shared_.bad.number > 0) report_bad_routes(shared_.bad);
  }

  // ---- Sending ----

  // The chunk of a tile to send; nothing if it has none.
  __device__ LlChunk load_tile(uint32_t tile) const {
    const uint32_t token = tile / parts();
    const uint32_t part = tile - token * parts();
    if (token >= args_.num_tokens || part == places_.num_chunks()) return {};
    const ChunkRange range = places_.range_at(part);
    return load_chunk<kUnaligned>(places_.token_data(range, token), range.bytes);
  }
  __device__ void send_tile(uint32_t tile, uint32_t first, const LlChunk& chunk) const {
    const uint32_t token = tile / parts();
    const uint32_t part = tile - token * parts();
    const PerRank<int32_t> rows = kept_rows(token - first);
    RankMask own_ranks;
    if (rows.low >= 0) own_ranks.set(lane());
    if (rows.high >= 0) own_ranks.set(kWarp + lane());
    const RankMask ranks = RankMask::from_bits(or_of_lanes(own_ranks.bits()));
    if (part == places_.num_chunks()) {
      send_routes(token, rows, ranks);
      return;
    }
    const ChunkRange range = places_.range_at(part);
#pragma unroll 1
    for (int i = 0; i < call_.num_ranks(); ++i) {
      const int rank = rank_in_order(token, i);
      if (!ranks.contains(rank)) continue;
      const int32_t row = rows[rank];
      if (rank == call_.rank())
        store_chunk<kUnaligned>(places_.recv_data(range, recv_row(rank, row)), range.bytes, chunk);
      else
        send_chunk(places_.staged_chunk(rank, call_.rank(), row, range), range.bytes, chunk, call_.epoch());
    }
  }

  // Tells each rank that keeps the token which of its experts the routes go to, and stores the routes into the plan.
  __device__ void send_routes(uint32_t token, const PerRank<int32_t>& rows, RankMask kept) const {
    const auto expert_of = [&](int k) {
      const int64_t index = k < args_.top_k ? index_of_route(route_index(token, args_.top_k, k)) : -1;
      return is_expert(index) ? static_cast<int>(index) : -1;
    };
    const auto rank_of_expert = [&](int expert) { return expert >= 0 ? rank_of(expert) : -1; };
    const auto weight_of = [&](int k) {
      return k < args_.top_k ? weight_of_route(route_index(token, args_.top_k, k)) : 0.0f;
    };
    const PerRoute<int> experts{expert_of(lane()), expert_of(kWarp + lane())};
    const PerRoute<int> ranks{rank_of_expert(experts.low), rank_of_expert(experts.high)};
    const PerRoute<float> weights{weight_of(lane()), weight_of(kWarp + lane())};
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int rank = ranks.own(first);
      if (first + lane() < args_.top_k && (rank < 0 || !kept.contains(rank)))
        plan_.routes[route_index(token, args_.top_k, first + lane())] = {-1, -1, 0};
    }
#pragma unroll 1
    for (RankMask left = kept; !left.is_empty(); left.remove_lowest()) {
      const int rank = left.lowest();
      const int32_t row = rows[rank];
      const int32_t slot = slot_of(call_.rank(), row);
      const int32_t rank_ordinal = kept.count_below(rank);
      const auto partial_row =
          static_cast<int32_t>(partial_staging_row(group_.context.shape, token, args_.top_k, rank_ordinal));
      const uint64_t mask = ranks.mask_of([&](int of_route) { return of_route == rank; });
      const int first_expert = params_.experts.blocks.first_expert(rank);
#pragma unroll 1
      for (int first = 0; first < args_.top_k; first += kWarp) {
        const int k = first + lane();
        if (k >= args_.top_k) continue;
        const bool goes_there = ranks.own(first) == rank;
        const RankMajorRoute route{goes_there ? experts.own(first) - first_expert : -1,
                                   goes_there ? weights.own(first) : 0.0f, partial_row, call_.epoch()};
        if (goes_there)
          plan_.routes[route_index(token, args_.top_k, k)] = {k == lowest_bit(mask) ? slot : merged_slot(slot), rank,
                                                              rank_ordinal};
        if (rank == call_.rank())
          store_route(rank, row, k, route.expert, route.weight);
        else
          store_packet_relaxed_sys(staged_route(rank, call_.rank(), row, k), route);
      }
      if (rank == call_.rank() && lane() == 0) store_record(rank, slot, partial_row, mask);
    }
  }

  // ---- Receiving ----

  __device__ RankMajorRoute* staged_route(int receiver, int source, int32_t row, int k) const {
    return group_.window().at<RankMajorRoute>(receiver, layout_.ll_rank_major_routes.offset) +
           ll_scatter_weight(layout_, group_.context.shape, call_.parity(), source, row, k);
  }
  // Returns false, in all lanes, when the group has failed.
  __device__ bool receive_routes(int source, int32_t row) const {
    bool ok = true;
    uint64_t mask = 0;
    int32_t partial_row = 0; // of the lane's last route
#pragma unroll 1
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int k = first + lane();
      RankMajorRoute route{-1, 0.0f, 0, 0};
      if (k < args_.top_k && ok) {
        RankMajorRoute* const staged = staged_route(call_.rank(), source, row, k);
        ok = call_.wait_for_packet(staged, route, source);
        partial_row = route.partial_row;
        if (ok) store_route(source, row, k, route.expert, route.weight);
        if (call_.scribbles_staging()) *staged = {0x5a5a, NAN, 0x5a5a, 0};
      }
      mask |= static_cast<uint64_t>(__ballot_sync(~0u, route.expert >= 0 ? 1 : 0)) << first;
    }
    if (__all_sync(~0u, ok ? 1 : 0) == 0) return false;
    if (lane() == 0) store_record(source, slot_of(source, row), partial_row, mask);
    return true;
  }

  LlRankMajorShared& shared_;
  LlDispatchPlaces places_;
  WorkPartition partition_;
};

template <bool kUnaligned>
__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    ll_rank_major_kernel(const __grid_constant__ RankMajorParams params) {
  pdl_wait(params);
  LlRankMajorDispatch<kUnaligned> dispatch(params);
  if (blockIdx.x == 0) dispatch.call().post(params.descriptor, 0);
  if (dispatch.send()) dispatch.receive();
  leave(params.group);
}

} // namespace

std::vector<const void*> ll_rank_major_kernels() {
  return {reinterpret_cast<const void*>(&ll_rank_major_kernel<false>),
          reinterpret_cast<const void*>(&ll_rank_major_kernel<true>)};
}

cudaError_t launch_ll_dispatch_rank_major(const RankMajorParams& params, const Grid& grid, cudaStream_t stream) {
  const auto kernel = has_unaligned_rows(params.args) ? &ll_rank_major_kernel<true> : &ll_rank_major_kernel<false>;
  return launch_cooperative(kernel, grid, stream, params);
}

} // namespace epx::cuda
