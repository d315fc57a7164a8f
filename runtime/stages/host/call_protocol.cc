#include "runtime/stages/host/call_protocol.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include "runtime/base/names.h"
#include "runtime/base/suspension_aware_deadline.h"
#include "runtime/stages/reports.h"
#include "transport/host/backoff.h"

namespace epx::host {
namespace {

static_assert(sizeof(ExchangeRecord) <= kExchangeRecordBytes);
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
    : context_(context), window_(window), status_(status), offers_(static_cast<size_t>(context.shape.num_ranks)) {}

uint64_t CallProtocol::begin(epx_operation operation) {
  status_.require_healthy();
  operation_ = operation;
  ++sequence_;
  require_not_poisoned(); // a rank that comes late finds here that its peers gave up
  return sequence_;
}

void CallProtocol::arrive(CallPost offer) {
  offer.operation = operation_;
  offer.sequence = 0;
  for (int peer = 0; peer < window_.num_ranks; ++peer) {
    auto* post = window_.at<CallPost>(peer, offset_of(context_.layout.posts, window_.rank, sizeof(CallPost)));
    std::memcpy(post, &offer, offsetof(CallPost, sequence));
    store_release(post->sequence, sequence_);
  }
  wait_for_peers(EPX_PHASE_ARRIVE);
  std::memcpy(offers_.data(), window_.local<CallPost>(context_.layout.posts.offset), offers_.size() * sizeof(CallPost));
  require_sound_offers();
  require_same_terms();
}

void CallProtocol::complete() {
  for (int peer = 0; peer < window_.num_ranks; ++peer)
    store_release(window_.at<Flag>(peer, offset_of(context_.layout.complete, window_.rank, sizeof(Flag)))->value,
                  sequence_);
  wait_for_peers(EPX_PHASE_COMPLETE);
}

// The last call that `peer` has reached in this phase, as it has told `owner`.
uint64_t CallProtocol::progress_told(int owner, int peer, epx_phase phase) const {
  const WindowLayout& layout = context_.layout;
  if (phase == EPX_PHASE_ARRIVE)
    return load_acquire(window_.at<CallPost>(owner, offset_of(layout.posts, peer, sizeof(CallPost)))->sequence);
  return load_acquire(window_.at<Flag>(owner, offset_of(layout.complete, peer, sizeof(Flag)))->value);
}

void CallProtocol::wait_for_peers(epx_phase phase) {
  SuspensionAwareDeadline deadline{std::chrono::milliseconds(context_.timeout_ms)};
  uint64_t& waiting = window_.local<Flag>(context_.layout.waiting.offset)->value;
  bool told = false;
  for (int peer = 0; peer < window_.num_ranks; ++peer) {
    Backoff backoff;
    uint64_t progress = 0;
    while ((progress = progress_told(window_.rank, peer, phase)) < sequence_) {
      require_not_poisoned();
      if (backoff.is_long()) {
        store_release(waiting, pack(Waiting{sequence_, phase, peer}));
        told = true;
        if (deadline.passed()) time_out(phase, deadline.suspended());
      }
      backoff.pause();
    }
    // A peer gets no further than this before this rank has.
    if (progress > sequence_)
      fail_as_damaged(fmt::format("rank {} seems to have reached phase {} of call {}", peer, name_of(phase), progress));
  }
  if (told) store_release(waiting, 0);
}

void CallProtocol::require_not_poisoned() {
  const uint64_t word = load_acquire(window_.local<Flag>(context_.layout.poison.offset)->value);
  if (word == 0) return;
  const Poison poison = unpack_poison(word);
  if (!is_sound(poison, window_.num_ranks)) fail_as_damaged(poison_damage(word));
  fail_as_poisoned(poison);
}

// What does not depend on the call. Damage to the terms that ranks agree on shows when they are compared.
void CallProtocol::require_sound_offers() {
  for (int peer = 0; peer < window_.num_ranks; ++peer) {
    const CallPost& offer = offer_of(peer);
    if (offer.operation < EPX_OP_PREPARE || offer.operation > EPX_OP_MEM_FREE)
      fail_as_damaged(fmt::format("rank {} seems to make operation {}", peer, offer.operation));
    if (offer.recv_rows < 0) fail_as_damaged(fmt::format("rank {} seems to have {} receive rows", peer, offer.recv_rows));
  }
}

void CallProtocol::require_same_terms() {
  if (const auto failure = find_disagreement(name(), offers_)) status_.fail(*failure);
}

// Follows who waits for whom from a rank that is missing to one that waits for nobody: the culprit, not a victim. A rank
// that was killed while it waited has left a record of that; it no longer counts once the peer it waited for has come.
int CallProtocol::find_culprit(int missing) const {
  int culprit = missing;
  for (int step = 0; step < window_.num_ranks; ++step) {
    const uint64_t word = load_acquire(window_.at<Flag>(culprit, context_.layout.waiting.offset)->value);
    if (word == 0) break;
    const Waiting waiting = unpack_waiting(word);
    if (!is_sound(waiting, window_.num_ranks) || waiting.peer == window_.rank ||
        progress_told(culprit, waiting.peer, waiting.phase) >= waiting.sequence)
      break;
    culprit = waiting.peer;
  }
  return culprit;
}

void CallProtocol::time_out(epx_phase phase, std::chrono::milliseconds suspended) {
  require_not_poisoned(); // a peer that gave up first has named the culprit
  TimeOut timeout{};
  timeout.phase = phase;
  timeout.suspended_ms = suspended.count();
  for (int peer = 0; peer < window_.num_ranks; ++peer)
    if (progress_told(window_.rank, peer, phase) < sequence_) timeout.missing.push_back(peer);
  if (timeout.missing.empty()) return; // they came at the last moment
  timeout.culprit = find_culprit(timeout.missing.front());
  timeout.culprit_arrived_at = progress_told(window_.rank, timeout.culprit, EPX_PHASE_ARRIVE);
  const Failure failure = timeout_failure(name(), timeout, context_.timeout_ms);
  const Poison verdict = poison_all(Poison{failure.status, operation_, failure.culprit, sequence_, phase});
  if (verdict.culprit != failure.culprit) fail_as_poisoned(verdict);
  status_.fail(failure);
}

void CallProtocol::abort() {
  poison_all(Poison{EPX_ERROR_ABORTED, EPX_OP_NONE, window_.rank, 0});
}

// Returns the record that stands. When several ranks give up at once, the one that reaches rank 0's window first decides, so
// that all ranks name the same culprit.
Poison CallProtocol::poison_all(const Poison& poison) {
  uint64_t verdict = pack(poison);
  for (int peer = 0; peer < window_.num_ranks; ++peer) {
    uint64_t found = 0; // nobody
    const bool stored = std::atomic_ref(window_.at<Flag>(peer, context_.layout.poison.offset)->value)
                            .compare_exchange_strong(found, verdict, std::memory_order_acq_rel);
    if (!stored && peer == 0 && is_sound(unpack_poison(found), window_.num_ranks)) verdict = found;
  }
  return unpack_poison(verdict);
}

void CallProtocol::fail_as_damaged(const std::string& what) {
  const Failure failure = damage_failure(name(), window_.rank, what);
  const Poison verdict = poison_all(Poison{failure.status, operation_, failure.culprit, sequence_});
  if (verdict.status != failure.status || verdict.culprit != failure.culprit) fail_as_poisoned(verdict);
  status_.fail(failure);
}

void CallProtocol::fail_as_poisoned(const Poison& poison) {
  status_.fail(poison_failure(name(), poison, window_.rank, progress_told(window_.rank, poison.culprit, EPX_PHASE_ARRIVE)));
}

std::vector<ExchangeRecord> CallExchange::gather(ExchangeRecord mine) {
  mine.rank = window_.rank;
  // The board may be written before the peers arrive: a rank that begins call n knows that all have left call n - 1, and
  // each rank reads its board before it completes.
  protocol_.begin(operation_);
  for (int peer = 0; peer < window_.num_ranks; ++peer)
    std::memcpy(window_.at<ExchangeRecord>(peer, offset_of(context_.layout.board, window_.rank, kExchangeRecordBytes)),
                &mine, sizeof(mine));
  protocol_.arrive(terms_);
  std::vector<ExchangeRecord> records(static_cast<size_t>(window_.num_ranks));
  for (int peer = 0; peer < window_.num_ranks; ++peer)
    std::memcpy(&records[static_cast<size_t>(peer)],
                window_.local<ExchangeRecord>(offset_of(context_.layout.board, peer, kExchangeRecordBytes)),
                sizeof(ExchangeRecord));
  protocol_.complete();
  for (int peer = 0; peer < window_.num_ranks; ++peer) {
    const ExchangeRecord& record = records[static_cast<size_t>(peer)];
    if (record.rank != peer || record.status < EPX_SUCCESS || record.status > EPX_ERROR_INTERNAL)
      protocol_.fail_as_damaged(fmt::format("the record of rank {} on the exchange board says rank {}, status {}", peer,
                                            record.rank, static_cast<int>(record.status)));
  }
  for (const ExchangeRecord& record : records)
    if (record.status != EPX_SUCCESS && mine.status == EPX_SUCCESS) throw_peer_failure(record);
  return records;
}

} // namespace epx::host
