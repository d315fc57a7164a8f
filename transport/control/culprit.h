// SPDX-License-Identifier: Apache-2.0
// Decides which rank a group of several nodes fails for. Rank 0 decides alone, so that every rank names the same one.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>

#include "epx/epx.h"

namespace epx {

// Why a rank is the culprit.
enum class Cause : int32_t {
  died = 1,   // its connection has ended without a word
  silent = 2, // its heartbeats have ceased: its process is stopped, or its machine cannot be reached
  late = 3,   // it lives, and has not come to a call that others wait in
  failed = 4  // it has ended the group for a reason of its own, which Verdict::status tells
};

const char* describe(Cause cause); // "has died", for instance

struct Verdict {
  int culprit;
  Cause cause;
  epx_operation operation; // the call in which a rank waited; NONE where none did
  uint64_t sequence;       // of that call; else the last that the culprit has begun
  epx_status status = EPX_ERROR_TIMEOUT;
};

// What rank 0 knows of a rank.
struct RankState {
  bool has_left = false;                // it has destroyed its group
  bool has_died = false;                // its connection ended before that
  std::chrono::milliseconds silence{0}; // since its last heartbeat
  uint64_t sequence = 0;                // the last call that it has begun
  bool is_in_call = false;              // it has not ended that one; only devices tell
};

// A wait that ran out on `rank`.
struct TimeoutReport {
  int rank;
  int missing; // the first rank that it waited for; -1: it does not know for whom it waits
  epx_operation operation;
  uint64_t sequence;
};

// Returns who caused the timeout: the first rank that died; else the one that has been silent longest, for more than
// `min_silence`; else the one that has come least far; and when all have come to the call, the rank that was waited for. The
// reporting rank is none of them. `states` [P].
//
// Where the missing rank is not known, ranks that are within a call may be victims as well: a rank has come too late when it is
// in no call, and has not begun the reported one. Returns none when there is no such rank.
std::optional<Verdict> find_culprit(std::span<const RankState> states, const TimeoutReport& report,
                                    std::chrono::milliseconds min_silence);

} // namespace epx
