// SPDX-License-Identifier: Apache-2.0
// What travels on the control connection, in the byte order of the machines, which all ranks share.
#pragma once

#include <cstdint>

namespace epx {

enum class ControlKind : int32_t { heartbeat = 1, report = 2, verdict = 3, goodbye = 4 };

struct ControlMessage {
  static constexpr uint32_t kMagic = 0x6c74'7863; // "cxtl"

  uint32_t magic = kMagic;
  ControlKind kind = ControlKind::heartbeat;
  int32_t rank = 0;      // report: the missing rank; verdict: the culprit
  int32_t operation = 0; // report, verdict
  int32_t cause = 0;     // verdict
  int32_t reserved = 0;
  uint64_t sequence = 0; // heartbeat: the last call begun; report, verdict: the call
};
static_assert(sizeof(ControlMessage) == 32);

} // namespace epx
