// SPDX-License-Identifier: Apache-2.0
// A warp sends rows on the high-throughput path: to as many places at a time as it has lanes, each row with its ready flags.
// The protocol of a row and its flag is in scatter.cu.
#pragma once

#include "runtime/stages/cuda/rows/row_format.cuh"
#include "runtime/stages/cuda/rows/signal_warp.cuh"

namespace epx::cuda {

// Where a lane's copy of a row goes, and what comes with it; NULL: nowhere.
struct SendPlaces {
  RowPlace row;
  std::byte* sidecar = nullptr;
  Epoch* ready_flag = nullptr;
};

// The tensors of a call that rows are sent from.
struct SourceTensors {
  const std::byte* rows;
  int64_t row_bytes;
  const std::byte* sidecars;
  int64_t sidecar_bytes; // 0: none
};

// Each send warp has one. Where rows have ready flags, it completes a row, and enqueues the row's flags for the signal warp, while
// it loads the next one.
template <typename Format>
class RowSender {
public:
  // The first `lanes` lanes pass ready flags; 0: there are none, and no signal warp.
  __device__ RowSender(TmaRowPipeline& pipeline, const WarpRoleCounts& role_counts, int lanes,
                       const Format& format = Format())
      : pipeline_(pipeline), role_counts_(role_counts), lanes_(lanes), format_(format) {}

  __device__ SignalWarp signal_warp() const { return signal_warp_of(role_counts_, lanes_); }

  // Begins to send row `index` of `from`. Each lane passes its places, of which at least one is for the row.
  __device__ void send(const SourceTensors& from, int64_t index, const SendPlaces& to) {
    format_.begin_send(pipeline_, from.rows + index * from.row_bytes, from.row_bytes, index, to.row, [&] {
      if (lanes_ > 0) finish();
    });
    pending_flag_ = to.ready_flag;
    if (from.sidecar_bytes > 0)
      copy_row_to_destinations(from.sidecars + index * from.sidecar_bytes, from.sidecar_bytes, to.sidecar);
  }
  // The warp calls this once it has no more to send.
  __device__ void close() {
    if (lanes_ > 0) {
      finish();
      signal_warp().close();
    } else {
      pipeline_.finish();
    }
  }

private:
  // Completes the row before, if there is one.
  __device__ void finish() {
    pipeline_.finish();
    signal_warp().enqueue(static_cast<int>(threadIdx.x) / kWarp, cell_, pending_flag_);
    cell_ ^= 1;
  }

  TmaRowPipeline& pipeline_;
  const WarpRoleCounts& role_counts_;
  int lanes_;
  [[no_unique_address]] Format format_;
  int cell_ = 0;                  // for the next enqueue()
  Epoch* pending_flag_ = nullptr; // of each lane: the ready flag of the last row
};

} // namespace epx::cuda
