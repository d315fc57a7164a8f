// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/host/protocol/call_protocol.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/names.h"
#include "base/suspension_aware_deadline.h"
#include "runtime/stages/reports.h"
#include "transport/host/backoff.h"
#include "transport/interrupt.h"

namespace epx::host {
namespace {

static_assert(sizeof(ExchangeRecord) <= kExchangeRecordBytes);
constexpr int kStepBits = 32; // of a step within a call
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);

void store_release(uint64_t& word, uint64_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}
uint64_t load_acquire(uint64_t& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}

int64_t offset_of(const Region& region, int rank, int64_t bytes_each) {
  return region.offset + rank * bytes_each;
}

} // namespace

CallProtocol::CallProtocol(const GroupContext& context, PeerWindow window, StatusBoard& status)
    : context_(context), window_(window), status_(status), descriptors_(static_cast<size_t>(context.shape.num_ranks)) {}

uint64_t CallProtocol::begin(epx_operation operation) {
  status_.require_healthy();
  operation_ = operation;
  ++sequence_;
  if (control_ != nullptr) control_->begin_call(sequence_);
  require_not_aborted(); // a rank that comes late finds the abort record of its peers here
  return sequence_;
}

void CallProtocol::arrive(CallDescriptor descriptor) {
  descriptor.operation = operation_;
  descriptor.sequence = 0;
  for (int peer = 0; peer < window_.num_ranks; ++peer) {
    auto* target =
        window_.at<CallDescriptor>(peer, offset_of(context_.layout.call_descriptors, window_.rank, sizeof(CallDescriptor)));
    std::memcpy(target, &descriptor, offsetof(CallDescriptor, sequence));
    store_release(target->sequence, sequence_);
  }
  wait_for_peers(EPX_PHASE_ARRIVE);
  std::memcpy(descriptors_.data(), window_.local<CallDescriptor>(context_.layout.call_descriptors.offset),
              descriptors_.size() * sizeof(CallDescriptor));
  require_sound_descriptors();
  require_agreed_fields();
}

void CallProtocol::complete() {
  for (int peer = 0; peer < window_.num_ranks; ++peer)
    store_release(window_.at<Flag>(peer, offset_of(context_.layout.complete, window_.rank, sizeof(Flag)))->value,
                  sequence_);
  wait_for_peers(EPX_PHASE_COMPLETE);
}

// Returns the last call that `peer` has reached in this phase, as it has signaled in the window of `owner`.
uint64_t CallProtocol::progress_signaled(int owner, int peer, epx_phase phase) const {
  const WindowLayout& layout = context_.layout;
  if (phase == EPX_PHASE_ARRIVE)
    return load_acquire(
        window_.at<CallDescriptor>(owner, offset_of(layout.call_descriptors, peer, sizeof(CallDescriptor)))->sequence);
  return load_acquire(window_.at<Flag>(owner, offset_of(layout.complete, peer, sizeof(Flag)))->value);
}

void CallProtocol::meet(uint64_t step) {
  const uint64_t target = sequence_ << kStepBits | step;
  const auto flag_of = [&](int owner, int peer) -> uint64_t& {
    return window_.at<Flag>(owner, offset_of(context_.layout.slice_flags, peer, sizeof(Flag)))->value;
  };
  for (int peer = 0; peer < window_.num_ranks; ++peer)
    store_release(flag_of(peer, window_.rank), target);
  // A peer that has met all others here may be at the next step already.
  wait_for_peers(EPX_PHASE_COMPLETE, target, target + 1,
                 [&](int peer) { return load_acquire(flag_of(window_.rank, peer)); });
}

void CallProtocol::wait_for_peers(epx_phase phase) {
  // A peer cannot go further before this rank has come to the same point.
  wait_for_peers(phase, sequence_, sequence_, [&](int peer) { return progress_signaled(window_.rank, peer, phase); });
}

template <typename ProgressOf>
void CallProtocol::wait_for_peers(epx_phase phase, uint64_t target, uint64_t most, const ProgressOf& progress_of) {
  SuspensionAwareDeadline deadline{std::chrono::milliseconds(context_.timeout_ms)};
  uint64_t& waiting = window_.local<Flag>(context_.layout.waiting.offset)->value;
  bool signaled = false;
  for (int peer = 0; peer < window_.num_ranks; ++peer) {
    Backoff backoff;
    uint64_t progress = 0;
    while ((progress = progress_of(peer)) < target) {
      require_not_aborted();
      if (backoff.is_long()) {
        store_release(waiting, pack(Waiting{sequence_, phase, peer}));
        signaled = true;
        if (is_interrupted())
          fail_as_aborted(abort_all(AbortRecord{EPX_ERROR_ABORTED, operation_, window_.rank, sequence_, phase}));
        if (deadline.passed()) {
          std::vector<int> missing; // throws unless the peers came at the last moment
          for (int other = 0; other < window_.num_ranks; ++other)
            if (progress_of(other) < target) missing.push_back(other);
          time_out(phase, deadline.suspended(), std::move(missing));
        }
      }
      backoff.pause();
    }
    if (progress > most)
      fail_as_damaged(fmt::format("rank {} seems to have reached phase {} of call {}", peer, name_of(phase), progress));
  }
  if (signaled) store_release(waiting, 0);
}

void CallProtocol::require_not_aborted() {
  const uint64_t word = load_acquire(window_.local<Flag>(context_.layout.abort_record.offset)->value);
  if (word == 0) return;
  const AbortRecord abort_record = unpack_abort_record(word);
  if (!is_sound(abort_record, window_.num_ranks)) fail_as_damaged(abort_record_damage(word));
  fail_as_aborted(abort_record);
}

// Checks the fields whose range does not depend on the call. Damage to the agreed fields shows when they are compared.
void CallProtocol::require_sound_descriptors() {
  for (int peer = 0; peer < window_.num_ranks; ++peer) {
    const CallDescriptor& descriptor = descriptor_of(peer);
    if (descriptor.operation < EPX_OP_PREPARE || descriptor.operation > kLastOperation)
      fail_as_damaged(fmt::format("rank {} seems to make operation {}", peer, descriptor.operation));
    if (descriptor.recv_rows < 0)
      fail_as_damaged(fmt::format("rank {} seems to have {} receive rows", peer, descriptor.recv_rows));
  }
}

void CallProtocol::require_agreed_fields() {
  if (const auto failure = find_disagreement(name(), descriptors_)) status_.fail(*failure);
}

// Follows the waiting records from a missing rank to one that waits for nobody, which is the culprit and not a victim. A rank
// that was killed while it waited has left its record; the record no longer counts once the peer that it names has come.
int CallProtocol::find_culprit(int missing) const {
  int culprit = missing;
  for (int step = 0; step < window_.num_ranks; ++step) {
    const uint64_t word = load_acquire(window_.at<Flag>(culprit, context_.layout.waiting.offset)->value);
    if (word == 0) break;
    const Waiting waiting = unpack_waiting(word);
    if (!is_sound(waiting, window_.num_ranks) || waiting.peer == window_.rank ||
        progress_signaled(culprit, waiting.peer, waiting.phase) >= waiting.sequence)
      break;
    culprit = waiting.peer;
  }
  return culprit;
}

void CallProtocol::time_out(epx_phase phase, std::chrono::milliseconds suspended, std::vector<int> missing) {
  require_not_aborted(); // a peer that gave up first has named the culprit
  TimeOut timeout{};
  timeout.phase = phase;
  timeout.suspended_ms = suspended.count();
  timeout.missing = std::move(missing);
  if (timeout.missing.empty()) return;
  std::optional<Verdict> decided;
  if (control_ != nullptr) decided = control_->report_timeout(timeout.missing.front(), operation_, sequence_);
  timeout.culprit = decided ? decided->culprit : find_culprit(timeout.missing.front());
  timeout.culprit_arrived_at = progress_signaled(window_.rank, timeout.culprit, EPX_PHASE_ARRIVE);
  const Failure failure = timeout_failure(name(), timeout, context_.timeout_ms);
  const AbortRecord verdict = abort_all(AbortRecord{failure.status, operation_, failure.culprit, sequence_, phase});
  if (verdict.culprit != failure.culprit) fail_as_aborted(verdict);
  status_.fail(failure);
}

void CallProtocol::abort() {
  abort_all(AbortRecord{EPX_ERROR_ABORTED, EPX_OP_NONE, window_.rank, 0});
}

void CallProtocol::end(const Verdict& verdict) {
  abort_all(AbortRecord{EPX_ERROR_TIMEOUT, verdict.operation, verdict.culprit, verdict.sequence});
}

// Returns the abort record that is kept. When several ranks give up at once, the one whose compare-and-swap in rank 0's window
// succeeds decides, so that all ranks name the same culprit.
AbortRecord CallProtocol::abort_all(const AbortRecord& abort_record) {
  uint64_t verdict = pack(abort_record);
  for (int peer = 0; peer < window_.num_ranks; ++peer) {
    uint64_t found = 0; // no record yet
    const bool stored = std::atomic_ref(window_.at<Flag>(peer, context_.layout.abort_record.offset)->value)
                            .compare_exchange_strong(found, verdict, std::memory_order_acq_rel);
    if (!stored && peer == 0 && is_sound(unpack_abort_record(found), window_.num_ranks)) verdict = found;
  }
  return unpack_abort_record(verdict);
}

void CallProtocol::fail_as_damaged(const std::string& what) {
  const Failure failure = damage_failure(name(), window_.rank, what);
  const AbortRecord verdict = abort_all(AbortRecord{failure.status, operation_, failure.culprit, sequence_});
  if (verdict.status != failure.status || verdict.culprit != failure.culprit) fail_as_aborted(verdict);
  status_.fail(failure);
}

void CallProtocol::fail_as_aborted(const AbortRecord& abort_record) {
  status_.fail(abort_failure(name(), abort_record, window_.rank,
                             progress_signaled(window_.rank, abort_record.culprit, EPX_PHASE_ARRIVE)));
}

std::vector<ExchangeRecord> CallExchange::gather(ExchangeRecord mine) {
  mine.rank = window_.rank;
  // The board may be written before the peers arrive: a rank that begins call n knows that all peers have completed call n - 1,
  // and each rank reads its board before it completes.
  protocol_.begin(static_cast<epx_operation>(descriptor_.operation));
  for (int peer = 0; peer < window_.num_ranks; ++peer)
    std::memcpy(window_.at<ExchangeRecord>(peer, offset_of(context_.layout.board, window_.rank, kExchangeRecordBytes)),
                &mine, sizeof(mine));
  protocol_.arrive(descriptor_);
  std::vector<ExchangeRecord> records(static_cast<size_t>(window_.num_ranks));
  for (int peer = 0; peer < window_.num_ranks; ++peer)
    std::memcpy(&records[static_cast<size_t>(peer)],
                window_.local<ExchangeRecord>(offset_of(context_.layout.board, peer, kExchangeRecordBytes)),
                sizeof(ExchangeRecord));
  protocol_.complete();
  for (int peer = 0; peer < window_.num_ranks; ++peer) {
    const ExchangeRecord& record = records[static_cast<size_t>(peer)];
    if (record.rank != peer || record.status < EPX_SUCCESS || record.status > EPX_ERROR_INTERNAL)
      protocol_.fail_as_damaged(fmt::format("the record of rank {} on the exchange board says rank {}, status {} ({})",
                                            peer, record.rank, static_cast<int>(record.status), name_of(record.status)));
  }
  throw_peer_failure(mine, records);
  return records;
}

} // namespace epx::host
