// SPDX-License-Identifier: Apache-2.0
// The failure of a group on the device: abort records, the culprit of a timeout, and the failure record for the host. Single
// threads call these functions.
#pragma once

#include <cstdint>

#include "base/device/memory_order.cuh"
#include "base/device/warp.cuh"
#include "runtime/stages/cuda/protocol/call_context.cuh"

namespace epx::cuda {

constexpr uint64_t kPollHostNs = 100'000; // between two polls of the host's memory

// Returns the last call for which `peer` has signaled this phase to `owner`. A relaxed load suffices, here and for the
// `waiting` words: each word is complete by itself, and orders no other load.
__device__ inline uint64_t progress_signaled(const CallContext& call, int owner, int peer, epx_phase phase,
                                             uint64_t sequence) {
  if (phase == EPX_PHASE_COMPLETE)
    return load_relaxed_sys(&flag_at(call, owner, call.group.context.layout.complete, peer)->value);
  return load_relaxed_sys(&descriptor_at(call, owner, peer, sequence)->words[0].sequence);
}

// Returns the last call in whose entry barrier `peer` has been, as it has signaled to this rank.
__device__ inline uint64_t last_entry_signaled(const CallContext& call, int peer) {
  if (peer < 0 || peer >= call.num_ranks()) return 0; // the culprit of a record that a host has stored may be anything
  const uint64_t even = progress_signaled(call, call.rank(), peer, EPX_PHASE_ARRIVE, 0);
  const uint64_t odd = progress_signaled(call, call.rank(), peer, EPX_PHASE_ARRIVE, 1);
  return even > odd ? even : odd;
}

__device__ inline void publish(const CallContext& call, FailureRecord& failure, int culprit) {
  failure.operation = call.operation;
  failure.sequence = call.sequence;
  failure.culprit_arrived_at = last_entry_signaled(call, culprit);
  // st.release: the host reads the record once it has acquired `failed`, as in record_event.
  store_release_sys(&call.group.record->failed, 1);
}

__device__ inline void report_abort(const CallContext& call, uint64_t abort_record) {
  if (atomicExch(&call.group.state->failed, 1u) != 0) return;
  FailureRecord& failure = call.group.record->failure;
  failure.status = unpack_abort_record(abort_record).status;
  failure.phase = EPX_PHASE_NONE;
  failure.abort_record = abort_record; // even if it is damaged; the host formats it
  failure.culprit = is_sound(unpack_abort_record(abort_record), call.num_ranks())
                        ? unpack_abort_record(abort_record).culprit
                        : call.rank();
  publish(call, failure, failure.culprit);
}

// Stores the abort record in the window of every rank that has none. Returns the record that counts: the one in rank 0's
// window, so that all ranks name the same culprit.
__device__ inline uint64_t abort_all(const CallContext& call, const AbortRecord& abort_record) {
  uint64_t verdict = pack(abort_record);
  for (int peer = 0; peer < call.num_ranks(); ++peer) {
    const uint64_t found =
        compare_and_swap_sys(&flag_at(call, peer, call.group.context.layout.abort_record, 0)->value, 0, verdict);
    if (found != 0 && peer == 0 && is_sound(unpack_abort_record(found), call.num_ranks())) verdict = found;
  }
  return verdict;
}

__device__ inline Flag* abort_record_here(const CallContext& call) {
  return flag_at(call, call.rank(), call.group.context.layout.abort_record, 0);
}

// A quick look, which reports nothing.
__device__ inline bool may_have_ended(const CallContext& call) {
  const uint32_t failed = load_relaxed_sys(&call.group.state->failed); // the two loads are in flight together
  return load_relaxed_sys(&abort_record_here(call)->value) != 0 || failed != 0;
}

// Returns whether another block or a peer has ended the group, and reports that if no block has.
__device__ __noinline__ inline bool peers_gave_up(const CallContext& call) {
  if (load_relaxed_sys(&call.group.state->failed) != 0) return true;
  const uint64_t abort_record = load_relaxed_sys(&abort_record_here(call)->value);
  if (abort_record == 0) return false;
  report_abort(call, abort_record);
  return true;
}

// One thread of the GPU at a time polls the host's memory, and not often: such loads take long, and many of them delay the
// stores of the whole GPU.
__device__ inline uint64_t host_abort_record(const CallContext& call, uint64_t now) {
  const uint64_t asked = load_relaxed_sys(&call.group.state->asked_host_at);
  if (now < asked + kPollHostNs) return 0;
  if (compare_and_swap_sys(&call.group.state->asked_host_at, asked, now) != asked) return 0;
  return load_relaxed_sys(call.group.host_abort_record);
}

// Returns whether another block, a peer or the host has ended the group, and reports that if no block has.
__device__ __noinline__ inline bool is_aborted(const CallContext& call, uint64_t now) {
  if (peers_gave_up(call)) return true;
  const uint64_t record = host_abort_record(call, now);
  if (record == 0) return false;
  report_abort(call, abort_all(call, unpack_abort_record(record)));
  return true;
}

// Follows the `waiting` words from a missing rank to one that waits for nobody: that is the culprit, and not a victim.
__device__ inline int find_culprit(const CallContext& call, int missing) {
  int culprit = missing;
  for (int step = 0; step < call.num_ranks(); ++step) {
    const uint64_t word = load_relaxed_sys(&flag_at(call, culprit, call.group.context.layout.waiting, 0)->value);
    if (word == 0) break;
    const Waiting waiting = unpack_waiting(word);
    if (!is_sound(waiting, call.num_ranks()) || waiting.peer == call.rank() ||
        progress_signaled(call, culprit, waiting.peer, waiting.phase, waiting.sequence) >= waiting.sequence)
      break;
    culprit = waiting.peer;
  }
  return culprit;
}

// Ends the group because `peer`, and perhaps other peers, have not reached `phase` in time. Whoever has waited for data of a
// peer that has not even entered reports that.
__device__ __noinline__ inline void time_out(const CallContext& call, int peer, epx_phase phase) {
  if (peers_gave_up(call)) return;
  if (progress_signaled(call, call.rank(), peer, EPX_PHASE_ARRIVE, call.sequence) < call.sequence) phase = EPX_PHASE_ARRIVE;
  RankMask missing;
  missing.set(peer);
  for (int other = 0; other < call.num_ranks(); ++other)
    if (progress_signaled(call, call.rank(), other, phase, call.sequence) < call.sequence) missing.set(other);
  const int culprit = find_culprit(call, missing.lowest());
  const uint64_t verdict = abort_all(call, AbortRecord{EPX_ERROR_TIMEOUT, call.operation, culprit, call.sequence, phase});
  if (unpack_abort_record(verdict).culprit != culprit) {
    report_abort(call, verdict);
    return;
  }
  if (atomicExch(&call.group.state->failed, 1u) != 0) return;
  FailureRecord& failure = call.group.record->failure;
  failure.status = EPX_ERROR_TIMEOUT;
  failure.phase = phase;
  failure.culprit = culprit;
  failure.missing = missing;
  publish(call, failure, culprit);
}

// Ends the group because another call of this rank is in progress.
__device__ __noinline__ inline void report_overlap(const CallContext& call) {
  if (peers_gave_up(call)) return;
  report_abort(call, abort_all(call, AbortRecord{EPX_ERROR_OUT_OF_SEQUENCE, call.operation, call.rank(), call.sequence}));
}

// One thread of each block reports that agreed fields of a rank's descriptor differ from those of `mine`; all ranks see the
// same descriptors, and fail alike. Where this rank's own descriptor differs, another call of this rank has posted it.
__device__ __noinline__ inline void report_disagreement(const CallContext& call, const CallDescriptor& mine) {
  const auto* const my_words = reinterpret_cast<const uint64_t*>(&mine);
  bool own_differs = false, peers_differ = false;
  for (int rank = 0; rank < call.num_ranks(); ++rank)
    for (int word = 0; word < kNumAgreedWords; ++word)
      if (descriptor_at(call, call.rank(), rank, call.sequence)->words[word].value != my_words[word])
        (rank == call.rank() ? own_differs : peers_differ) = true;
  if (own_differs || !peers_differ) {
    report_overlap(call);
    return;
  }
  if (atomicExch(&call.group.state->failed, 1u) != 0) return;
  FailureRecord& failure = call.group.record->failure;
  failure.status = EPX_ERROR_MISMATCH; // the host may make it OUT_OF_SEQUENCE when it compares the descriptors
  failure.culprit = -1;
  for (int peer = 0; peer < call.num_ranks(); ++peer)
    for (int word = 0; word < kNumDescriptorWords; ++word)
      reinterpret_cast<uint64_t*>(&failure.descriptors[peer])[word] =
          descriptor_at(call, call.rank(), peer, call.sequence)->words[word].value;
  publish(call, failure, 0);
}

} // namespace epx::cuda
