// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/cuda/launch_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/cuda.h"
#include "base/env.h"
#include "runtime/layout/window_layout.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/protocol/device_group.h"

namespace epx::cuda {
namespace {

// prepare has one block per tile of routes, but at least so many, since all blocks write the outputs.
constexpr int kMinPrepareBlocks = 17;

int default_sms(const Tuning& tuning, int sms_of_gpu) {
  return std::max(sms_of_gpu - tuning.sms_left_to_others, (sms_of_gpu + 1) / 2);
}

// Senders get SMs of their own where the grid is large enough, except in dispatch_rank_major: stores to peers that wait for the
// wire would delay the stores of receivers on the same SM. There are no more senders than fill the wire: the fewer rows are in
// flight at a time, the earlier the first ones arrive, and the less work is left to receivers when the last ones have arrived.
// In a smaller grid there are fewer sender blocks, so that most are left to receivers, which have more to do. In the smallest
// ones all blocks send and receive, and whoever has no more to send or to signal receives. Senders that quantise rows have more
// work than the wire.
WarpRoleCounts scatter_role_counts(const Tuning& tuning, int blocks, ReceiverWork receivers, SenderWork work) {
  if (work != SenderWork::copies) {
    if (blocks < tuning.split_grid) return {blocks, tuning.quantising_sender_warps, 1, true};
    const int eighths =
        work == SenderWork::quantises ? tuning.quantising_sender_eighths : tuning.all_quantising_sender_eighths;
    return {blocks * eighths / 8, tuning.quantising_sender_warps, 1, false};
  }
  if (blocks >= tuning.full_grid) {
    const int senders = receivers == ReceiverWork::rows ? tuning.scatter_row_senders : tuning.scatter_senders;
    return {tuning.scatter_sender_blocks, std::min(senders / tuning.scatter_sender_blocks, tuning.scatter_sender_warps), 1,
            false};
  }
  if (blocks >= tuning.split_grid)
    return {std::min(tuning.scatter_sender_blocks, blocks / 3), tuning.scatter_sender_warps, 1, false};
  return {blocks, tuning.mixed_sender_warps, 1, true};
}

// The receivers of dispatch_rank_major take up routes alone where rows come in place, so that all blocks send, with as many
// warps as the wire has use for, which receive in the end. At least one warp of each block receives from the beginning.
WarpRoleCounts rank_major_role_counts(const Tuning& tuning, int blocks, SenderWork work) {
  if (work != SenderWork::copies) return {blocks, tuning.quantising_sender_warps, 1, true};
  const int senders = std::max(tuning.rank_major_senders / blocks, tuning.mixed_sender_warps);
  return {blocks, std::min(senders, tuning.rank_major_sender_warps), 1, true};
}

// Where gather has the whole GPU, senders get that part of the blocks which they have of all rows loaded and stored: of a token
// with experts everywhere alike, a rank sums the rows that its peers' tokens have here and stores one for each such token (in
// exact it stores every row), and as a receiver it sums the rows that its own tokens have here with those that the peers have
// sent. In a grid that leaves SMs to others they join the receivers in the end, so that no warp is left without work.
WarpRoleCounts gather_role_counts(const Tuning& tuning, int blocks, int warps, const GroupShape& shape, int top_k) {
  if (blocks < tuning.full_grid) return {std::max(blocks * tuning.gather_sender_eighths / 8, 1), warps, 0, true};
  const double peers = shape.num_ranks - 1;
  const double rows_of_token = static_cast<double>(top_k) / shape.num_ranks; // on a rank
  const double sent_of_token =
      shape.precision == EPX_COMBINE_EXACT ? rows_of_token : 1 - std::pow(peers / shape.num_ranks, top_k);
  const double senders = peers * (rows_of_token + sent_of_token);
  const double receivers = rows_of_token + peers * sent_of_token + 1;
  const int sender_blocks = static_cast<int>(std::lround(blocks * senders / (senders + receivers)));
  return {std::clamp(sender_blocks, 1, blocks - 1), warps, 0, false};
}

constexpr int kHalf = 4; // eighths of the blocks

// Senders of the low-latency path. Since a sender stores tile after tile without a wait, few of them fill the wire; what more
// of them have stored queues up, and delays the loads of receivers, those of the same SM most of all. Senders of dispatch and
// dispatch_rank_major also store the rows that stay on their rank, which are the more the fewer ranks there are, and a tile
// goes to fewer others. A sender of gather looks up and sums rows before it stores a tile, which goes to one rank; in the
// rank-major layout there is nothing to sum.
//
// In smaller grids receivers would miss those blocks. Nor are there such blocks where one of their warps would have too few
// tiles.
constexpr LlSenders ll_senders(int blocks, int sender_blocks, int min_grid, int min_tiles, int most_eighths = kHalf) {
  const auto senders = static_cast<uint32_t>(std::min(sender_blocks, blocks * most_eighths / 8));
  return {senders, blocks >= min_grid ? senders * kMovementThreads / 32 * static_cast<uint32_t>(min_tiles)
                                      : std::numeric_limits<uint32_t>::max()};
}
LlSenders ll_senders_of_prepare_dispatch(const Tuning& tuning, int blocks) {
  return ll_senders(blocks, tuning.ll_prepare_dispatch_sender_blocks, tuning.ll_scatter_grid, tuning.ll_scatter_tiles);
}
LlSenders ll_scatter_senders(const Tuning& tuning, int blocks, const GroupShape& shape) {
  const int sender_blocks = std::max(tuning.ll_scatter_copies / max_copies_of_row(shape), 1);
  return ll_senders(blocks, sender_blocks, tuning.ll_scatter_grid, tuning.ll_scatter_tiles);
}
LlSenders ll_gather_senders(const Tuning& tuning, int blocks, int most_eighths = kHalf) {
  return ll_senders(blocks, tuning.ll_gather_sender_blocks, tuning.ll_gather_grid, tuning.ll_gather_tiles, most_eighths);
}

struct Device {
  GpuKind kind;
  int num_sms;
  int max_shared_bytes; // per block
};

Device this_device() {
  int ordinal = 0;
  Device device{};
  check_cuda(cudaGetDevice(&ordinal), "cudaGetDevice");
  const auto get = [&](int& value, cudaDeviceAttr attribute) {
    check_cuda(cudaDeviceGetAttribute(&value, attribute, ordinal), "cudaDeviceGetAttribute");
  };
  get(device.kind.major, cudaDevAttrComputeCapabilityMajor);
  get(device.kind.minor, cudaDevAttrComputeCapabilityMinor);
  get(device.num_sms, cudaDevAttrMultiProcessorCount);
  get(device.max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return device;
}

// `num_ranks`: on a node.
Tuning tuning_of(const Device& device, int num_ranks) {
  return with_entries(measured_tuning(device.kind, num_ranks), environment().tuning);
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

int LaunchPlan::resolve_num_sms(int num_ranks, int num_comm_sms, int others) {
  static_assert(kMovementBlocksPerSm == 1); // so that only prepare's grid may have more blocks than the group has SMs
  const Device device = this_device();
  const int sms_of_gpu = std::min(device.num_sms, kMaxGridBlocks);
  const int num_sms =
      num_comm_sms == 0 ? default_sms(tuning_of(device, num_ranks), sms_of_gpu) : std::min(num_comm_sms, sms_of_gpu);
  return std::max(num_sms - others, 1);
}

LlLimits LaunchPlan::find_ll_limits(int num_ranks, int num_comm_sms) {
  return ll_limits(tuning_of(this_device(), num_ranks), resolve_num_sms(num_ranks, num_comm_sms, 0));
}

LaunchPlan::LaunchPlan(const GroupShape& shape, int64_t max_ll_tokens, int num_comm_sms)
    : shape_(shape), max_ll_tokens_(max_ll_tokens) {
  const Device device = this_device();
  tuning_ = tuning_of(device, shape.num_ranks);
  num_sms_ = resolve_num_sms(shape.num_ranks, num_comm_sms, 0);
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
  std::vector<const void*> prepare_dispatch_kernels = ll_prepare_dispatch_kernels();
  prepare_dispatch_kernels.push_back(ht_prepare_dispatch_kernel_address());
  int prepare_dispatch_per_sm = kMovementBlocksPerSm;
  for (const void* kernel : prepare_dispatch_kernels) {
    if (const size_t max_bytes = load(kernel, device); prepare_dispatch_shared_bytes_ > max_bytes)
      fail(EPX_ERROR_UNSUPPORTED,
           "epx_group_config.num_experts is {}; prepare_dispatch needs {} bytes of shared memory for them, and "
           "this GPU has {}",
           shape.num_experts, prepare_dispatch_shared_bytes_, max_bytes);
    prepare_dispatch_per_sm =
        std::min(prepare_dispatch_per_sm, blocks_per_sm(kernel, kMovementThreads, prepare_dispatch_shared_bytes_));
  }
  prepare_dispatch_blocks_ = num_sms_ * prepare_dispatch_per_sm;
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
  scatter_blocks_ = std::min({blocks_of_all(scatter_kernels()), blocks_of_all(combine_bwd_kernels()),
                              blocks_of_all(rank_major_kernels()), blocks_of_all(rank_major_gather_kernels())});
  gather_blocks_ = std::min({blocks_of_all(gather_kernels()), blocks_of_all(quantised_gather_kernels()),
                             blocks_of_all(batch_gather_kernels(), kBatchGatherThreads, batch_gather_shared_bytes())});
  slice_blocks_ = blocks_of_all({ragged_all_to_all_kernel_address()}, kMovementThreads, ragged_shared_bytes());
  if (slice_blocks_ < 1 || prepare_blocks_ < 1 || prepare_dispatch_blocks_ < 1 || scatter_blocks_ < 1 || gather_blocks_ < 1)
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

Grid LaunchPlan::next_slices(int64_t tiles, cudaStream_t stream) {
  constexpr int64_t kWarps = kMovementThreads / 32;
  const auto blocks = static_cast<int>(std::clamp<int64_t>((tiles + kWarps - 1) / kWarps, 1, slice_blocks_));
  return next(blocks, kMovementThreads, ragged_shared_bytes(), stream);
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
  if (max_blocks < tuning_.prepare_dispatch_grid) // every block prepares, sends rows, and then receives rows
    return {next(max_blocks, kMovementThreads, prepare_dispatch_shared_bytes_, stream),
            {static_cast<unsigned>(max_blocks), 0},
            {}};
  const int prepare = static_cast<int>(
      std::min<int64_t>(std::max<int64_t>(tiles, kMinPrepareBlocks), std::min(max_blocks / 4, prepare_blocks_)));
  int rows = max_blocks - prepare;
  if (pad_alignment <= 1) rows = movement_blocks(tokens, row_bytes, rows); // an aligned zone has many pads
  return {next(prepare + rows, kMovementThreads, prepare_dispatch_shared_bytes_, stream),
          {static_cast<unsigned>(prepare), static_cast<unsigned>(prepare)},
          ll_senders_of_prepare_dispatch(tuning_, rows)};
}

// In a smaller grid the blocks that prepare would have to send, too, and the copies that rows in place spare would take longer
// than prepare. With two ranks local copies take more of the time than the wire, so that the copies of staged rows take longer
// than prepare where routes have many bytes.
bool LaunchPlan::has_ht_prepare_dispatch(int64_t route_bytes) const {
  return prepare_dispatch_blocks_ >= tuning_.split_grid && shape_.num_ranks > 1 &&
         route_bytes <= int64_t{tuning_.ht_prepare_dispatch_mb} * 1'000'000;
}

HtPrepareDispatchGrid LaunchPlan::next_ht_prepare_dispatch(int64_t tokens, int top_k, cudaStream_t stream) {
  const int blocks = prepare_dispatch_blocks_;
  const WarpRoleCounts role_counts = scatter_role_counts(tuning_, blocks, ReceiverWork::rows, SenderWork::copies);
  const int64_t tiles = (tokens * top_k + prepare_threads() - 1) / prepare_threads();
  const int most = std::min(blocks - role_counts.sender_blocks, prepare_blocks_); // senders begin at once
  const int prepare = static_cast<int>(std::clamp<int64_t>(tiles, kMinPrepareBlocks, most));
  return {next(blocks, kMovementThreads, prepare_dispatch_shared_bytes_, stream), role_counts, prepare};
}

MovementGrid LaunchPlan::next_scatter(int64_t tokens, int64_t row_bytes, int pad_alignment, SenderWork senders,
                                      ReceiverWork receivers, cudaStream_t stream) {
  int blocks = scatter_blocks_;
  if (pad_alignment <= 1) { // an aligned zone has many pads, however few the tokens are
    blocks = movement_blocks(tokens, row_bytes, scatter_blocks_);
    // A low-latency dispatch is faster with PDL behind a small prepare, on the SMs that prepare leaves, than later on all SMs.
    const int room = room_beside_last(stream);
    if (may_take_ll_path(tokens) && room < blocks && 4 * room >= 3 * blocks) blocks = room;
  }
  WarpRoleCounts role_counts = receivers == ReceiverWork::routes ? rank_major_role_counts(tuning_, blocks, senders)
                                                                 : scatter_role_counts(tuning_, blocks, receivers, senders);
  role_counts.ll_senders = receivers == ReceiverWork::sums
                               ? ll_gather_senders(tuning_, blocks, tuning_.ll_rank_major_gather_eighths)
                               : ll_scatter_senders(tuning_, blocks, shape_);
  return {next(blocks, kMovementThreads, movement_shared_bytes(), stream), role_counts};
}

// Rows that do not consist of lines take less of the wire in staging, whose rows begin at lines, and the copies that this costs
// are hidden where receivers have SMs of their own. With two ranks the wire is not what limits a scatter.
bool LaunchPlan::stages_rows(int blocks, int64_t row_bytes) const {
  return row_bytes % kStagedRowAlignment != 0 && blocks >= tuning_.split_grid && tuning_.stages_odd_rows == 1;
}

GatherGrid LaunchPlan::next_gather(int64_t tokens, int top_k, int64_t row_bytes, bool can_take_batches,
                                   cudaStream_t stream) {
  const int blocks = movement_blocks(tokens, row_bytes, gather_blocks_);
  if (can_take_batches) {
    const WarpRoleCounts role_counts = gather_role_counts(tuning_, blocks, kBatchGatherThreads / 32, shape_, top_k);
    if (batches_pay(blocks, role_counts, tokens))
      return {{next(blocks, kBatchGatherThreads, batch_gather_shared_bytes(), stream), role_counts}, true};
  }
  WarpRoleCounts role_counts = gather_role_counts(tuning_, blocks, kMovementThreads / 32, shape_, top_k);
  role_counts.ll_senders = ll_gather_senders(tuning_, blocks);
  return {{next(blocks, kMovementThreads, movement_shared_bytes(), stream), role_counts}, false};
}

// Where the wire is the limit and not the SMs, batches only delay what receivers wait for; the more peers there are, the fewer
// SMs fill the wire.
bool LaunchPlan::batches_pay(int blocks, const WarpRoleCounts& role_counts, int64_t tokens) const {
  const bool is_alone = shape_.num_ranks == 1; // without senders
  const int64_t warps = int64_t{is_alone ? blocks : role_counts.sender_blocks} * role_counts.sender_warps;
  return blocks <= tuning_.batch_grid && tokens * (is_alone ? 1 : shape_.num_ranks - 1) > tuning_.batch_tokens * warps;
}

} // namespace epx::cuda
