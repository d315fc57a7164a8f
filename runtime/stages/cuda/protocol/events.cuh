// SPDX-License-Identifier: Apache-2.0
// Events that kernels report to the host in the status record.
#pragma once

#include <cstdint>

#include "base/device/memory_order.cuh"
#include "runtime/stages/cuda/protocol/call_context.cuh"

namespace epx::cuda {

constexpr unsigned kEventBackoffNs = 200;

// A record that the host has not read is never overwritten, because the host reports the first event since it last read.
__device__ inline bool has_free_record(const CallContext& call) {
  DeviceState& state = *call.group.state;
  if (state.num_events - state.events_taken < StatusRecord::kEvents) return true;
  state.events_taken = load_acquire_sys(&call.group.record->events_taken);
  return state.num_events - state.events_taken < StatusRecord::kEvents;
}

// Returns whether this call has had an event of this kind. No other thread has such events meanwhile.
__device__ inline bool has_had_event(const CallContext& call, epx_event_kind kind) {
  return call.group.state->last_event_calls[kind] == call.sequence;
}

// One thread of its warp calls this. `count` has the unit of epx_group_report.event_counts; EventRecord explains the values and
// the header.
__device__ __noinline__ inline void record_event(const CallContext& call, epx_event_kind kind, int64_t count, int64_t v0,
                                                 int64_t v1 = 0, int64_t v2 = 0, int64_t v3 = 0, int64_t v4 = 0,
                                                 const HandleHeader* header = nullptr) {
  DeviceState& state = *call.group.state;
  while (atomicExch(&state.records_event, 1u) != 0) // a lock, since two blocks of prepare may report an event each
    backoff(kEventBackoffNs);
  // The fence makes an acquire pattern with the exchange: this thread sees what the one before it has stored in `state` (PTX,
  // Release and acquire patterns). No test notices that this fence or the release below is missing.
  fence_acq_rel_sys();
  state.last_event_calls[kind] = call.sequence;
  const uint64_t total = state.event_counts[kind] += static_cast<unsigned long long>(count);
  if (has_free_record(call)) {
    EventRecord& event = call.group.record->events[state.num_events % StatusRecord::kEvents];
    event.kind = kind;
    event.operation = call.operation;
    event.sequence = call.sequence;
    event.total = total;
    const int64_t values[5] = {v0, v1, v2, v3, v4};
    for (int i = 0; i < 5; ++i)
      event.values[i] = values[i];
    if (header != nullptr) event.header = *header;
    // st.release: the host reads the event once it has acquired num_events (PTX, Release and acquire patterns). Posted writes
    // reach an x86 host in order, so no test there notices a relaxed store.
    store_release_sys(&call.group.record->num_events, ++state.num_events);
  }
  // The count comes after the record, so that a host that sees the count has the record.
  store_release_sys(&call.group.record->event_counts[kind], total);
  fence_acq_rel_sys(); // makes a release pattern with the exchange that unlocks
  atomicExch(&state.records_event, 0u);
}

} // namespace epx::cuda
