// SPDX-License-Identifier: Apache-2.0
// The movements of both layouts get damaged handle memory, and the calls must return and change nothing outside their output
// tensors. Tensors lie between guards in one allocation, which is compared as a whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "tests/support/group_run.h"

namespace epx::test {

// DamagedCall is a call of a rank whose handle memory is to be damaged.
struct DamagedCall {
  const GroupCase& group;
  int rank;
  int top_k;
  int64_t num_tokens;
  bool is_scatter;         // dispatch, combine_bwd
  int64_t rows_per_source; // M of a rank-major layer; -1: expert-major
  std::span<const std::byte> good, damaged;
};

struct DamageOptions {
  int64_t first = 0;    // damages are numbered: the same number and seed make the same damage
  int64_t count = 1000; // number of damages; each is one call
  uint64_t seed = 1;
  int64_t timeout_ms = 20'000;
  int percent_hard = 10; // damages that overwrite a run of bytes
  // Whether every rank gets all that it waits for. When it is given, what it denies is left to the hard damages, since a wait
  // in vain ends the group, and another one takes long to make.
  std::function<bool(const DamagedCall&)> keeps_waits;
};

struct DamageCounts {
  int64_t damages = 0;
  int64_t calls = 0;    // the calls with good handle memory too
  int64_t reported = 0; // reports of EPX_EVENT_HANDLE_MISMATCH
  int64_t timeouts = 0; // each ended a group
};

// Runs as one of the ranks. Throws CheckFailure.
DamageCounts run_damages(const RankContext& context, const DamageOptions& options);

} // namespace epx::test
