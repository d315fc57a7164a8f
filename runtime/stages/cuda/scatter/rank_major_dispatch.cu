// SPDX-License-Identifier: Apache-2.0
// dispatch_rank_major: each token goes once to each rank that it has a route to, at the row that is the number of earlier
// tokens of this rank that go there. One kernel makes the plan and moves the rows; no rank waits for another one before it
// sends, but for the entry barrier. The plan has the form that the movements take (runtime/layout/rank_major.h), so that these
// serve the other calls of the rank-major layout.
//
// This is the high-throughput path, for more rows than the staging of the low-latency path has places for (takes_ll_path);
// ll_rank_major_dispatch.cu has the other one.
//
//   step     warps    do                                                          wait for
//   assign   all      give the tokens of the block's range their rows, and        the counts of the blocks
//                     signal this part of the plan where senders have many
//                     tokens; the last sending block stores how many there are
//                     for each rank on that rank's exchange board
//                     (row_assignment.cuh)
//   entry    all      the entry barrier
//   routes   all but  send the routes and weights of the block's tokens to the    nothing; of compact rows the
//            send     ranks that these go to, as LL packets into staging; those   counts of all ranks
//                     of this rank's own rows go into the outputs. With one rank
//                     all warps send rows, and do this first
//   send     send     store each row once to each rank that it goes to, into      a free cell of the signal warp;
//                     its place there when the receive rows lie in an             the part of the plan that has
//                     allocation of the group, else into staging; scales of       the token
//                     rows that have them into staging
//   signal   signal   store ready flags for the send warps of their CTA           the CTA's pending flags
//                     (signal_warp.cuh)
//   receive  receive  store a peer's rows, routes and weights into the outputs,   the peer's counts; then the rows' ready
//                     and the plan into the handle memory; send and signal warps  flags and their routes
//                     do so when nothing is left to send or to signal
//   report   one      store the counts, the header and what was dropped           the counts of all ranks
//
// Compact rows (EPX_ROWS_COMPACT) always go into staging at a peer. A rank knows where its own rows lie once it has the counts of
// the ranks below it, for which its warps wait behind the entry barrier. No rank's counts wait for anything but its own blocks.
//
// A row and its ready flag are ordered as in scatter.cu.
#include "runtime/stages/cuda/kernels.h"

#include "base/device/launch.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/protocol/plan_parts.cuh"
#include "runtime/stages/cuda/rows/row_sender.cuh"
#include "runtime/stages/cuda/scatter/ll_rank_major_dispatch.cuh"
#include "runtime/stages/cuda/scatter/rank_major_receiver.cuh"
#include "runtime/stages/cuda/scatter/row_assignment.cuh"

namespace epx::cuda {
namespace {

// The work of one block. What it needs of shared memory before the entry barrier lies in that of the TMA row pipelines, which
// are made behind it.
template <typename Format, bool kCompact>
class RankMajorDispatch : public RankMajorReceiver<Format, kCompact> {
  using Receiver = RankMajorReceiver<Format, kCompact>;
  using Sender = RowSender<Format>;
  using Receiver::args_, Receiver::call_, Receiver::group_, Receiver::params_, Receiver::plan_, Receiver::row_bytes_,
      Receiver::staging_;
  using Receiver::format, Receiver::is_in_place, Receiver::own_recv_row, Receiver::rank_in_order, Receiver::recv_row_at,
      Receiver::row_of, Receiver::store_counts, Receiver::store_record, Receiver::store_route, Receiver::weight_of_route;

  struct Range {
    uint32_t begin, end;
  };

public:
  __device__ RankMajorDispatch(const RankMajorParams& params, CallSession& call)
      : Receiver(params, call), tokens_(part_of(static_cast<uint32_t>(args_.num_tokens))) {}

  // Returns whether the blocks send each other's tokens: when senders have more than two each.
  __device__ bool shares_tokens() const {
    constexpr int64_t kManyTokens = 2; // of each sender
    const int64_t senders = int64_t{num_sending_blocks()} * senders_of_block();
    return args_.num_tokens > kManyTokens * senders || call_.forces_many_tokens();
  }

  // Gives the tokens of the block's range their rows, and tells the receivers how many there are. All threads of the block call
  // this before the entry barrier, behind which alone pipelines may use the shared memory. Returns false, in all threads, when the
  // group has failed.
  __device__ bool assign_rows() const {
    static_assert(sizeof(RowAssignmentShared) <=
                  (kMovementWarps - 1) * TmaRowPipeline::kStagesBytes); // then cells of signals
    if (static_cast<int>(blockIdx.x) >= num_sending_blocks()) return true;
    RowAssignmentShared& shared = *dynamic_shared_memory<RowAssignmentShared>();
    const RowAssignment assignment(args_, params_.experts, call_.num_ranks(), shared);
    assignment.clear();
    __syncthreads();
    assignment.count(tokens_.begin, tokens_.end);
    __syncthreads();
    if (!assignment.share(group_, call_)) return false;
    assignment.assign(tokens_.begin, tokens_.end, call_.rank(), [&](uint32_t token, int k, const Route& route) {
      plan_.routes[route_index(token, args_.top_k, k)] = route;
    });
    if (!is_last_sending_block()) return true;
    if (threadIdx.x == 0) report_bad_indices(call_.context(), args_, shared.bad);
    publish_counts(assignment, shared);
    return true;
  }

  // ---- Behind the entry barrier ----

  // The signal warp clears its cells before the barrier.
  __device__ SignalWarp signal_warp() const {
    return signal_warp_of(params_.role_counts, lanes_of_peers(call_.num_ranks()));
  }

  // Tells each rank that keeps a token of the block's range which of its experts the routes go to. Those warps of the block call
  // this that do not send, so that rows leave at once; all of them where all send. Each takes several tokens at a time.
  __device__ void send_routes() const {
    if (tokens_.begin == tokens_.end) return;
    const auto tokens = static_cast<uint32_t>(kWarp / RouteLanes(args_.top_k).count());
    const int senders = senders_of_block() < kMovementWarps ? senders_of_block() : 0;
    const auto warp = static_cast<uint32_t>(static_cast<int>(threadIdx.x) / kWarp - senders);
    const auto warps = static_cast<uint32_t>(kMovementWarps - senders);
#pragma unroll 1
    for (uint32_t first = tokens_.begin + warp * tokens; first < tokens_.end; first += warps * tokens)
      send_routes_of(first, min(first + tokens, tokens_.end));
  }

  // What a sender does. Where senders have several tokens each, they take them in ascending order from one counter, whichever
  // block has assigned their rows: a warp that gets more of the wire sends more of them, and rows are ready about in the order
  // in which receivers take them. Where they have few, each block sends its own, and waits for no other block's rows.
  // `has_begun`: false when the group has failed.
  __device__ void send(TmaRowPipeline& pipeline, const WorkPartition& partition, bool has_begun) const {
    Sender sender(pipeline, params_.role_counts, lanes_of_peers(call_.num_ranks()), format());
    const bool shares = shares_tokens();
    const uint32_t end = shares ? static_cast<uint32_t>(args_.num_tokens) : tokens_.end;
    uint32_t token = shares ? static_cast<uint32_t>(partition.index) : tokens_.begin + threadIdx.x / kWarp;
#pragma unroll 1
    while (token < end && has_begun) {
      if (shares && !wait_for_row(token)) break; // the group has failed; the signal warp still waits for this sender
      const PerRoute<Route> routes = routes_of(token);
      const uint32_t next = shares ? static_cast<uint32_t>(partition.count) +
                                         static_cast<uint32_t>(call_.take_tile(group_.state->send_tiles_taken, end))
                                   : token + static_cast<uint32_t>(senders_of_block()); // while the routes are in flight
      send_row_of(sender, token, routes);
      token = next;
    }
    sender.close();
  }

private:
  // ---- The block's part of the tokens ----

  __device__ int num_sending_blocks() const {
    return call_.num_ranks() == 1 ? static_cast<int>(gridDim.x) : params_.role_counts.sender_blocks;
  }
  __device__ bool is_last_sending_block() const {
    return static_cast<int>(blockIdx.x) == num_sending_blocks() - 1;
  }
  // The first blocks have a token more than the others. A GPU takes long to divide 64 bits, so 32 are divided here.
  __device__ Range part_of(uint32_t tokens) const {
    const auto blocks = static_cast<uint32_t>(num_sending_blocks());
    if (blockIdx.x >= blocks) return {tokens, tokens};
    const uint32_t size = tokens / blocks, larger = tokens - size * blocks;
    const uint32_t begin = size * blockIdx.x + min(blockIdx.x, larger);
    return {begin, begin + size + (blockIdx.x < larger ? 1 : 0)};
  }
  // Returns the block whose part a token belongs to.
  __device__ int block_of(uint32_t token) const {
    const auto tokens = static_cast<uint32_t>(args_.num_tokens), blocks = static_cast<uint32_t>(num_sending_blocks());
    const uint32_t size = tokens / blocks, larger = tokens - size * blocks;
    const uint32_t in_larger = larger * (size + 1); // tokens of the larger parts
    return static_cast<int>(token < in_larger ? token / (size + 1) : larger + (token - in_larger) / size);
  }
  __device__ int senders_of_block() const {
    return call_.num_ranks() == 1 ? kMovementWarps : params_.role_counts.sender_warps;
  }
  // Waits until the block whose part the token belongs to has assigned its rows. Returns false when the group has failed.
  __device__ bool wait_for_row(uint32_t token) const {
    const int block = block_of(token);
    return wait_for_plan_parts(group_, call_, block, block + 1);
  }

  // The lanes load the routes [K] of a token.
  __device__ PerRoute<Route> routes_of(int64_t token) const {
    const Route* const routes = plan_.routes + route_index(token, args_.top_k, 0);
    const auto route = [&](int k) { return k < args_.top_k ? routes[k] : Route{-1, -1, 0}; };
    return {route(lane()), route(lane() + kWarp)};
  }

  __device__ void publish_counts(const RowAssignment& assignment, const RowAssignmentShared& shared) const {
    const auto rank = static_cast<int>(threadIdx.x);
    const bool is_rank = rank < call_.num_ranks();
    // Only the tiles of this block have counted dropped routes. If there are any, the block walks all tokens for their number.
    if (__syncthreads_or(is_rank && shared.rows[rank] > args_.rows_per_source ? 1 : 0) != 0 && tokens_.begin > 0) {
      assignment.clear();
      __syncthreads();
      assignment.assign(0, tokens_.end, call_.rank(), [](uint32_t, int, const Route&) {});
    }
    if (is_rank) store_counts(rank, shared.rows[rank], shared.dropped[rank]);
  }

  // ---- Sending ----

  // The RouteLanes of each of the tokens [first, end) send its routes.
  __device__ void send_routes_of(uint32_t first, uint32_t end) const {
    call_.delay();
    const RouteLanes lanes(args_.top_k);
    const uint32_t token = first + static_cast<uint32_t>(lanes.index());
    const int own_k = token < end ? lanes.own_k() : args_.top_k;
    const auto load = [&](int k) {
      if (k >= args_.top_k) return TokenRoute{{-1, -1, 0}, -1, 0.0f};
      const int64_t index = route_index(token, args_.top_k, k);
      return TokenRoute{plan_.routes[index], static_cast<int32_t>(index_at(args_, index)), weight_of_route(index)};
    };
    const PerRoute<TokenRoute> routes{load(own_k), load(own_k + kWarp)};
#pragma unroll 1
    for (int i = 0; i < call_.num_ranks(); ++i) {
      const int rank = rank_in_order(first, i);
      const uint64_t mask = lanes.mask_of(routes, [&](const TokenRoute& own) { return own.route.rank == rank; });
      const int first_k = mask != 0 ? lowest_bit(mask) : 0;
      const Route& of_first = first_k < kWarp ? routes.low.route : routes.high.route;
      const int32_t slot = from_lane(of_first.slot, lanes.first() + first_k % kWarp);
      const int32_t rank_ordinal = from_lane(of_first.rank_ordinal, lanes.first() + first_k % kWarp);
      if (mask == 0) continue;
      const auto partial_row =
          static_cast<int32_t>(partial_staging_row(group_.context.shape, token, args_.top_k, rank_ordinal));
      send_route(rank, slot, own_k, routes.low, partial_row);
      send_route(rank, slot, own_k + kWarp, routes.high, partial_row);
      if (rank == call_.rank() && own_k == 0) store_record(rank, slot, partial_row, mask);
    }
  }
  struct TokenRoute {
    Route route;
    int32_t expert;
    float weight;
  };
  // One lane sends what a rank gets for route k of a token, which has the slot there.
  __device__ void send_route(int rank, int32_t slot, int k, const TokenRoute& own, int32_t partial_row) const {
    if (k >= args_.top_k) return;
    const bool goes_there = own.route.rank == rank;
    const int32_t expert = goes_there ? own.expert - params_.experts.first_expert(rank) : -1;
    const float weight = goes_there ? own.weight : 0.0f;
    if (rank == call_.rank())
      store_route(own_recv_row(row_of(rank, slot)), k, expert, weight);
    else
      store_packet_relaxed_sys(staging_.routes(rank, slot, args_.top_k) + k,
                               RankMajorRoute{expert, weight, partial_row, call_.epoch()});
  }

  __device__ void send_row_of(Sender& sender, uint32_t token, const PerRoute<Route>& routes) const {
    const uint64_t firsts = routes.mask_of([](const Route& route) { return route.slot >= 0; });
#pragma unroll 1
    for (int first = 0; first < call_.num_ranks(); first += kWarp) { // each lane has one rank
      const int rank = first + lane() < call_.num_ranks() ? rank_in_order(token, first + lane()) : -1;
      int32_t slot = -1;
#pragma unroll 1
      for (uint64_t left = firsts; left != 0; left &= left - 1) {
        const int k = lowest_bit(left);
        const int32_t kept_slot = from_lane(routes.own(k).slot, k % kWarp);
        if (from_lane(routes.own(k).rank, k % kWarp) == rank) slot = kept_slot;
      }
      if (__any_sync(~0u, slot >= 0 ? 1 : 0) != 0) send_row(sender, token, rank, slot);
    }
  }
  // Each lane passes a rank and the token's slot there, or -1.
  __device__ void send_row(Sender& sender, uint32_t token, int rank, int32_t slot) const {
    SendPlaces to;
    if (slot >= 0) {
      const int32_t number = row_of(call_.rank(), slot);
      const int64_t row = own_recv_row(number); // here, and at peers that take rows in place
      if (rank == call_.rank()) {
        to = {{recv_row_at(row), nullptr, row}, args_.recv_sidecar + row * args_.sidecar_bytes, nullptr};
      } else {
        std::byte* const staged = staging_.row(rank, slot);
        to = {{is_in_place(rank) ? recv_row_at(row, registered_rows(group_, call_, rank)) : staged, staged},
              staging_.sidecar(rank, slot),
              staging_.ready_flag(rank, call_.rank(), number)};
      }
    }
    sender.send({args_.tokens, row_bytes_, args_.sidecar, args_.sidecar_bytes}, token, to);
  }

  Range tokens_; // the block's part
};

template <typename Format, bool kCompact>
__device__ __forceinline__ void dispatch_rank_major(const RankMajorParams& params) {
  CallSession call(params.group, EPX_OP_DISPATCH_RANK_MAJOR);
  RankMajorDispatch<Format, kCompact> dispatch(params, call);
  if (blockIdx.x == 0) call.post(params.descriptor, 0);
  if (!call.begin()) return;
  if (!dispatch.assign_rows()) return;
  if (dispatch.shares_tokens()) signal_plan_part(params.group, call);

  const bool is_single = params.group.context.shape.num_ranks == 1;
  WarpAssignment warp{partition_warps(0, kMovementWarps, 0, static_cast<int>(gridDim.x)), WarpRole::send};
  int report_warp = kMovementWarps - 1;
  if (!is_single) {
    warp = assign_warp_role(params.role_counts, params.group.context.shape.num_ranks);
    report_warp = params.role_counts.sender_warps; // it neither sends nor signals
    if (warp.role == WarpRole::signal) dispatch.signal_warp().clear();
  }
  if (!call.enter_begun(params.descriptor)) return;

  bool has_begun = true;
  if constexpr (kCompact) {
    dispatch.load_counts();
    has_begun = dispatch.wait_for_counts();
  }
  if (has_begun && (is_single || warp.role != WarpRole::send)) dispatch.send_routes();
  TmaRowPipeline pipeline = pipeline_of_warp();
  if (warp.role == WarpRole::send) dispatch.send(pipeline, warp, has_begun);
  if (warp.role == WarpRole::signal) {
    dispatch.signal_warp().run(call);
    if (lane() == 0) call.sent(static_cast<unsigned>(warp.count));
  }
  if (!is_single && (warp.role == WarpRole::send || warp.role == WarpRole::signal))
    warp = join_receivers(params.role_counts);
  const bool reports = blockIdx.x == 0 && static_cast<int>(threadIdx.x) / kWarp == report_warp;
  if (warp.role != WarpRole::receive && !reports) return;
  if constexpr (!kCompact) {
    dispatch.load_counts();
    has_begun = dispatch.wait_for_counts();
  }
  if (!has_begun) return;
  if (reports) {
    dispatch.report_plan();
    dispatch.report_counts();
  }
  if (warp.role == WarpRole::receive) dispatch.receive(pipeline, warp);
}

template <typename Format, bool kCompact>
__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    rank_major_kernel(const __grid_constant__ RankMajorParams params) {
  pdl_wait(params);
  dispatch_rank_major<Format, kCompact>(params);
  leave(params.group);
}

} // namespace

std::vector<const void*> rank_major_kernels() {
  std::vector<const void*> kernels = ll_rank_major_kernels();
  kernels.push_back(reinterpret_cast<const void*>(&rank_major_kernel<PlainRows, false>));
  kernels.push_back(reinterpret_cast<const void*>(&rank_major_kernel<QuantisedRows, false>));
  kernels.push_back(reinterpret_cast<const void*>(&rank_major_kernel<PlainRows, true>));
  kernels.push_back(reinterpret_cast<const void*>(&rank_major_kernel<QuantisedRows, true>));
  return kernels;
}

cudaError_t launch_dispatch_rank_major(const Launcher& launcher, const DispatchRankMajorCall& call) {
  const GroupShape& shape = launcher.group.context.shape;
  const auto [grid, role_counts] =
      launcher.plan.next_scatter(call.num_tokens, row_bytes(call.dtype, call.hidden), 1, sender_work_of(call, true),
                                 ReceiverWork::routes, launcher.stream);
  // Peers do not know where a rank's compact rows lie.
  const CallDescriptor descriptor =
      describe(call, call.is_compact ? kNotRegistered : launcher.place_of(call, call.recv_tokens));
  const RankMajorParams params{make_movement_params(launcher.group, role_counts, call, descriptor), call,
                               ExpertRanks(ExpertBlocks{shape.num_experts, shape.num_ranks})};
  if (takes_ll_path(launcher.group, call)) return launch_ll_dispatch_rank_major(params, grid, launcher.stream);
  if (call.format.is_quantised())
    return launch_cooperative(call.is_compact ? &rank_major_kernel<QuantisedRows, true>
                                              : &rank_major_kernel<QuantisedRows, false>,
                              grid, launcher.stream, params);
  return launch_cooperative(call.is_compact ? &rank_major_kernel<PlainRows, true> : &rank_major_kernel<PlainRows, false>,
                            grid, launcher.stream, params);
}

} // namespace epx::cuda
