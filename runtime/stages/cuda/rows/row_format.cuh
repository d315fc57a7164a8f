// SPDX-License-Identifier: Apache-2.0
// A row format says what travels for a row of scatter. It is a policy of those that send and receive rows (row_sender.cuh,
// ll_rows.cuh, Scatter, RankMajorReceiver). docs/row-formats.md tells how to add one; that of the host transport is
// runtime/stages/host/rows/row_format.h.
#pragma once

#include "runtime/stages/cuda/rows/ll_row.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"
#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"

namespace epx::cuda {

// The row itself.
struct PlainRows {
  // The row travels as the receive tensor has it, so that a sender may store it there.
  static constexpr bool kIsReceiveFormat = true;

  // The high-throughput path. A warp moves a row of `bytes` bytes to the address that each lane passes, or NULL; the move is
  // only begun, and pipeline.finish() ends it. send: from the sender's tensor into staging, or into receive rows where the
  // format allows it. receive: from staging to the receiver's tensor. keep: from the sender's tensor to its own receive rows,
  // which get what a peer would have got.
  __device__ static void begin_send(TmaRowPipeline& pipeline, const std::byte* from, int64_t bytes, std::byte* to) {
    begin_copy_row_to_destinations(pipeline, from, bytes, to);
  }
  __device__ static void begin_receive(TmaRowPipeline& pipeline, const std::byte* from, int64_t bytes, std::byte* to) {
    begin_copy_row_to_destinations(pipeline, from, bytes, to);
  }
  __device__ static void begin_keep(TmaRowPipeline& pipeline, const std::byte* from, int64_t bytes, std::byte* to) {
    begin_copy_row_to_destinations(pipeline, from, bytes, to);
  }

  // The low-latency path: a chunk of a row in a warp's registers, from the sender's tensor to what travels, and back.
  __device__ static void to_wire(LlChunk&) {}
  __device__ static void from_wire(LlChunk&) {}
};

// Of dispatch, prepare_dispatch and dispatch_rank_major. Sidecars, and the gradients of combine_bwd, travel as they are.
using WireRows = PlainRows;

} // namespace epx::cuda
