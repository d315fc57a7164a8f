// SPDX-License-Identifier: Apache-2.0
// The StatusBoard keeps a group's status: one sticky error, and the events of recoverable errors.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "epx/epx.h"

namespace epx {

struct Failure {
  epx_status status = EPX_SUCCESS;
  epx_operation operation = EPX_OP_NONE;
  epx_phase phase = EPX_PHASE_NONE;
  int culprit = -1;
  uint64_t sequence = 0;
  uint64_t expected = 0;
  uint64_t seen = 0;
  std::vector<int> missing;
  std::string message;
};

using EventCounts = std::array<uint64_t, EPX_MAX_EVENT_KINDS>; // as epx_group_report.event_counts

struct Event {
  epx_event_kind kind;
  epx_operation operation;
  uint64_t sequence;
  uint64_t count; // routes, or calls
  std::string message;
};

// Returns whether an event replaces `recorded` as the report's first event. Blocks of a kernel report the kinds of one call in
// any order; the lowest kind is kept, so that the same calls always give the same report.
inline bool precedes(epx_event_kind kind, uint64_t sequence, const Event& recorded) {
  return sequence == recorded.sequence && kind < recorded.kind;
}

class StatusBoard {
public:
  // logs_failure: false where another board gets the same failure and logs it.
  explicit StatusBoard(bool logs_failure = true) : logs_failure_(logs_failure) {}

  // Throws the sticky error, if there is one.
  void require_healthy() const;
  bool is_healthy() const;
  std::optional<Failure> failure() const;

  // Makes `failure` the sticky error unless there is one already, and throws the one that is kept.
  [[noreturn]] void fail(const Failure& failure);

  void record(const Event& event);
  // Adds the counts of some events, and keeps the first of them if its record is known.
  void record(const EventCounts& counts, const std::optional<Event>& first);

  // Returns the report without its struct_size, and clears the events.
  epx_group_report report();

private:
  void keep_first(const Event& event);

  const bool logs_failure_;
  mutable std::mutex mutex_; // any thread may call epx_group_status
  std::optional<Failure> failure_;
  EventCounts event_counts_{};
  std::optional<Event> first_event_;
};

} // namespace epx
