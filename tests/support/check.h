// SPDX-License-Identifier: Apache-2.0
// These checks work on any thread and in any process: a failed one throws CheckFailure, and the code that runs the ranks
// reports it with the rank's number (doctest's own macros are for the main thread).
#pragma once

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "epx/epx.h"
#include "tests/support/exit_codes.h"

namespace epx::test {

class CheckFailure : public std::runtime_error {
public:
  using std::runtime_error::runtime_error;
};

// Skipped carries why this machine cannot run a test. main() prints it and exits with kSkippedExitCode.
class Skipped : public std::runtime_error {
public:
  using std::runtime_error::runtime_error;
};

// Returns the number of checks made so far in this process, so that a test can require that there were any.
int64_t num_checks();
void count_check();

template <typename... Args>
void check(bool ok, fmt::format_string<Args...> format, Args&&... args) {
  count_check();
  if (!ok) throw CheckFailure(fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
[[noreturn]] void fail_check(fmt::format_string<Args...> format, Args&&... args) {
  throw CheckFailure(fmt::format(format, std::forward<Args>(args)...));
}

template <typename T>
void check_equal(const T& actual, const T& expected, const std::string& what) {
  check(actual == expected, "{} is {}, expected {}", what, actual, expected);
}

// The message carries epx_last_error().
void check_status(epx_status actual, epx_status expected, const std::string& call);
void check_ok(epx_status status, const std::string& call);

// Returns the text that a test prints for a failure; for a call through epx.hpp it has the function and the status.
std::string describe(const std::exception& failure);

// True when `text` contains `part`.
bool contains(const std::string& text, const std::string& part);
void check_says(const std::string& text, const std::string& part); // that it does

} // namespace epx::test
