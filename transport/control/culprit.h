// SPDX-License-Identifier: Apache-2.0
// Decides which rank a group of several nodes fails for. Rank 0 decides alone, so that every rank names the same one.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>

#include "epx/epx.h"

namespace epx {

// What a verdict says: `failed` of Verdict::reporter, `died`, `silent`, `late` and `hangs` of Verdict::culprit.
enum class Cause : int32_t {
  died = 1,   // its connection has ended without a word
  silent = 2, // its heartbeats have ceased: its process is stopped, or its machine cannot be reached
  late = 3,   // it lives, and has not come to a call that others wait in
  failed = 4, // the reporter has ended the group with Verdict::status; the culprit is the rank that it blames, or -1
  hangs = 5,  // it says that its device hangs in a call, in a kernel that waits for no peer
  // No rank is the culprit:
  network = 6,        // transfers between nodes have failed, and no rank is known to have died, stopped, or not come
  out_of_sequence = 7 // two ranks make different calls at the same place in the sequence
};

const char* describe(Cause cause); // "has died", for instance

struct Verdict {
  int culprit; // -1: none
  Cause cause;
  epx_operation operation; // the call in which a rank waited; NONE where none did
  uint64_t sequence;       // of that call; else the last that the culprit has begun
  epx_status status = EPX_ERROR_TIMEOUT;
  int reporter = -1;   // failed, hangs, network: who has reported it; out_of_sequence: the rank that makes `operation`
  int other_rank = -1; // network: the other end of the connection, -1 if it is not known; out_of_sequence: the other rank
  epx_operation other_operation = EPX_OP_NONE; // out_of_sequence: what other_rank makes
};

// What rank 0 knows of a rank.
struct RankState {
  bool has_left = false;                 // it has destroyed its group
  bool has_died = false;                 // its connection ended before that
  std::chrono::milliseconds silence{0};  // since its last heartbeat
  uint64_t sequence = 0;                 // the last call that it has begun
  bool is_in_call = false;               // it has not ended that one; only devices tell
  epx_operation operation = EPX_OP_NONE; // of that call; only devices tell
};

enum class ReportKind : int32_t {
  timeout = 0,   // a wait has run out
  last = 1,      // the wait has outlasted the timeout of a node's kernels, which have found no culprit: rank 0 decides now
  connection = 2 // a connection of the rails is broken; it stays so
};

// `rank` cannot go on in a call.
struct WaitReport {
  int rank;
  int missing; // the first rank that it waits for, or to which the connection is broken; -1: it does not know
  epx_operation operation;
  uint64_t sequence;
  ReportKind kind = ReportKind::timeout;
};

// Returns who is to blame for a report: the first rank that died; else the one that has been silent longest, for more than
// `min_silence`; else the one that has come least far; and when all have come to the call, the rank that was waited for. The
// reporting rank is none of them. `states` [P].
//
// Where the missing rank is not known, ranks that are within a call may be victims as well: a rank has come too late when it is
// in no call, and has not begun the reported one. Returns none when there is no such rank. With the last report such a victim
// is too late as well, if it has not begun the reported call; and a connection breaks because of a rank that comes late only
// when that has left before the call.
std::optional<Verdict> find_culprit(std::span<const RankState> states, const WaitReport& report,
                                    std::chrono::milliseconds min_silence);

// The verdict on a report for which no rank is to blame: transfers between nodes have failed.
Verdict blame_network(const WaitReport& report);

// Returns a verdict when two ranks have begun different operations as the same call.
std::optional<Verdict> find_other_operation(std::span<const RankState> states);

} // namespace epx
