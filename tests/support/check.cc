// SPDX-License-Identifier: Apache-2.0
#include "tests/support/check.h"

#include <atomic>

#include "epx/epx.hpp"

namespace epx::test {

namespace {
std::atomic<int64_t> checks_made{0};
} // namespace

int64_t num_checks() {
  return checks_made.load(std::memory_order_relaxed);
}

void count_check() {
  checks_made.fetch_add(1, std::memory_order_relaxed);
}

void check_status(epx_status actual, epx_status expected, const std::string& call) {
  check(actual == expected, "{} returned {}, expected {}; last error: \"{}\"", call, epx_status_string(actual),
        epx_status_string(expected), epx_last_error());
}

void check_ok(epx_status status, const std::string& call) {
  check_status(status, EPX_SUCCESS, call);
}

std::string describe(const std::exception& failure) {
  if (const auto* error = dynamic_cast<const Error*>(&failure))
    return fmt::format("{} returned {}: {}", error->function(), epx_status_string(error->status()), error->what());
  return failure.what();
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void check_says(const std::string& text, const std::string& part) {
  check(contains(text, part), "\"{}\" does not say \"{}\"", text, part);
}

} // namespace epx::test
