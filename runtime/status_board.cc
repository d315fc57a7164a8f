// SPDX-License-Identifier: Apache-2.0
#include "runtime/status_board.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "base/names.h"

namespace epx {

void StatusBoard::require_healthy() const {
  const std::scoped_lock lock(mutex_);
  if (failure_) throw StatusError(failure_->status, failure_->message);
}

bool StatusBoard::is_healthy() const {
  const std::scoped_lock lock(mutex_);
  return !failure_;
}

std::optional<Failure> StatusBoard::failure() const {
  const std::scoped_lock lock(mutex_);
  return failure_;
}

void StatusBoard::fail(const Failure& failure) {
  const std::scoped_lock lock(mutex_);
  if (!failure_) {
    failure_ = failure;
    // A user asked for an abort, so it is no error in the log.
    const auto level = failure.status == EPX_ERROR_ABORTED ? log::Level::kInfo : log::Level::kError;
    if (logs_failure_) log::group().log(level, "{}: {}", name_of(failure.status), failure.message);
  }
  throw StatusError(failure_->status, failure_->message);
}

void StatusBoard::record(const Event& event) {
  const std::scoped_lock lock(mutex_);
  event_counts_[event.kind] += event.count;
  keep_first(event);
}

void StatusBoard::record(const EventCounts& counts, const std::optional<Event>& first) {
  const std::scoped_lock lock(mutex_);
  for (size_t kind = 0; kind < counts.size(); ++kind)
    event_counts_[kind] += counts[kind];
  if (first) keep_first(*first);
  const auto counted = std::ranges::find_if(counts, [](uint64_t count) { return count > 0; });
  if (first_event_ || counted == counts.end()) return;
  first_event_ = Event{static_cast<epx_event_kind>(counted - counts.begin()), EPX_OP_NONE, 0, *counted,
                       "events came faster than their records could be read: they are counted, but the record of the first "
                       "is missing"};
}

void StatusBoard::keep_first(const Event& event) {
  if (!first_event_ || precedes(event.kind, event.sequence, *first_event_)) first_event_ = event;
}

epx_group_report StatusBoard::report() {
  const std::scoped_lock lock(mutex_);
  epx_group_report report{};
  report.culprit = -1;

  std::string message;
  if (first_event_) {
    report.first_event = first_event_->kind;
    report.first_event_operation = first_event_->operation;
    report.first_event_sequence = first_event_->sequence;
    message = first_event_->message;
  }
  std::copy(event_counts_.begin(), event_counts_.end(), report.event_counts);
  if (failure_) {
    report.status = failure_->status;
    report.operation = failure_->operation;
    report.phase = failure_->phase;
    report.culprit = failure_->culprit;
    report.sequence = failure_->sequence;
    report.expected = failure_->expected;
    report.seen = failure_->seen;
    report.num_missing = static_cast<int32_t>(failure_->missing.size());
    std::copy_n(failure_->missing.begin(), std::min<size_t>(failure_->missing.size(), EPX_MAX_REPORTED_RANKS),
                report.missing);
    message = failure_->message;
  }
  message.copy(report.message, EPX_MAX_MESSAGE_BYTES - 1);

  event_counts_ = {};
  first_event_.reset();
  return report;
}

} // namespace epx
