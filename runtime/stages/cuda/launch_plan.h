// SPDX-License-Identifier: Apache-2.0
// The launch plan of a group: the grid of each kernel, the roles of its warps, and whether it is launched with programmatic
// dependent launch (PDL).
//
// Every kernel of the stages is a cooperative grid whose blocks wait for peers, and holds its SMs meanwhile. So a group takes
// no more SMs than num_comm_sms, and by default leaves some to kernels of other libraries that wait as well (docs/api.md,
// "Beside other kernels"). What was measured of that is in the group's Tuning.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <cuda_runtime_api.h>

#include "base/device/grid.h"
#include "runtime/config.h"
#include "runtime/tuning/tuning.h"

namespace epx::cuda {

// How many blocks do nothing but send on the low-latency path, where at least `min_tiles` tiles are to be sent: the first ones
// of those that move rows, and at most half of them. The largest min_tiles means never; tests may take them all the same.
struct LlSenders {
  uint32_t blocks;
  uint32_t min_tiles;
};

// Warp specialization of a movement's grid. In the first `sender_blocks` blocks the first `sender_warps` warps send, and the
// last `signal_warps` warps signal. If these are all blocks of the grid, their other warps receive; otherwise all warps of the
// other blocks receive.
struct WarpRoleCounts {
  int sender_blocks;
  int sender_warps; // per sender block
  int signal_warps; // per sender block: 1, or 0 when the senders signal by themselves
  bool joins;       // a sender that has no more to send receives, and so does a signal warp then
  LlSenders ll_senders{};
};
// What the receivers of a kernel with the roles of scatter do. rows: they copy or scale rows, or compute dot products. sums:
// they sum the rows that ranks have sent of a token. routes: they store the routes of dispatch_rank_major, and copy rows only
// where these do not come in place.
enum class ReceiverWork { rows, sums, routes };
// What the senders do with a row. quantises_all: they store those that stay on their rank, too.
enum class SenderWork { copies, quantises, quantises_all };
// Threads of each block of scatter and gather, and of the kernel of gather that takes batches of tokens. With three warps
// instead of four on each quarter of an SM a thread may have 168 registers instead of 128: nothing is spilled, and the loads of
// a whole long h-tile from shared memory are in flight.
constexpr int kMovementThreads = 512;
constexpr int kBatchGatherThreads = 384;
// Blocks of a movement on an SM. Role counts are for one. Kernels say it in their __launch_bounds__, too, or ptxas may
// choose 64 registers for the sake of two blocks, and spill thousands of bytes.
constexpr int kMovementBlocksPerSm = 1;
constexpr int kMaxSendersPerSignalWarp = 15; // warps; with the signal warp they fill such a block

// The grid of a movement, and the roles of its warps.
struct MovementGrid {
  Grid grid;
  WarpRoleCounts role_counts;
};

// The grid of a gather; takes_batches: it is for the kernel of batches, which never takes the low-latency path.
struct GatherGrid : MovementGrid {
  bool takes_batches;
};

// The grid of prepare; shares_sms: it has more blocks than the group has SMs.
struct PrepareGrid {
  Grid grid;
  bool shares_sms;
};

// The blocks of prepare_dispatch's kernel: the first `prepare` blocks prepare, and those from `first_of_rows` on move rows.
struct PrepareDispatchBlocks {
  unsigned prepare;
  unsigned first_of_rows;
};
struct PrepareDispatchGrid {
  Grid grid;
  PrepareDispatchBlocks blocks;
  LlSenders ll_senders;
};
// The grid of the kernel for many tokens, in which the blocks that prepare come first, and always receive rows afterwards.
struct HtPrepareDispatchGrid {
  Grid grid;
  WarpRoleCounts role_counts;
  int prepare_blocks;
};

// Loads kernels that no LaunchPlan knows, before any of them is launched.
void load_kernels(std::span<const void* const> kernels);

class LaunchPlan {
public:
  // Loads all kernels, and chooses grids whose blocks are all resident at the same time on at most num_comm_sms SMs (0 stands
  // for the default). max_ll_tokens: the window's ll_tokens. Throws.
  LaunchPlan(const GroupShape& shape, int64_t max_ll_tokens, int num_comm_sms);

  // Of this GPU, in a group that has so many ranks on a node. resolve_num_sms returns how many SMs are left of num_comm_sms (0:
  // the default) when `others` are taken; at least 1.
  static int resolve_num_sms(int num_ranks, int num_comm_sms, int others);
  static LlLimits find_ll_limits(int num_ranks, int num_comm_sms);

  int num_sms() const { return num_sms_; } // the SMs that the group takes at most
  int max_prepare_blocks() const { return prepare_blocks_; }

  // The grid of the group's next ragged_all_to_all, in which warps copy up to so many tiles.
  Grid next_slices(int64_t tiles, cudaStream_t stream);

  // Each returns the grid of the group's next kernel, which is then launched on `stream`. `routes` is the number of this rank's
  // routes; `tokens` and `row_bytes` are those of this rank's call. `pad_alignment` is the alignment of zones whose pads the
  // kernel clears; 1: it clears none. The caller serializes these calls.
  PrepareGrid next_prepare(int64_t routes, cudaStream_t stream);
  PrepareDispatchGrid next_prepare_dispatch(int64_t tokens, int top_k, int64_t row_bytes, int pad_alignment,
                                            cudaStream_t stream);
  // Returns whether one kernel makes prepare_dispatch of tokens that are too many for the low-latency path; their rows have so
  // many bytes when each is counted once for each of the token's routes.
  bool has_ht_prepare_dispatch(int64_t route_bytes) const;
  HtPrepareDispatchGrid next_ht_prepare_dispatch(int64_t tokens, int top_k, cudaStream_t stream);
  MovementGrid next_scatter(int64_t tokens, int64_t row_bytes, int pad_alignment, SenderWork senders,
                            ReceiverWork receivers, cudaStream_t stream);
  // Returns whether a scatter on so many blocks is to stage its rows even where they could be written in place.
  bool stages_rows(int blocks, int64_t row_bytes) const;
  // Takes batches of tokens where that pays, if the call can.
  GatherGrid next_gather(int64_t tokens, int top_k, int64_t row_bytes, bool can_take_batches, cudaStream_t stream);
  // Returns whether a call in which this rank has so many tokens may take the low-latency path.
  bool may_take_ll_path(int64_t tokens) const { return max_ll_tokens_ > 0 && tokens <= max_ll_tokens_; }

  // The next kernel is launched without PDL.
  void forget_last() { last_blocks_ = 0; }

private:
  Grid next(int blocks, int threads, size_t shared_bytes, cudaStream_t stream);
  // Returns how many blocks a kernel may have that is launched with PDL behind the last one; 0 or less: no PDL.
  int room_beside_last(cudaStream_t stream) const;
  int movement_blocks(int64_t tokens, int64_t row_bytes, int max_blocks) const;
  // Returns whether batches pay in a gather on so many blocks, whose warps have these roles.
  bool batches_pay(int blocks, const WarpRoleCounts& role_counts, int64_t tokens) const;

  GroupShape shape_;
  Tuning tuning_;
  int64_t max_ll_tokens_; // tokens per rank up to which the low-latency path is taken; 0: the group has none
  int num_sms_;
  int prepare_blocks_;
  size_t prepare_shared_bytes_;
  size_t prepare_dispatch_shared_bytes_;
  int prepare_dispatch_blocks_;
  int slice_blocks_;
  int scatter_blocks_, gather_blocks_;
  // The group's last kernel.
  cudaStream_t last_stream_ = nullptr;
  int last_blocks_ = 0; // 0: there is none
};

} // namespace epx::cuda
