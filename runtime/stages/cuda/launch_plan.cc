// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/cuda/launch_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/cuda.h"
#include "runtime/layout/window_layout.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/protocol/device_group.h"

namespace epx::cuda {
namespace {

// By default a group leaves so many SMs to kernels of other libraries: NCCL 2.28 gives a communicator of 4 H200 24 channels,
// each a CTA. There two communicators that reduce 16 MiB beside matrix products, each on a stream of its own and in another
// order on each rank, ended 1,000 times beside a grid of 84 of the 132 SMs, and hung beside 88, 96 and 100.
constexpr int kSmsLeftToOthers = 48;
constexpr int default_sms(int sms_of_gpu) {
  return std::max(sms_of_gpu - kSmsLeftToOthers, (sms_of_gpu + 1) / 2);
}

// prepare has one block per tile of routes, but at least so many, since all blocks write the outputs.
constexpr int kMinPrepareBlocks = 17;

// In a smaller grid every block of prepare_dispatch's kernel sends rows, prepares, and then receives rows.
constexpr int kMinSplitPrepareDispatchGrid = 8; // blocks

// Senders get SMs of their own where the grid is large enough, except in dispatch_rank_major: stores to peers that wait for the
// wire would delay the stores of receivers on the same SM. There are no more senders than fill the wire: the fewer rows are in
// flight at a time, the earlier the first ones arrive, and the less work is left to receivers when the last ones have arrived.
constexpr int kFullGrid = 128; // blocks
constexpr int kMaxSenderBlocks = 64;

// On 4 H200 (4096 tokens of 7168 bfloat16, top-8 of 256) dispatch took 476.1 us with 64 sender blocks of 6 warps and 473.9 with
// 64 of 4, with rows of 2016 elements 165.8 and 160.9, and with 512 tokens 80.6 and 78.4; with 2 warps the shorter rows took
// 166.6. combine of the rank-major layout, whose receivers sum, took 81.7 us with 6 warps and 512 tokens, 82.7 with 4.
//
// With fewer ranks there are fewer sender blocks: more rows stay on their rank, and the wire takes less of the time. dispatch
// on 2 H200 (4096 tokens of 7168 bfloat16, top-8 of 256) took 206 us with 32 sender blocks, 217 with 24. Each then has more
// sender warps: on 2 H100 combine_bwd of the rank-major layout took 178.0 us with 32 blocks of 12 warps and 182.4 with 32 of 6.
//
// In a smaller grid there are fewer sender blocks, so that most are left to receivers, which have more to do; each has 12
// sender warps. On 100 SMs of 2 H200 (11264 tokens, top-3) dispatch took 408 us with 32 blocks of 12 sender warps or 40 of 9,
// and combine_bwd 457; with 64 of 6 they took 409 and 621, and with senders and receivers in all blocks 456 and 694.
//
// In the smallest grids all blocks send and receive, and whoever has no more to send or to signal receives: on 16 SMs (4096
// tokens, top-8) that made combine_bwd with weights' gradients 1030 us instead of 1390, and without them 718 instead of 779.
constexpr int kSenderWarpsOfMixedBlock = 6, kMaxSenderWarps = 12; // of a block that also receives; of one that only sends
constexpr int kSendersOfFullGrid = 384, kSendersOfRowsOfFullGrid = 256; // warps
constexpr int kMinSplitGrid = 48; // blocks; in smaller grids every block of scatter has senders and receivers
static_assert(kMaxSenderWarps <= kMaxSendersPerSignalWarp);
WarpRoleCounts scatter_role_counts(int blocks, ReceiverWork receivers, int num_ranks) {
  const int sender_blocks = std::min(16 * num_ranks, kMaxSenderBlocks);
  if (blocks >= kFullGrid) {
    const bool fills_sender_blocks = sender_blocks == kMaxSenderBlocks;
    const int senders =
        fills_sender_blocks && receivers == ReceiverWork::rows ? kSendersOfRowsOfFullGrid : kSendersOfFullGrid;
    return {sender_blocks, std::min(senders / sender_blocks, kMaxSenderWarps), 1, false};
  }
  if (blocks >= kMinSplitGrid) return {std::min(sender_blocks, blocks / 3), kMaxSenderWarps, 1, false};
  return {blocks, kSenderWarpsOfMixedBlock, 1, true};
}

// The receivers of dispatch_rank_major take up routes alone where rows come in place, so that all blocks send, with as many
// warps as the wire has use for, which receive in the end. On 16 SMs of 2 H100 (4096 tokens of 7168 bfloat16, top-8) it took
// 294.5 us with 8 sender warps in each block, 232.4 with 12 and 215.1 with 14; on 84 SMs 201.7 with 12 in each of 28 blocks,
// 193.4 with 8 and 194.4 with 9 in each of all blocks. At least one warp of each block receives from the beginning.
constexpr int kSendersOfRankMajor = 768, kMaxSenderWarpsOfRankMajor = 14; // warps of the grid, of a block
static_assert(kMaxSenderWarpsOfRankMajor <= kMaxSendersPerSignalWarp &&
              kMaxSenderWarpsOfRankMajor + 2 <= kMovementThreads / 32);
WarpRoleCounts rank_major_role_counts(int blocks) {
  return {blocks, std::clamp(kSendersOfRankMajor / blocks, kSenderWarpsOfMixedBlock, kMaxSenderWarpsOfRankMajor), 1, true};
}

// Where gather has the whole GPU, senders get that part of the blocks which they have of all rows loaded and stored: of a token
// with experts everywhere alike, a rank sums the rows that its peers' tokens have here and stores one for each such token (in
// exact it stores every row), and as a receiver it sums the rows that its own tokens have here with those that the peers have
// sent. On 4 H200 (4096 tokens of 2016 bfloat16, top-8) combine took 180.0 us with 64 sender blocks, 166.8 with 80 and 167.7
// with 96.
//
// In a grid that leaves SMs to others they join the receivers in the end, so that no warp is left without work: on 84 SMs of 2
// H200 combine took 205.7 us (4096 tokens, top-8) and 420.1 (11264, top-3) instead of 218.8 and 443.2 with 10 senders in each
// block. Record 0014 in docs/decisions has more.
WarpRoleCounts gather_role_counts(int blocks, int warps, const GroupShape& shape, int top_k) {
  if (blocks < kFullGrid) return {std::max(blocks * 5 / 8, 1), warps, 0, true};
  const double peers = shape.num_ranks - 1;
  const double rows_of_token = static_cast<double>(top_k) / shape.num_ranks; // on a rank
  const double sent_of_token =
      shape.precision == EPX_COMBINE_EXACT ? rows_of_token : 1 - std::pow(peers / shape.num_ranks, top_k);
  const double senders = peers * (rows_of_token + sent_of_token);
  const double receivers = rows_of_token + peers * sent_of_token + 1;
  const int sender_blocks = static_cast<int>(std::lround(blocks * senders / (senders + receivers)));
  return {std::clamp(sender_blocks, 1, blocks - 1), warps, 0, false};
}

// Senders of the low-latency path. Since a sender stores tile after tile without a wait, few of them fill the wire; what more
// of them have stored queues up, and delays the loads of receivers, those of the same SM most of all. On 4 H200 (256 tokens of
// 7168 bfloat16, top-8 of 256) prepare_dispatch took 41.7 us with 16 or 20 sender blocks of 132, 43.9 with 30 and 51.5 with
// half of the warps of all blocks; on 2 H200 26.5 with 20, 31.6 with half of the blocks.
//
// Senders of dispatch and dispatch_rank_major also store the rows that stay on their rank, which are the more the fewer ranks
// there are, and a tile goes to fewer others: on 4 H200 dispatch_rank_major took 45.5 us with 16 sender blocks, 42.9 with 20,
// 43.6 with 30 and 47.0 with half of the warps of all blocks; on 2 H200 29.2 with 20, 23.4 with 60 and 24.5 with half of the
// warps.
//
// A sender of gather looks up and sums rows before it stores a tile, which goes to one rank: combine took 48.5 us with 44
// blocks, 46.2 with 50, 46.7 with 60, and 50.5 with half of the warps of all blocks. On 84 SMs it took 60.6 with 30 and 48.7
// with 42. combine_rank_major of 512 tokens, whose senders sum nothing, took 105.8 with 20, 80.3 with 28, 74.0 with 36 and 73.6
// with 50.
//
// In smaller grids receivers would miss those blocks: combine of 64 SMs took 57.2 us instead of 56.6, of 48 SMs 70.1 instead of
// 67.5, and dispatch of 32 SMs 68.6 instead of 67.3. Nor are there such blocks where one of their warps would have fewer
// tiles than the minimum below.
constexpr int kLlSenderBlocks = 20, kLlSenderBlocksOfOneCopy = 60, kMinLlScatterGrid = 40, kMinTilesOfLlScatterSender = 2;
constexpr int kLlGatherSenderBlocks = 50, kMinLlGatherGrid = 65, kMinTilesOfLlGatherSender = 4;
constexpr LlSenders ll_senders(int blocks, int sender_blocks, int min_grid, int min_tiles) {
  const auto senders = static_cast<uint32_t>(std::min(sender_blocks, blocks / 2));
  return {senders, blocks >= min_grid ? senders * kMovementThreads / 32 * static_cast<uint32_t>(min_tiles)
                                      : std::numeric_limits<uint32_t>::max()};
}
LlSenders ll_senders_of_prepare_dispatch(int blocks) {
  return ll_senders(blocks, kLlSenderBlocks, kMinLlScatterGrid, kMinTilesOfLlScatterSender);
}
LlSenders ll_scatter_senders(int blocks, const GroupShape& shape) {
  const int sender_blocks = std::max(kLlSenderBlocksOfOneCopy / max_copies_of_row(shape), 1);
  return ll_senders(blocks, sender_blocks, kMinLlScatterGrid, kMinTilesOfLlScatterSender);
}
LlSenders ll_gather_senders(int blocks) {
  return ll_senders(blocks, kLlGatherSenderBlocks, kMinLlGatherGrid, kMinTilesOfLlGatherSender);
}

struct Device {
  int num_sms;
  int max_shared_bytes; // per block
};

Device this_device() {
  int ordinal = 0;
  Device device{};
  check_cuda(cudaGetDevice(&ordinal), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&device.num_sms, cudaDevAttrMultiProcessorCount, ordinal), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&device.max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal),
             "cudaDeviceGetAttribute");
  return device;
}

// Loads a kernel: lazy loading behind a kernel that waits for a peer would never end. Returns the limit of dynamic shared
// memory per block; every group sets the same limit, since it belongs to the kernel and not to the group.
size_t load(const void* kernel, const Device& device) {
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  const size_t max_bytes = static_cast<size_t>(device.max_shared_bytes) - attributes.sharedSizeBytes;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(max_bytes)),
             "cudaFuncSetAttribute");
  // All kernels have the same shared memory carveout: a kernel that needs another one than the kernel before it waits until the
  // L1 cache is reconfigured.
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
             "cudaFuncSetAttribute");
  return max_bytes;
}

// Returns how many blocks of a kernel are resident on one SM at the same time.
int blocks_per_sm(const void* kernel, int threads, size_t shared_bytes) {
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks;
}

} // namespace

void load_kernels(std::span<const void* const> kernels) {
  const Device device = this_device();
  for (const void* kernel : kernels)
    load(kernel, device);
}

int LaunchPlan::resolve_num_sms(int num_comm_sms, int others) {
  static_assert(kMovementBlocksPerSm == 1); // so that only prepare's grid may have more blocks than the group has SMs
  const int sms_of_gpu = std::min(this_device().num_sms, kMaxGridBlocks);
  const int num_sms = num_comm_sms == 0 ? default_sms(sms_of_gpu) : std::min(num_comm_sms, sms_of_gpu);
  return std::max(num_sms - others, 1);
}

LaunchPlan::LaunchPlan(const GroupShape& shape, int64_t max_ll_tokens, int num_comm_sms)
    : shape_(shape), max_ll_tokens_(max_ll_tokens) {
  const Device device = this_device();
  num_sms_ = resolve_num_sms(num_comm_sms, 0);
  prepare_shared_bytes_ = prepare_shared_bytes(shape.num_experts);
  const size_t max_shared_bytes =
      std::min(load(prepare_kernel_address(false), device), load(prepare_kernel_address(true), device));
  if (prepare_shared_bytes_ > max_shared_bytes)
    fail(EPX_ERROR_UNSUPPORTED, "epx_group_config.num_experts is {}; on this GPU prepare has shared memory for {}",
         shape.num_experts,
         (max_shared_bytes - prepare_shared_bytes(0)) / (prepare_shared_bytes(1) - prepare_shared_bytes(0)));
  const int blocks = blocks_per_sm(prepare_kernel_address(true), prepare_threads(), prepare_shared_bytes_);
  prepare_blocks_ = std::min(kMaxPrepareBlocks, num_sms_ * blocks);
  prepare_dispatch_shared_bytes_ = cuda::prepare_dispatch_shared_bytes(shape.num_experts);
  if (const size_t max_bytes =
          std::min(load(prepare_dispatch_kernel_address(), device), load(ht_prepare_dispatch_kernel_address(), device));
      prepare_dispatch_shared_bytes_ > max_bytes)
    fail(EPX_ERROR_UNSUPPORTED,
         "epx_group_config.num_experts is {}; prepare_dispatch needs {} bytes of shared memory for them, and "
         "this GPU has {}",
         shape.num_experts, prepare_dispatch_shared_bytes_, max_bytes);
  prepare_dispatch_blocks_ =
      num_sms_ *
      std::min({kMovementBlocksPerSm,
                blocks_per_sm(prepare_dispatch_kernel_address(), kMovementThreads, prepare_dispatch_shared_bytes_),
                blocks_per_sm(ht_prepare_dispatch_kernel_address(), kMovementThreads, prepare_dispatch_shared_bytes_)});
  load(abort_kernel_address(), device);
  for (const void* kernel : checksum_kernels())
    load(kernel, device);
  const auto blocks_of_all = [&](const std::vector<const void*>& kernels, int threads = kMovementThreads,
                                 size_t shared_bytes = movement_shared_bytes()) {
    int per_sm = kMovementBlocksPerSm;
    for (const void* kernel : kernels) {
      load(kernel, device);
      per_sm = std::min(per_sm, blocks_per_sm(kernel, threads, shared_bytes));
    }
    return num_sms_ * per_sm;
  };
  static_assert(kMaxGridBlocks <= kMaxPlanBlocks);
  scatter_blocks_ = std::min(
      {blocks_of_all(scatter_kernels()), blocks_of_all(rank_major_kernels()), blocks_of_all(rank_major_gather_kernels())});
  gather_blocks_ =
      std::min(blocks_of_all(gather_kernels()),
               blocks_of_all(long_tile_gather_kernels(), kLongTileGatherThreads, long_tile_gather_shared_bytes()));
  if (prepare_blocks_ < 1 || prepare_dispatch_blocks_ < 1 || scatter_blocks_ < 1 || gather_blocks_ < 1)
    fail(EPX_ERROR_UNSUPPORTED, "this GPU cannot run a block of epx's kernels");
}

// With PDL a kernel may begin while the last blocks of the kernel before it still run, so both together must fit into the SMs
// of the group; blocks are counted as if each had an SM of its own. If a foreign kernel lies between the two on the stream, PDL
// depends on that kernel, which decides by itself when its dependent may begin.
Grid LaunchPlan::next(int blocks, int threads, size_t shared_bytes, cudaStream_t stream) {
  const bool pdl = blocks <= room_beside_last(stream);
  last_stream_ = stream;
  last_blocks_ = blocks;
  return {blocks, threads, shared_bytes, pdl};
}

int LaunchPlan::room_beside_last(cudaStream_t stream) const {
  return last_blocks_ > 0 && last_stream_ == stream ? num_sms_ - last_blocks_ : 0;
}

PrepareGrid LaunchPlan::next_prepare(int64_t routes, cudaStream_t stream) {
  const int64_t tiles = (routes + prepare_threads() - 1) / prepare_threads();
  const int blocks =
      static_cast<int>(std::clamp<int64_t>(tiles, std::min(kMinPrepareBlocks, prepare_blocks_), prepare_blocks_));
  return {next(blocks, prepare_threads(), prepare_shared_bytes_, stream), blocks > num_sms_};
}

// Where a group has a low-latency path, a call with so little data that at most half of the warps have an LL chunk, one each,
// gets less than half of the group's SMs, so that its kernel can be launched with PDL behind another one.
int LaunchPlan::movement_blocks(int64_t tokens, int64_t row_bytes, int max_blocks) const {
  if (max_ll_tokens_ == 0) return max_blocks;
  const int64_t chunks = tokens * ll_chunks_of(row_bytes) * std::max(shape_.num_ranks - 1, 1);
  const int small_grid = (num_sms_ - kMinPrepareBlocks) / 2;
  constexpr int kWarps = 8; // of a block's 16, with one chunk each
  return small_grid >= 1 && chunks <= int64_t{small_grid} * kWarps ? std::min(small_grid, max_blocks) : max_blocks;
}

PrepareDispatchGrid LaunchPlan::next_prepare_dispatch(int64_t tokens, int top_k, int64_t row_bytes, int pad_alignment,
                                                      cudaStream_t stream) {
  const int64_t tiles = (tokens * top_k + prepare_threads() - 1) / prepare_threads();
  const int max_blocks = prepare_dispatch_blocks_;
  if (max_blocks < kMinSplitPrepareDispatchGrid) // all blocks do both
    return {next(max_blocks, kMovementThreads, prepare_dispatch_shared_bytes_, stream),
            {static_cast<unsigned>(max_blocks), 0},
            {}};
  const int prepare = static_cast<int>(
      std::min<int64_t>(std::max<int64_t>(tiles, kMinPrepareBlocks), std::min(max_blocks / 4, prepare_blocks_)));
  int rows = max_blocks - prepare;
  if (pad_alignment <= 1) rows = movement_blocks(tokens, row_bytes, rows); // an aligned zone has many pads
  return {next(prepare + rows, kMovementThreads, prepare_dispatch_shared_bytes_, stream),
          {static_cast<unsigned>(prepare), static_cast<unsigned>(prepare)},
          ll_senders_of_prepare_dispatch(rows)};
}

// In a smaller grid the blocks that prepare would have to send, too, and the copies that rows in place spare would take longer
// than prepare: on 16 SMs of 4 H200 (4096 tokens of 7168 bfloat16, top-8) one kernel took 797 us, two take 623. On 84 SMs it
// takes 486 us instead of 494, and 512 tokens on 132 SMs 83 instead of 92.
//
// With two ranks local copies take more of the time than the wire, so that the copies of staged rows take longer than prepare
// where routes have many bytes. On 2 H200 (bfloat16, top-8) prepare_dispatch + combine of rows of 7168 elements took 143.7 us
// with one kernel and 153.8 with two for 1024 tokens, 231.1 and 230.4 for 2048, and 405.6 and 393.6 for 4096; prepare_dispatch
// of 4096 rows of 4096 elements 140.7 and 135.0, of 3696 elements 128.6 and 134.2, and with top-1 of 5120 elements 79.8 and
// 92.0.
bool LaunchPlan::has_ht_prepare_dispatch(int64_t route_bytes) const {
  constexpr int64_t kMaxRouteBytesOfTwoRanks = 250'000'000;
  return prepare_dispatch_blocks_ >= kMinSplitGrid && shape_.num_ranks > 1 &&
         (shape_.num_ranks > 2 || route_bytes <= kMaxRouteBytesOfTwoRanks);
}

HtPrepareDispatchGrid LaunchPlan::next_ht_prepare_dispatch(int64_t tokens, int top_k, cudaStream_t stream) {
  static_assert(kMinSplitGrid - kMinSplitGrid / 3 >= kMinPrepareBlocks &&
                kFullGrid - kMaxSenderBlocks >= kMinPrepareBlocks);
  const int blocks = prepare_dispatch_blocks_;
  const WarpRoleCounts role_counts = scatter_role_counts(blocks, ReceiverWork::rows, shape_.num_ranks);
  const int64_t tiles = (tokens * top_k + prepare_threads() - 1) / prepare_threads();
  const int most = std::min(blocks - role_counts.sender_blocks, prepare_blocks_); // senders begin at once
  const int prepare = static_cast<int>(std::clamp<int64_t>(tiles, kMinPrepareBlocks, most));
  return {next(blocks, kMovementThreads, prepare_dispatch_shared_bytes_, stream), role_counts, prepare};
}

MovementGrid LaunchPlan::next_scatter(int64_t tokens, int64_t row_bytes, int pad_alignment, ReceiverWork receivers,
                                      cudaStream_t stream) {
  int blocks = scatter_blocks_;
  if (pad_alignment <= 1) { // an aligned zone has many pads, however few the tokens are
    blocks = movement_blocks(tokens, row_bytes, scatter_blocks_);
    // A low-latency dispatch is faster with PDL behind a small prepare, on the SMs that prepare leaves, than later on all SMs:
    // on 2 H200 prepare, dispatch and combine of 128 tokens took 52.6 us with 67 blocks, 54.8 with 84 of 84 SMs.
    const int room = room_beside_last(stream);
    if (may_take_ll_path(tokens) && room < blocks && 4 * room >= 3 * blocks) blocks = room;
  }
  WarpRoleCounts role_counts = receivers == ReceiverWork::routes ? rank_major_role_counts(blocks)
                                                                 : scatter_role_counts(blocks, receivers, shape_.num_ranks);
  role_counts.ll_senders = receivers == ReceiverWork::sums ? ll_gather_senders(blocks) : ll_scatter_senders(blocks, shape_);
  return {next(blocks, kMovementThreads, movement_shared_bytes(), stream), role_counts};
}

// Rows that do not consist of lines take less of the wire in staging, whose rows begin at lines, and the copies that this costs
// are hidden where receivers have SMs of their own. With two ranks the wire is not what limits a scatter.
bool LaunchPlan::stages_rows(int blocks, int64_t row_bytes) const {
  return row_bytes % kStagedRowAlignment != 0 && blocks >= kMinSplitGrid && shape_.num_ranks > 2;
}

MovementGrid LaunchPlan::next_gather(int64_t tokens, int top_k, int64_t row_bytes, bool by_long_tiles,
                                     cudaStream_t stream) {
  const int blocks = movement_blocks(tokens, row_bytes, gather_blocks_);
  const int threads = by_long_tiles ? kLongTileGatherThreads : kMovementThreads;
  WarpRoleCounts role_counts = gather_role_counts(blocks, threads / 32, shape_, top_k);
  role_counts.ll_senders = ll_gather_senders(blocks);
  return {next(blocks, threads, by_long_tiles ? long_tile_gather_shared_bytes() : movement_shared_bytes(), stream),
          role_counts};
}

} // namespace epx::cuda
