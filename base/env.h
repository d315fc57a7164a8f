// SPDX-License-Identifier: Apache-2.0
// Every EPX_* environment variable; the process reads each of them once.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace epx {

inline constexpr std::array<std::string_view, 5> kLogLevels = {"off", "error", "warn", "info", "debug"};

struct Environment {
  // EPX_TIMEOUT_MS is the default of epx_group_config.timeout_ms in milliseconds, > 0. `timeout_text` keeps the text that was
  // set, so that the error for a value that is no positive number can quote it.
  std::optional<std::string> timeout_text;
  std::optional<int64_t> timeout_ms;

  // EPX_CHECK_HANDLE_MEM=1 makes each movement check its whole handle memory by a checksum; with 0 (default) it checks only the
  // header. `check_handle_mem_text` keeps the text that was set, so that the error for any other value can quote it.
  std::optional<std::string> check_handle_mem_text;
  std::optional<bool> check_handle_mem;

  // EPX_LOG is one of kLogLevels; warn where it is not set or another text, which `log_text` keeps so that the error for it can
  // quote it. Log lines go to standard error.
  std::optional<std::string> log_text;
  std::string log_level = "warn";

  // EPX_TUNING has entries of the group's Tuning (runtime/tuning/tuning.h), "name=value,name=value", for measurements.
  std::string tuning;
};

const Environment& environment();

} // namespace epx
