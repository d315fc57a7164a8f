// Who tells peers what has reached them. A fence at system scope lasts until all that its multiprocessor has stored has
// arrived: several microseconds while the wire is busy. So the warps of a block that send leave the places to be told in
// shared memory, and go on; another warp, the teller, tells of all that it finds behind one fence. Gather's senders tell
// themselves: they sum several rows for each that they store, and telling takes none of their time that could be measured.
#pragma once

#include "base/device/memory_order.cuh"
#include "base/device/warp.cuh"
#include "runtime/stages/cuda/kernels.h"
#include "runtime/stages/cuda/protocol/call_session.cuh"

namespace epx::cuda {

class SignalWarp {
public:
  static constexpr int kTurns = 2; // of a sender: it may post once more before the teller has come by
  static constexpr size_t kSharedBytes = sizeof(unsigned long long) * (kMaxSendersPerSignalWarp * kTurns * kWarp + 1);

  // Of a block in which `senders` warps send, the first `lanes` lanes of each to tell. `shared`: kSharedBytes, 8 bytes
  // aligned.
  __device__ SignalWarp(std::byte* shared, int senders, int lanes)
      : closed_(reinterpret_cast<unsigned long long*>(shared)), cells_(closed_ + 1), senders_(senders), lanes_(lanes) {}

  // The teller's warp; a barrier of the block comes before all else.
  __device__ void clear() const {
    for (int i = lane(); i <= num_cells(); i += kWarp)
      closed_[i] = 0; // and the cells behind it
  }

  // A warp that sends, numbered from 0, all lanes, after a barrier of the warp (TmaRowPipeline::finish): each names a place in a
  // peer's window, or NULL. What any of them had stored, or seen complete, before that barrier is there before the place is
  // told. `turn`: 0 and 1 in turn. Waits for the teller alone, which waits for nobody, so that the wait needs no bound.
  __device__ void post(int sender, int turn, Epoch* place) const {
    // Release pattern with the exchange below; its other side is the teller's fence at system scope, which comes after its look at
    // the cell, and covers what this one does (PTX, Release and acquire patterns; Causality order). No test notices: that fence
    // waits for the stores of all warps of its multiprocessor.
    fence_acq_rel_block();
    if (place != nullptr) {
      unsigned long long* const cell = cells_ + (kTurns * sender + turn) * lanes_ + lane();
      while (atomicCAS(cell, 0ull, reinterpret_cast<unsigned long long>(place)) != 0)
        backoff(kBackoffNs);
    }
    __syncwarp(); // the posts of all lanes come before what lane 0 does in close()
  }
  // The same warp, after its last post.
  __device__ void close() const {
    fence_acq_rel_block(); // release pattern: every post comes before the count; run() has the acquire
    if (lane() == 0) atomicAdd(closed_, 1ull);
  }

  // The teller's warp: until all has been told that the senders post.
  __device__ void run(const CallSession& call) const {
#pragma unroll 1
    while (true) {
      const bool closed = atomicAdd(closed_, 0ull) == static_cast<unsigned long long>(senders_);
      fence_acq_rel_block(); // acquire pattern: if so, what follows sees every post. Atomics on shared memory go in order anyway
      uint32_t found = 0; // a bit for each of the lane's cells
      for (int cell = lane(), bit = 0; cell < num_cells(); cell += kWarp, ++bit)
        if (atomicAdd(cells_ + cell, 0ull) != 0) found |= 1u << bit;
      if (__any_sync(~0u, found != 0 ? 1 : 0) == 0) {
        if (__all_sync(~0u, closed ? 1 : 0) != 0) return;
        backoff(kBackoffNs);
        continue;
      }
      // Acquires the posts, and releases what comes before them (PTX, Release and acquire patterns): it is there before what follows.
      fence_acq_rel_sys();
      for (; found != 0; found &= found - 1)
        call.signal_behind_fence(reinterpret_cast<Epoch*>(atomicExch(cells_ + lowest_bit(found) * kWarp + lane(), 0ull)));
    }
  }

private:
  static constexpr unsigned kBackoffNs = 50;
  static_assert(kMaxSendersPerSignalWarp * kTurns <= 32); // cells of a lane, a bit each

  __device__ int num_cells() const {
    return kTurns * senders_ * lanes_;
  }

  // After clear() all are touched by atomics alone.
  unsigned long long* closed_; // how many senders
  unsigned long long* cells_;  // [senders, kTurns, lanes]: places to be told; 0: none
  int senders_, lanes_;
};

} // namespace epx::cuda
