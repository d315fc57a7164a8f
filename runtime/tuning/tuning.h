// SPDX-License-Identifier: Apache-2.0
// What was measured on GPUs, and decides which kernel makes a call and how the warps of a kernel share its work: one table for
// each kind of GPU and number of ranks. The results of a call have the same bits whatever a table says, and ranks may have
// different tables. docs/tuning.md has the figures that each entry came from, and tells how to measure another table.
#pragma once

#include <string_view>

#include "runtime/layout/window_layout.h"

namespace epx {

// Grids are in blocks. Each SM has one block of a movement kernel, with 16 warps.
struct Tuning {
  // By default a group leaves so many SMs to kernels of other libraries that wait as well; but at least half are its own.
  int sms_left_to_others;

  // In a grid of full_grid blocks or more, senders have SMs of their own. From split_grid on they have a third of the SMs, and
  // in smaller grids every block has senders and receivers.
  int full_grid;
  int split_grid;

  // dispatch, combine_bwd and the rank-major combine: the blocks that send at most, their warps together where the grid is full
  // (scatter_row_senders where the receivers move rows themselves), and the warps of one block at most.
  int scatter_sender_blocks;
  int scatter_senders;
  int scatter_row_senders;
  int scatter_sender_warps;
  int mixed_sender_warps; // of a block that also receives
  int stages_odd_rows; // 1: a row that does not consist of lines goes into staging even where it could be written in place

  // Where senders quantise the rows: how many eighths of the blocks send where others receive alone, and the warps of a block
  // that send, there and where all blocks do. all_: senders store the rows that stay on their rank, too.
  int quantising_sender_eighths;
  int all_quantising_sender_eighths;
  int quantising_sender_warps;

  // dispatch_rank_major: the warps that send, in all blocks together and in one block at most.
  int rank_major_senders;
  int rank_major_sender_warps;

  // combine and dispatch_bwd. In a grid that is not full, so many eighths of the blocks send. In grids of at most batch_grid
  // blocks, warps take batches of tokens where each has more than batch_tokens of them.
  int gather_sender_eighths;
  int batch_grid;
  int batch_tokens;

  // prepare_dispatch: the smallest grid in which blocks either prepare or move rows (low-latency path), and the rows, in MB,
  // up to which one kernel makes a call of many tokens; see LaunchPlan::has_ht_prepare_dispatch.
  int prepare_dispatch_grid;
  int ht_prepare_dispatch_mb;

  // The low-latency path. On fewer than ll_many_sms SMs a rank sends so many chunks of rows for each SM at most, and the routing
  // all-gather takes so many routes of all ranks together.
  int ll_many_sms;
  int ll_chunks_of_sm;
  int ll_gathered_routes;

  // The low-latency path: the blocks that do nothing but send, the smallest grid that has such blocks, and how many tiles a
  // warp of theirs must have. A block sends more where a row goes to one rank alone: ll_scatter_copies blocks, divided by the
  // ranks that a row may go to.
  int ll_prepare_dispatch_sender_blocks;
  int ll_scatter_copies;
  int ll_scatter_grid;
  int ll_scatter_tiles;
  int ll_gather_sender_blocks;
  int ll_gather_grid;
  int ll_gather_tiles;
  int ll_rank_major_gather_eighths; // of the blocks, that send at most: rank-major senders sum nothing. Half of them elsewhere
};

// A kind of GPU is its compute capability.
struct GpuKind {
  int major, minor;

  bool operator==(const GpuKind&) const = default;
};

// Returns the table of the kind and the number of ranks on one node: that of the next larger number which was measured, else of
// the largest. A kind that was not measured has the tables of H200.
const Tuning& measured_tuning(GpuKind kind, int num_ranks);

// Returns the table with the entries of `text`, "name=value,name=value", in place of its own. Throws INVALID_ARGUMENT, naming
// the entry and what it may be.
Tuning with_entries(Tuning tuning, std::string_view text);

// Returns the limits of the low-latency path on so many SMs; on 0 no row takes it.
LlLimits ll_limits(const Tuning& tuning, int num_sms);

} // namespace epx
