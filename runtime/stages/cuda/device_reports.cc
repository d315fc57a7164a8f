// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/cuda/device_reports.h"

#include <atomic>
#include <optional>
#include <string>
#include <utility>

#include "base/operations.h"

namespace epx::cuda {
void RecordReader::read(std::optional<CallName> call) {
  const std::scoped_lock lock(mutex_);
  read_events();
  if (std::atomic_ref(record_.failed).load(std::memory_order_acquire) != 0) {
    tell_peers(record_.failure);
    status_.fail(format(record_.failure));
  }
  if (const uint64_t word = board_.abort_record(); word != 0) // there may be no kernel of this rank that would find it
    status_.fail(format_abort(word, call));
  status_.require_healthy();
}

// This rank comes to no call any more. Peers whose kernels have ended well may wait for it in a call that has no kernel, and
// would take it for the cause. In a group of several nodes MultiNodeWatch tells them, and where ranks disagree each has found it by
// itself.
void RecordReader::tell_peers(const FailureRecord& failure) {
  if (context_.has_ordered_calls) return;
  if (is_sound_abort_record(failure.abort_record))
    board_.end_group(unpack_abort_record(failure.abort_record));
  else if (failure.status == EPX_ERROR_TIMEOUT)
    board_.end_group({failure.status, failure.operation, failure.culprit, failure.sequence, failure.phase});
}

void RecordReader::read_events() {
  // The counts since creation are read before the records, because a kernel stores an event's record before its count.
  EventCounts counts{};
  for (size_t kind = 0; kind < counts.size(); ++kind)
    counts[kind] = std::atomic_ref(record_.event_counts[kind]).load(std::memory_order_acquire);
  const uint64_t num_events = std::atomic_ref(record_.num_events).load(std::memory_order_acquire);
  std::optional<Event> first;
  for (; next_event_ < num_events; ++next_event_) {
    const EventRecord& event = record_.events[next_event_ % StatusRecord::kEvents];
    if (event.total > counts[event.kind]) break; // the next read() takes it, with its count
    if (!first || precedes(event.kind, name_of_call(event.sequence), *first)) first = format(event);
  }
  std::atomic_ref(record_.events_taken).store(next_event_, std::memory_order_release);
  EventCounts new_counts{};
  for (size_t kind = 0; kind < counts.size(); ++kind)
    new_counts[kind] = counts[kind] - std::exchange(counted_[kind], counts[kind]);
  status_.record(new_counts, first);
}

Event RecordReader::format(const EventRecord& event) const {
  const CallName call{event.operation, name_of_call(event.sequence)};
  const auto& v = event.values;
  switch (event.kind) {
  case EPX_EVENT_BAD_INDEX:
    return bad_index_event(call, v[0], v[1], v[2], v[3], group().shape.num_experts);
  case EPX_EVENT_OVERFLOW:
    return overflow_event(call, {v[0], v[1], v[2], v[3]}, name_of_rank(context_.rank), context_.shape.max_recv_tokens);
  case EPX_EVENT_TOO_FEW_ROWS:
    return too_few_rows_event(call, v[0], v[1], v[2]);
  case EPX_EVENT_BAD_SLICE: {
    const SliceRecord record{static_cast<int32_t>(v[3] >> 32), 0, static_cast<int32_t>(v[4]), static_cast<int32_t>(v[3])};
    const SeenSlice first{v[1] / 2, v[1] % 2 == 0, static_cast<SliceFault>(v[2] % 256), record};
    return bad_slices_event(call, {v[0], first}, context_.rank, v[2] / 256);
  }
  default:
    break;
  }
  if (v[3] >= 0) { // v[0]: the rank is not of this node
    const int rank = v[0] != 0 ? static_cast<int>(v[3]) : name_of_rank(static_cast<int>(v[3]));
    return plan_mismatch_event(call, event.header.plan_id, static_cast<uint64_t>(v[4]), rank);
  }
  const int64_t num_tokens = names_.num_tokens ? names_.num_tokens(event.sequence) : v[2];
  const HandleUse use{static_cast<int32_t>(v[0]), static_cast<int32_t>(v[1]), num_tokens, v[4]};
  const std::string why = why_unusable(event.header, use, group());
  return unusable_handle_event(call, why.empty() ? why_body_unusable() : why);
}

Failure RecordReader::format(const FailureRecord& failure) const {
  const CallName call{failure.operation, name_of_call(failure.sequence)};
  if (failure.status == EPX_ERROR_MISMATCH) {
    const auto disagreement =
        find_disagreement(call, {failure.descriptors, static_cast<size_t>(context_.shape.num_ranks)}, names_.first_rank);
    if (disagreement) return *disagreement;
  }
  if (failure.abort_record != 0) {
    if (!is_sound_abort_record(failure.abort_record))
      return damage_failure(call, name_of_rank(context_.rank), abort_record_damage(failure.abort_record));
    return format_abort_record(failure, call);
  }
  TimeOut timeout{failure.phase, {}, name_of_rank(failure.culprit), name_of_call(failure.culprit_arrived_at)};
  for (int rank = 0; rank < context_.shape.num_ranks; ++rank)
    if (failure.missing.contains(rank)) timeout.missing.push_back(name_of_rank(rank));
  timeout.kernel = kernel_of(failure.culprit, failure.sequence);
  return timeout_failure(call, timeout, context_.timeout_ms);
}

Failure RecordReader::format_abort(uint64_t word, std::optional<CallName> call) const {
  const AbortRecord abort_record = unpack_abort_record(word);
  if (!is_sound_abort_record(word))
    return damage_failure(call.value_or(CallName{EPX_OP_NONE, 0}), name_of_rank(context_.rank), abort_record_damage(word));
  return abort_failure(call.value_or(CallName{abort_record.operation, 0}), named(abort_record), name_of_rank(context_.rank),
                       0);
}

AbortRecord RecordReader::named(AbortRecord abort_record) const {
  abort_record.culprit = name_of_rank(abort_record.culprit);
  abort_record.sequence = name_of_call(abort_record.sequence);
  return abort_record;
}

bool RecordReader::is_sound_abort_record(uint64_t word) const {
  return is_sound(unpack_abort_record(word), context_.shape.num_ranks);
}

Failure RecordReader::format_abort_record(const FailureRecord& record, CallName call) const {
  const AbortRecord abort_record = unpack_abort_record(record.abort_record);
  Failure failure =
      abort_failure(call, named(abort_record), name_of_rank(context_.rank), name_of_call(record.culprit_arrived_at));
  const bool had_arrived = abort_record.phase != EPX_PHASE_ARRIVE && abort_record.culprit != context_.rank &&
                           record.culprit_arrived_at >= abort_record.sequence;
  // The peer that gave up has looked at the launch counts; what the culprit had launched by then is no longer known here.
  if (abort_record.status == EPX_ERROR_TIMEOUT && !had_arrived && !is_host_call(abort_record.operation) &&
      kernel_of(abort_record.culprit, abort_record.sequence) != CulpritKernel::none)
    failure.message += kernel_words(CulpritKernel::unknown, name_of_rank(abort_record.culprit), abort_record.operation);
  return failure;
}

CulpritKernel RecordReader::kernel_of(int rank, uint64_t sequence) const {
  const uint64_t launched = board_.launched(rank);
  if (launched == RankBoard::kUnknown) return CulpritKernel::unknown;
  return launched >= sequence ? CulpritKernel::launched : CulpritKernel::none;
}

} // namespace epx::cuda
