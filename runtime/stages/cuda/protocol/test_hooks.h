// SPDX-License-Identifier: Apache-2.0
// Fault injection for tests: a kernel stalls, waits for injected delays at random times, and scribbles over staging after use.
// It is compiled in with EPX_TEST_HOOKS, and libepx does not contain it.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>

#include "epx/epx.h"

namespace epx::cuda {

#if defined(EPX_TEST_HOOKS)
constexpr bool kTestHooks = true;
#else
constexpr bool kTestHooks = false;
#endif

struct TestHooks {
  epx_operation stalls_in =
      EPX_OP_NONE; // each call of this operation stalls after the entry barrier until its group has failed
  epx_operation fails_to_launch = EPX_OP_NONE; // each launch of this operation fails
  uint32_t max_delay_ns = 0;                   // injected at random times before a rank signals or waits
  bool scribbles_staging = false;
  // About every other call that makes a plan takes the high-throughput path whatever the number of tokens is, and in about
  // every other call the receivers of scatter take batches of tokens. Independently of that, about every other call does as if
  // warps had many rows to take (dispatch_rank_major), or many tiles to send on the low-latency path.
  bool alternates_paths = false;
};

// Reads the hooks from the environment of the process: EPX_TEST_STALLS_IN and EPX_TEST_FAILS_TO_LAUNCH (the number of an
// epx_operation), EPX_TEST_MAX_DELAY_NS, EPX_TEST_SCRIBBLES_STAGING, EPX_TEST_ALTERNATES_PATHS.
inline TestHooks read_test_hooks() {
  TestHooks hooks;
  if constexpr (kTestHooks) {
    const auto number = [](const char* variable) {
      const char* const text = std::getenv(variable);
      return text != nullptr ? std::atol(text) : 0;
    };
    hooks.stalls_in = static_cast<epx_operation>(number("EPX_TEST_STALLS_IN"));
    hooks.fails_to_launch = static_cast<epx_operation>(number("EPX_TEST_FAILS_TO_LAUNCH"));
    hooks.max_delay_ns = static_cast<uint32_t>(number("EPX_TEST_MAX_DELAY_NS"));
    hooks.scribbles_staging = number("EPX_TEST_SCRIBBLES_STAGING") != 0;
    hooks.alternates_paths = number("EPX_TEST_ALTERNATES_PATHS") != 0;
  }
  return hooks;
}

// The hooks of the host. All ranks have EPX_TEST_WITHOUT_BOARD, or none: they do as if they could not map each other's memory.
inline bool is_without_board() {
  return kTestHooks && std::getenv("EPX_TEST_WITHOUT_BOARD") != nullptr;
}

// A rank of several nodes ends its work EPX_TEST_VERDICT_DELAY_MS later than it learns of a verdict.
inline std::chrono::milliseconds test_verdict_delay() {
  if constexpr (kTestHooks)
    if (const char* const text = std::getenv("EPX_TEST_VERDICT_DELAY_MS"))
      return std::chrono::milliseconds(std::atol(text));
  return std::chrono::milliseconds(0);
}

} // namespace epx::cuda
