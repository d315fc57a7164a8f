// SPDX-License-Identifier: Apache-2.0
// The long wait: it backs off, and ends when the group fails or the timeout passes. CallSession polls a little before it.
#pragma once

#include <cstdint>

#include "base/device/memory_order.cuh"
#include "runtime/stages/cuda/protocol/failure.cuh"

namespace epx::cuda {

constexpr uint64_t kSlowNs = 1'000'000;  // a longer wait publishes whom it waits for, and polls the host's memory
constexpr uint32_t kSpinsPerCheck = 256; // between two looks for abort records and at the clock
constexpr unsigned kWaitBackoffNs = 200;
// A wait for another block of this rank lasts up to so many timeouts: that block may wait for peers itself, for one after the
// other, and then its wait is the one that runs out and finds the culprit.
constexpr uint64_t kOwnRankTimeouts = 4;

// Waits until *place is the epoch of the call, which `peer` stores, or another block of this rank. It is out of line, so that
// the code of short waits stays small.
__device__ __noinline__ inline bool wait_long(const CallContext& call, const Epoch* place, int peer, epx_phase phase) {
  const bool is_own = peer == call.rank();
  const uint64_t timeout_ns = (is_own ? kOwnRankTimeouts : 1) * call.group.timeout_ns;
  uint64_t begin = 0;
  bool signaled = false;
  for (uint32_t spin = 1; load_relaxed_sys(place) != call.epoch(); ++spin) {
    backoff(kWaitBackoffNs); // many warps wait at the same time, beside others that work
    if (spin % kSpinsPerCheck != 0) continue;
    if (peers_gave_up(call)) return false;
    const uint64_t now = nanoseconds();
    if (begin == 0) begin = now;
    if (now - begin < kSlowNs) continue;
    // The word is stored again at every check, because another warp clears it when its own wait ends.
    if (!is_own)
      store_relaxed_sys(&flag_at(call, call.rank(), call.group.context.layout.waiting, 0)->value,
                        pack(Waiting{call.sequence, phase, peer}));
    signaled = !is_own;
    if (is_aborted(call, now)) return false;
    if (now - begin > timeout_ns && load_relaxed_sys(place) != call.epoch()) {
      time_out(call, peer, phase);
      return false;
    }
  }
  if (signaled) store_relaxed_sys(&flag_at(call, call.rank(), call.group.context.layout.waiting, 0)->value, 0);
  return true;
}

} // namespace epx::cuda
