// What a library for tests does on request, and libepx does not contain: it stands still inside a kernel, dawdles at random,
// and poisons staging after use. Compiled in with EPX_TEST_HOOKS.
#pragma once

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
  epx_operation stalls_in = EPX_OP_NONE; // every call of it stands still after it has arrived, until its group has failed
  epx_operation fails_to_launch = EPX_OP_NONE; // every launch of it fails
  uint32_t max_delay_ns = 0;                   // now and then, before a rank tells or waits
  bool scribbles_staging = false;
  bool alternates_paths = false; // every other prepare, or so, takes few tokens and routes for many
};

// From the environment of the process: EPX_TEST_STALLS_IN and EPX_TEST_FAILS_TO_LAUNCH (number of an epx_operation),
// EPX_TEST_MAX_DELAY_NS, EPX_TEST_SCRIBBLES_STAGING, EPX_TEST_ALTERNATES_PATHS.
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

} // namespace epx::cuda
