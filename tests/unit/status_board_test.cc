// SPDX-License-Identifier: Apache-2.0
#include "runtime/status_board.h"

#include <string>

#include <doctest/doctest.h>

namespace {

using epx::Event;
using epx::EventCounts;
using epx::StatusBoard;

Event event_of(epx_event_kind kind, uint64_t sequence) {
  return {kind, EPX_OP_PREPARE, sequence, 1, "event of call " + std::to_string(sequence)};
}

TEST_CASE("the first event is the lowest kind of the first call that had one, in whatever order they come") {
  for (const bool is_counted : {false, true}) {
    CAPTURE(is_counted);
    StatusBoard board;
    const auto record = [&](epx_event_kind kind, uint64_t sequence) {
      EventCounts counts{};
      counts[kind] = 1;
      if (is_counted)
        board.record(counts, event_of(kind, sequence));
      else
        board.record(event_of(kind, sequence));
    };
    record(EPX_EVENT_TOO_FEW_ROWS, 3);
    record(EPX_EVENT_OVERFLOW, 3);
    record(EPX_EVENT_BAD_INDEX, 4); // a later call
    record(EPX_EVENT_HANDLE_MISMATCH, 3);
    record(EPX_EVENT_BAD_SLICE, 3);
    const epx_group_report report = board.report();
    CHECK(report.first_event == EPX_EVENT_OVERFLOW);
    CHECK(report.first_event_sequence == 3);
    CHECK(report.message == std::string("event of call 3"));
    for (const epx_event_kind kind :
         {EPX_EVENT_BAD_INDEX, EPX_EVENT_OVERFLOW, EPX_EVENT_TOO_FEW_ROWS, EPX_EVENT_HANDLE_MISMATCH, EPX_EVENT_BAD_SLICE})
      CHECK(report.event_counts[kind] == 1);
    CHECK(board.report().event_counts[EPX_EVENT_OVERFLOW] == 0);
  }
}

TEST_CASE("an event whose record is missing is told by its kind") {
  StatusBoard board;
  EventCounts counts{};
  counts[EPX_EVENT_OVERFLOW] = 5;
  board.record(counts, std::nullopt);
  const epx_group_report report = board.report();
  CHECK(report.first_event == EPX_EVENT_OVERFLOW);
  CHECK(report.first_event_operation == EPX_OP_NONE);
  CHECK(report.event_counts[EPX_EVENT_OVERFLOW] == 5);
}

} // namespace
