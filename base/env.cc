// SPDX-License-Identifier: Apache-2.0
#include "base/env.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>

namespace epx {
namespace {

Environment read_environment() {
  Environment environment;
  if (const char* text = std::getenv("EPX_TIMEOUT_MS")) {
    environment.timeout_text = text;
    int64_t value = 0;
    const char* end = text + std::strlen(text);
    const auto parsed = std::from_chars(text, end, value);
    if (parsed.ec == std::errc() && parsed.ptr == end && value > 0) environment.timeout_ms = value;
  }
  if (const char* text = std::getenv("EPX_CHECK_HANDLE_MEM")) {
    const std::string value = environment.check_handle_mem_text.emplace(text);
    if (value == "0" || value == "1") environment.check_handle_mem = value == "1";
  }
  if (const char* text = std::getenv("EPX_LOG")) {
    const std::string value = environment.log_text.emplace(text);
    if (std::ranges::find(kLogLevels, value) != kLogLevels.end()) environment.log_level = value;
  }
  if (const char* text = std::getenv("EPX_TUNING")) environment.tuning = text;
  return environment;
}

} // namespace

const Environment& environment() {
  static const Environment& kEnvironment =
      *new Environment(read_environment()); // never destroyed: calls may outlive main()
  return kEnvironment;
}

} // namespace epx
