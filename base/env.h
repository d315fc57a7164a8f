// Every EPX_* environment variable, read once per process.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace epx {

struct Environment {
  // EPX_TIMEOUT_MS: default of epx_group_config.timeout_ms, milliseconds, > 0. `timeout_text` keeps what was set, so that a
  // value that is no positive number can be refused in words.
  std::optional<std::string> timeout_text;
  std::optional<int64_t> timeout_ms;

  // EPX_CHECK_HANDLE_MEM: 1: each movement checks the whole of its handle memory by a checksum; 0 (default): only the header.
  // `check_handle_mem_text` keeps what was set, so that another value can be refused in words.
  std::optional<std::string> check_handle_mem_text;
  std::optional<bool> check_handle_mem;

  // EPX_LOG: off, error, warn (default), info, debug. Log lines go to standard error.
  std::string log_level = "warn";
};

const Environment& environment();

} // namespace epx
