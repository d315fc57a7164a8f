#include "runtime/stages/host/call_protocol.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include "runtime/base/deadline.h"
#include "runtime/base/names.h"
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

// A term that ranks must agree on, as a value and in words.
struct Term {
  const char* name;
  int64_t (*value)(const CallPost&);
  std::string (*words)(int64_t value) = [](int64_t value) { return std::to_string(value); };
};

std::string dtype_words(int64_t value) {
  return epx::name_of(static_cast<epx_dtype>(value));
}

std::string weights_words(int64_t value) {
  if (value == 0) return "none";
  if (value == 1) return "weights";
  return value == 2 ? "weight gradients" : "weights and weight gradients";
}

constexpr std::array kTerms = {
    Term{"top_k", [](const CallPost& post) -> int64_t { return post.top_k; }},
    Term{"alignment", [](const CallPost& post) -> int64_t { return post.alignment; }},
    Term{"hidden size", [](const CallPost& post) -> int64_t { return post.hidden; }},
    Term{"dtype", [](const CallPost& post) -> int64_t { return post.dtype; }, dtype_words},
    Term{"choice of weights", [](const CallPost& post) -> int64_t { return post.weights; }, weights_words},
    Term{"sidecar_row_bytes", [](const CallPost& post) -> int64_t { return post.sidecar_bytes; }},
};

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
  const Deadline deadline{std::chrono::milliseconds(context_.timeout_ms)};
  uint64_t& waiting = window_.local<Flag>(context_.layout.waiting.offset)->value;
  bool told = false;
  for (int peer = 0; peer < window_.num_ranks; ++peer) {
    Backoff backoff;
    while (progress_told(window_.rank, peer, phase) < sequence_) {
      require_not_poisoned();
      if (backoff.is_long()) {
        store_release(waiting, pack(Waiting{sequence_, phase, peer}));
        told = true;
        if (deadline.passed()) time_out(phase);
      }
      backoff.pause();
    }
  }
  if (told) store_release(waiting, 0);
}

void CallProtocol::require_not_poisoned() {
  const uint64_t word = load_acquire(window_.local<Flag>(context_.layout.poison.offset)->value);
  if (word != 0) fail_as_poisoned(unpack_poison(word));
}

Failure CallProtocol::failure_here(epx_status status) const {
  Failure failure;
  failure.status = status;
  failure.operation = operation_;
  failure.sequence = sequence_;
  return failure;
}

void CallProtocol::require_same_terms() {
  const CallPost& first = offer_of(0);
  for (int rank = 1; rank < window_.num_ranks; ++rank) {
    const CallPost& other = offer_of(rank);
    Failure failure = failure_here(EPX_ERROR_OUT_OF_SEQUENCE);
    if (other.operation != first.operation) {
      failure.message = fmt::format(
          "call {} is {} on rank 0 and {} on rank {}: all ranks must make the same calls in the same order", sequence_,
          name_of(static_cast<epx_operation>(first.operation)), name_of(static_cast<epx_operation>(other.operation)), rank);
      status_.fail(failure);
    }
    if (other.allocation != first.allocation) {
      failure.message = fmt::format("{} (call {}): rank 0 frees its allocation number {}, rank {} number {}",
                                    name_of(operation_), sequence_, first.allocation, rank, other.allocation);
      status_.fail(failure);
    }
    for (const Term& term : kTerms) {
      if (term.value(other) == term.value(first)) continue;
      failure.status = EPX_ERROR_MISMATCH;
      failure.message =
          fmt::format("{} (call {}): {} differs between ranks: rank 0 passes {}, rank {} passes {}", name_of(operation_),
                      sequence_, term.name, term.words(term.value(first)), rank, term.words(term.value(other)));
      status_.fail(failure);
    }
  }
}

// Follows who waits for whom from a rank that is missing to one that waits for nobody: the culprit, not a victim. A rank
// that was killed while it waited has left a record of that; it no longer counts once the peer it waited for has come.
int CallProtocol::find_culprit(int missing) const {
  int culprit = missing;
  for (int step = 0; step < window_.num_ranks; ++step) {
    const uint64_t word = load_acquire(window_.at<Flag>(culprit, context_.layout.waiting.offset)->value);
    if (word == 0) break;
    const Waiting waiting = unpack_waiting(word);
    if (waiting.peer == window_.rank || progress_told(culprit, waiting.peer, waiting.phase) >= waiting.sequence) break;
    culprit = waiting.peer;
  }
  return culprit;
}

void CallProtocol::time_out(epx_phase phase) {
  require_not_poisoned(); // a peer that gave up first has named the culprit
  Failure failure = failure_here(EPX_ERROR_TIMEOUT);
  failure.phase = phase;
  for (int peer = 0; peer < window_.num_ranks; ++peer)
    if (progress_told(window_.rank, peer, phase) < sequence_) failure.missing.push_back(peer);
  if (failure.missing.empty()) return; // they came at the last moment
  failure.culprit = find_culprit(failure.missing.front());
  failure.expected = sequence_;
  failure.seen = progress_told(window_.rank, failure.culprit, EPX_PHASE_ARRIVE);
  failure.message =
      fmt::format("{} (call {}) timed out after {} ms in phase {}: waited for {}; rank {} is the cause, the last call it "
                  "arrived at is {}",
                  name_of(operation_), sequence_, context_.timeout_ms, name_of(phase), name_ranks(failure.missing),
                  failure.culprit, failure.seen);
  const Poison verdict = poison_all(Poison{failure.status, operation_, failure.culprit, sequence_});
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
    if (!stored && peer == 0) verdict = found;
  }
  return unpack_poison(verdict);
}

void CallProtocol::fail_as_poisoned(const Poison& poison) {
  Failure failure = failure_here(poison.status);
  failure.culprit = poison.culprit;
  const bool is_self = poison.culprit == window_.rank;
  if (poison.status == EPX_ERROR_ABORTED) {
    failure.message = fmt::format("{} (call {}): {} aborted the group", name_of(operation_), sequence_,
                                  is_self ? "this rank" : fmt::format("rank {}", poison.culprit));
  } else if (is_self) {
    failure.message =
        fmt::format("{} (call {}): this rank, {}, came too late: its peers gave up waiting for it in {} (call {})",
                    name_of(operation_), sequence_, window_.rank, name_of(poison.operation), poison.sequence);
  } else {
    failure.message = fmt::format("{} (call {}): a peer gave up waiting for rank {} in {} (call {})", name_of(operation_),
                                  sequence_, poison.culprit, name_of(poison.operation), poison.sequence);
  }
  failure.expected = poison.sequence;
  failure.seen = progress_told(window_.rank, poison.culprit, EPX_PHASE_ARRIVE);
  status_.fail(failure);
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
  for (const ExchangeRecord& record : records)
    if (record.status != EPX_SUCCESS && mine.status == EPX_SUCCESS) throw_peer_failure(record);
  return records;
}

} // namespace epx::host
