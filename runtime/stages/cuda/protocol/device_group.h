// What kernels know of the group, and what they leave for the host to read. PODs: kernels take DeviceGroup by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/group_context.h"
#include "runtime/layout/handle_memory.h"
#include "runtime/stages/cuda/protocol/test_hooks.h"
#include "transport/peer_window.h"

namespace epx::cuda {

constexpr int kMaxDeviceRanks = 64;        // a rank is a bit of a word in the kernels
constexpr int kMaxDeviceAllocations = 256; // alive at the same time

// ---- The status record, in host memory that the GPU can write ----

// What a kernel found, in numbers; the host puts it into words (runtime/stages/reports.h).
struct EventRecord {
  epx_event_kind kind;
  epx_operation operation;
  uint64_t sequence;
  uint64_t total;      // event_counts[kind] once this event is counted
  int64_t values[5];   // of the kind: see record_event's callers and RecordReader::format
  HandleHeader header; // HANDLE_MISMATCH
};

struct FailureRecord {
  epx_status status;
  epx_operation operation;
  epx_phase phase;
  int32_t culprit;
  uint64_t sequence;
  uint64_t culprit_arrived_at;
  uint64_t missing;                            // TIMEOUT: a bit for each rank
  uint64_t abort_record;                       // found in this rank's window; 0: this rank failed by itself
  CallDescriptor descriptors[kMaxDeviceRanks]; // MISMATCH, OUT_OF_SEQUENCE: what the ranks offered
};

struct StatusRecord {
  static constexpr uint64_t kEvents = 256;

  uint64_t failed; // 1 once `failure` is complete; stored by the GPU with release order
  // Exact counts since creation, in the unit of epx_group_report.event_counts. Each is stored after the record of its event.
  uint64_t event_counts[EPX_MAX_EVENT_KINDS];
  uint64_t num_events; // with a record; that of event i lies at i % kEvents
  // Records that the host has read; stored by the host. When no place is free, an event is only counted.
  uint64_t events_taken;
  FailureRecord failure;
  EventRecord events[kEvents];
};

// ---- State of the group in the GPU's memory ----

// The last call that all blocks here have begun. One 16-byte word, so that nobody sees half of it.
struct alignas(16) CallsBegun {
  uint64_t sequence;
  uint64_t blocks; // of all calls until then
};

// Which launch makes which call, as one word: two launches of the group that run at the same time differ in it.
constexpr int kLaunchBits = 24;
constexpr uint64_t pack_owner(uint64_t sequence, uint32_t launch) {
  return sequence << kLaunchBits | (launch & ((uint32_t{1} << kLaunchBits) - 1));
}
constexpr uint64_t owned_sequence(uint64_t owner) {
  return owner >> kLaunchBits;
}

struct alignas(16) CallsSeen {
  uint64_t owner;                 // pack_owner() of the last call that was posted
  unsigned long long blocks_left; // blocks of all calls that have left
};

struct alignas(32) DeviceState {
  CallsBegun begun;
  // How two calls that overlap are found out; see Call::is_alone and Call::begun. In one sector of the cache with `begun`.
  CallsSeen seen;
  // Low half: blocks that have begun the call after begun.sequence; high half: that one's low half.
  unsigned long long entered;
  // EPX_CHECK_HANDLE_MEM: the header of the call's handle memory, as launch_check leaves it for the movement: without its magic
  // number where the body's checksum is wrong.
  HandleHeader checked_header;
  // Of the call in progress; they count to their end and begin again.
  unsigned long long send_tiles_taken, receive_tiles_taken; // items of a movement
  uint32_t senders_done;                                    // blocks of prepare, warps of a movement

  uint32_t failed;        // 1: a block has taken it on itself to report a failure; kernels end at once
  uint64_t asked_host_at; // when a thread last asked whether the host wants an end; nanoseconds

  unsigned long long event_counts[EPX_MAX_EVENT_KINDS]; // as in StatusRecord
  uint64_t num_events;
  uint64_t events_taken;  // as last read from StatusRecord, whose memory is far away
  uint32_t records_event; // 1: a thread does
};

struct DeviceGroup {
  GroupContext context;
  std::byte* bases[kMaxDeviceRanks]; // [P]: each rank's window; here, since looking them up must not take a load
  DeviceState* state;
  const uint64_t*
      host_abort_record; // packed AbortRecord, in host memory, where this host and those of peers end the group; 0: no
  StatusRecord* record;  // host memory
  std::byte* const* allocations; // [kMaxDeviceAllocations, P], device memory: each rank's share of each allocation
  LlPacket8* prepare_scratch;    // see prepare_scratch_words()
  uint64_t timeout_ns;
  uint32_t launch; // see pack_owner()
  TestHooks hooks;

  EPX_HOST_DEVICE PeerWindow window() const { return {bases, context.rank, context.shape.num_ranks}; }
};

} // namespace epx::cuda
