// SPDX-License-Identifier: Apache-2.0
// What travels on the control connection, in the byte order of the machines, which all ranks share.
#pragma once

#include <cstdint>

namespace epx {

enum class ControlKind : int32_t { heartbeat = 1, report = 2, verdict = 3, goodbye = 4, failure = 5 };

struct ControlMessage {
  static constexpr uint32_t kMagic = 0x6c74'7863; // "cxtl"

  uint32_t magic = kMagic;
  ControlKind kind = ControlKind::heartbeat;
  int32_t rank = 0;            // report: the missing rank, -1 if it is not known; failure, verdict: the culprit, -1 if none
  int32_t operation = 0;       // heartbeat: of the last call begun, if it is known; report, failure, verdict
  int32_t cause = 0;           // failure, verdict
  int32_t value = 0;           // heartbeat: 1 while in that call; report: ReportKind; failure, verdict: epx_status
  uint64_t sequence = 0;       // heartbeat, goodbye: the last call begun; report, failure, verdict: the call
  int32_t reporter = -1;       // failure, verdict: Verdict::reporter
  int32_t other_rank = -1;     // failure, verdict: Verdict::other_rank
  int32_t other_operation = 0; // failure, verdict: Verdict::other_operation
  int32_t reserved = 0;
};
static_assert(sizeof(ControlMessage) == 48);

} // namespace epx
