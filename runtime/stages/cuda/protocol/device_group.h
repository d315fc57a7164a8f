// SPDX-License-Identifier: Apache-2.0
// The device's view of a group (DeviceGroup, a POD that kernels take by value), its state in GPU memory, and the status record
// that kernels leave for the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/rank_mask.h"
#include "runtime/group_context.h"
#include "runtime/layout/handle_memory.h"
#include "runtime/stages/cuda/protocol/test_hooks.h"
#include "transport/peer_window.h"

namespace epx::cuda {

constexpr int kMaxDeviceRanks = RankMask::kMaxRanks; // kernels keep sets of ranks in a mask
constexpr int kMaxDeviceAllocations = 256;           // that exist at the same time

// ---- The status record, in host memory that the GPU can write ----

// An event that a kernel has found, in numbers; the host formats it (runtime/stages/reports.h).
struct EventRecord {
  epx_event_kind kind;
  epx_operation operation;
  uint64_t sequence;
  uint64_t total;      // event_counts[kind] once this event is counted
  int64_t values[5];   // they depend on the kind: see record_event's callers and RecordReader::format
  HandleHeader header; // HANDLE_MISMATCH only
};

struct FailureRecord {
  epx_status status;
  epx_operation operation;
  epx_phase phase;
  int32_t culprit;
  uint64_t sequence;
  uint64_t culprit_arrived_at;
  RankMask missing;      // TIMEOUT
  uint64_t abort_record; // what ended the group, of any rank or host; 0: TIMEOUT found here, or MISMATCH
  CallDescriptor descriptors[kMaxDeviceRanks]; // MISMATCH, OUT_OF_SEQUENCE: the ranks' call descriptors
};

struct StatusRecord {
  static constexpr uint64_t kEvents = 256;

  uint64_t failed; // 1 once `failure` is complete; the GPU stores it with release order
  // The exact counts since creation, in the unit of epx_group_report.event_counts. Each is stored after the record of its
  // event.
  uint64_t event_counts[EPX_MAX_EVENT_KINDS];
  uint64_t num_events; // events that have a record; the record of event i lies at i % kEvents
  // The number of records that the host has read; the host stores it. When no record is free, an event is only counted.
  uint64_t events_taken;
  FailureRecord failure;
  EventRecord events[kEvents];
};

// ---- State of the group in the GPU's memory ----

// The last call that all blocks of this rank have begun. Its 16 bytes are stored at once (single-copy atomic).
struct alignas(16) CallsBegun {
  uint64_t sequence;
  uint64_t blocks; // the blocks of this call and of all calls before it
};

// The launch that makes a call, packed with the call's sequence number: two launches of the group that run at the same time
// have different words, unless a graph with the call runs twice.
constexpr int kLaunchBits = 24;
constexpr uint64_t pack_owner(uint64_t sequence, uint32_t launch) {
  return sequence << kLaunchBits | (launch & ((uint32_t{1} << kLaunchBits) - 1));
}
constexpr uint64_t owned_sequence(uint64_t owner) {
  return owner >> kLaunchBits;
}

// The blocks of a kernel that have begun: bits 0 to 9 have their number, bits 10 to 25 the sum of their indices, bits 26 to 39
// the low bits of CallsBegun::blocks before the kernel, and bits 40 to 63 the sum of their launch numbers. Each block adds
// itself; what the last sum carries is lost, and the others have room for a grid of kMaxGridBlocks.
constexpr int kMaxGridBlocks = 256;
static_assert(kMaxGridBlocks < 1 << 10 && kMaxGridBlocks * (kMaxGridBlocks - 1) / 2 < 1 << 16);
constexpr unsigned long long pack_beginning(uint32_t blocks, uint32_t indices, uint64_t blocks_before, uint32_t launches) {
  return blocks | indices << 10 | (blocks_before & 0x3fff) << 26 | uint64_t{launches} << 40;
}
constexpr uint32_t blocks_beginning(uint64_t beginning) {
  return beginning & 0x3ff;
}
constexpr uint32_t indices_beginning(uint64_t beginning) {
  return beginning >> 10 & 0xffff;
}

struct alignas(16) CallsSeen {
  uint64_t owner;                 // pack_owner() of the last call whose descriptor was posted
  unsigned long long blocks_left; // blocks, of all calls, that have called leave()
};

struct alignas(32) DeviceState {
  CallsBegun begun;
  // Overlapping calls are detected by these two; see CallSession::begin. `seen` shares a cache sector with `begun`.
  CallsSeen seen;
  unsigned long long beginning; // pack_beginning() of the kernel whose blocks are not all in `begun`
  // EPX_CHECK_HANDLE_MEM: the header of the call's handle memory as launch_check leaves it for the movement, with magic 0 when
  // the body's checksum is wrong.
  HandleHeader checked_header;
  // Counters of the call in progress; each returns to 0 when it has reached its end.
  unsigned long long send_tiles_taken, receive_tiles_taken; // tiles of a movement
  uint32_t senders_done;                                    // calls of CallSession::sent()
  // ragged_all_to_all: blocks that have ended a round, by its parity.
  uint32_t slice_blocks_stored[2], slice_blocks_copied[2];

  uint32_t failed;        // 1 when a block reports a failure, or has, or the host will; kernels end at once
  uint64_t asked_host_at; // nanoseconds; when a thread last polled the host's abort record

  unsigned long long event_counts[EPX_MAX_EVENT_KINDS]; // as in StatusRecord
  uint64_t num_events;
  uint64_t events_taken; // a copy from StatusRecord, because loads from host memory take long
  // By kind: the last call that had such an event, whether that has a record or was only counted.
  uint64_t last_event_calls[EPX_MAX_EVENT_KINDS];
  uint32_t records_event; // a lock: 1 while a thread is in record_event
};

struct DeviceGroup {
  GroupContext context;
  // By WindowIndex: each rank's window. They are here by value, so that no global load comes before an access.
  std::byte* bases[kMaxDeviceRanks];
  DeviceState* state;
  // Host memory: a packed AbortRecord once this host or a peer's has ended the group, else 0.
  const uint64_t* host_abort_record;
  StatusRecord* record; // host memory
  // [kMaxDeviceAllocations, P], by WindowIndex, in device memory: each rank's base of each allocation.
  std::byte* const* allocations;
  LlPacket8* prepare_scratch; // see prepare_scratch_words()
  LlPacket8* plan_packets;    // see plan_packet_words()
  uint64_t timeout_ns;
  uint32_t launch; // see pack_owner()
  TestHooks hooks;

  EPX_HOST_DEVICE PeerWindow window() const { return {bases, context.rank, context.shape.num_ranks}; }
};

} // namespace epx::cuda
