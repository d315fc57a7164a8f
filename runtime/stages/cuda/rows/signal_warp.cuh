// SPDX-License-Identifier: Apache-2.0
// The signal warp stores ready flags for the send warps of its CTA. fence.acq_rel.sys lasts until all outstanding stores of the
// SM are performed, several microseconds while NVLink is busy, so one warp per CTA waits for it on behalf of all send warps: a
// send warp, once the stores of its row are complete, enqueues the address of the ready flag in shared memory and goes on; the
// signal warp stores all flags that it finds enqueued behind one fence. The senders of gather.cu signal by themselves, since
// they sum several rows for each one that they store; on few SMs, where fences took a fifth of their time all the same, they
// signal batches of tokens (batch_gather.cuh).
#pragma once

#include "base/device/bulk_copy.cuh"
#include "base/device/memory_order.cuh"
#include "base/device/warp.cuh"
#include "runtime/stages/cuda/kernels.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/protocol/call_session.cuh"

namespace epx::cuda {

class SignalWarp {
public:
  // Each lane of a send warp has two cells, so that it can enqueue a flag before the signal warp has taken the previous one.
  static constexpr int kCellsPerLane = 2;
  static constexpr size_t kSharedBytes =
      sizeof(unsigned long long) * (kMaxSendersPerSignalWarp * kCellsPerLane * kWarp + 1);

  // `senders` warps of the CTA send, and the first `lanes` lanes of each enqueue flags. `shared` has kSharedBytes and is 8
  // bytes aligned.
  __device__ SignalWarp(std::byte* shared, int senders, int lanes)
      : closed_(reinterpret_cast<unsigned long long*>(shared)), cells_(closed_ + 1), senders_(senders), lanes_(lanes) {}

  // The signal warp calls this; a barrier of the CTA separates it from everything else.
  __device__ void clear() const {
    for (int i = lane(); i <= num_cells(); i += kWarp)
      closed_[i] = 0; // and the cells behind it
  }

  // All lanes of sender warp `sender` call this after a barrier of the warp (TmaRowPipeline::finish): each passes the address
  // of a ready flag in a peer's window, or NULL. What any of them had stored, or seen complete, before that barrier comes
  // before the store of the flag. `parity` alternates between 0 and 1. This wait is for the signal warp, which waits for
  // nobody, so that it needs no bound.
  __device__ void enqueue(int sender, int parity, Epoch* ready_flag) const {
    // fence.acq_rel.cta and the CAS below are a release pattern. The matching acquire pattern is the signal warp's load of the
    // cell and then its fence.acq_rel.sys, which is cumulative, so the row is visible before the flag (PTX, Release and acquire
    // patterns; Causality order). Without this fence no test fails on H200, where the signal warp's fence waits for the
    // stores of all warps of the SM.
    fence_acq_rel_block();
    if (ready_flag != nullptr) {
      unsigned long long* const place = cells_ + (kCellsPerLane * sender + parity) * lanes_ + lane();
      while (atomicCAS(place, 0ull, reinterpret_cast<unsigned long long>(ready_flag)) != 0)
        backoff(kBackoffNs);
    }
    __syncwarp(); // all lanes have enqueued before lane 0 counts the sender in close()
  }
  // The same warp calls this after its last enqueue().
  __device__ void close() const {
    fence_acq_rel_block(); // release pattern: every enqueue() comes before the count; run() has the acquire pattern
    if (lane() == 0) atomicAdd(closed_, 1ull);
  }

  // The signal warp calls this; it returns once all senders have closed and every flag is stored. It may then overwrite the
  // shared memory, by bulk copies too.
  __device__ void run(const CallSession& call) const {
#pragma unroll 1
    while (true) {
      const bool closed = atomicAdd(closed_, 0ull) == static_cast<unsigned long long>(senders_);
      // fence.acq_rel.cta: acquire pattern; if `closed`, the loads below see every flag. Atomics on shared memory are performed
      // in order anyway.
      fence_acq_rel_block();
      uint32_t pending = 0; // a bit for each of the lane's cells
      for (int cell = lane(), bit = 0; cell < num_cells(); cell += kWarp, ++bit)
        if (atomicAdd(cells_ + cell, 0ull) != 0) pending |= 1u << bit;
      if (__any_sync(~0u, pending != 0 ? 1 : 0) == 0) {
        if (__all_sync(~0u, closed ? 1 : 0) != 0) break;
        backoff(kBackoffNs);
        continue;
      }
      // fence.acq_rel.sys: acquires what the senders released with their flags, and releases it to the peers (PTX, Release and
      // acquire patterns): it comes before the stores of the flags.
      fence_acq_rel_sys();
      for (; pending != 0; pending &= pending - 1)
        call.signal_behind_fence(reinterpret_cast<Epoch*>(atomicExch(cells_ + lowest_bit(pending) * kWarp + lane(), 0ull)));
    }
    // fence.proxy.async: the atomics on the cells come before bulk copies that overwrite them (PTX, Async proxy).
    fence_shared_before_bulk_copies();
    __syncwarp(); // no lane looks at a cell any more
  }

private:
  static constexpr unsigned kBackoffNs = 50;
  static_assert(kMaxSendersPerSignalWarp * kCellsPerLane <= 32); // each lane has a bit for each of its cells

  __device__ int num_cells() const {
    return kCellsPerLane * senders_ * lanes_;
  }

  // After clear() these are accessed by atomics alone.
  unsigned long long* closed_; // how many senders have closed
  unsigned long long* cells_;  // [senders, kCellsPerLane, lanes]: addresses of pending flags; 0: none
  int senders_, lanes_;
};

// The signal warp of a CTA, whose send warps pass ready flags in their first `lanes` lanes: the last warp. Its cells lie in the
// shared memory of its TMA row pipeline, which it does not use before run() has returned.
__device__ inline SignalWarp signal_warp_of(const WarpRoleCounts& role_counts, int lanes) {
  static_assert(SignalWarp::kSharedBytes <= TmaRowPipeline::kStagesBytes);
  std::byte* const shared = dynamic_shared_memory<std::byte>() + (kMovementWarps - 1) * TmaRowPipeline::kStagesBytes;
  return {shared, role_counts.sender_warps, lanes};
}
// The lanes of a send warp that sends to all peers at a time.
__device__ inline int lanes_of_peers(int num_ranks) {
  return min(num_ranks - 1, kWarp);
}

// Behind the entry barrier: the part of a warp that sends rows, or signals for those that do. Returns what the warp does from
// then on. `rows` has send() and signal_warp().
template <typename Rows>
__device__ __forceinline__ WarpAssignment send_and_signal(Rows& rows, const CallSession& call,
                                                          const WarpRoleCounts& role_counts, const WarpAssignment& warp) {
  if (warp.role == WarpRole::send) {
    rows.send(warp);
  } else if (warp.role == WarpRole::signal) {
    rows.signal_warp().run(call);
    if (lane() == 0) call.sent(static_cast<unsigned>(warp.count));
  } else {
    return warp;
  }
  return join_receivers(role_counts);
}

} // namespace epx::cuda
