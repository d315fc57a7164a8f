// The group's status: one sticky failure, and the events that the group lived on with.
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

class StatusBoard {
public:
  // Throws the sticky failure, if there is one.
  void require_healthy() const;
  bool is_healthy() const;

  // Makes `failure` the sticky one unless there is one already, and throws the one that stands.
  [[noreturn]] void fail(const Failure& failure);

  void record(const Event& event);
  // Counts of some events, and the first of them if its record is known.
  void record(const EventCounts& counts, const std::optional<Event>& first);

  // What there is to report, without its struct_size. Clears the events.
  epx_group_report report();

private:
  mutable std::mutex mutex_; // epx_group_status may come from any thread
  std::optional<Failure> failure_;
  EventCounts event_counts_{};
  std::optional<Event> first_event_;
};

} // namespace epx
