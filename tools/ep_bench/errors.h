// SPDX-License-Identifier: Apache-2.0
// ep_bench throws these errors; main turns them into an exit status.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "epx/epx.hpp"

namespace epx::bench {

inline constexpr int kExitFailure = 1; // a call failed or a result is wrong
inline constexpr int kExitUsage = 2;   // the command line, or a file that it names, is no good

class Error : public std::runtime_error {
public:
  Error(int exit_code, const std::string& message) : std::runtime_error(message), exit_code_(exit_code) {}

  int exit_code() const noexcept { return exit_code_; }

private:
  int exit_code_;
};

struct UsageError : Error {
  explicit UsageError(const std::string& message) : Error(kExitUsage, message) {}
};

struct RuntimeError : Error {
  explicit RuntimeError(const std::string& message) : Error(kExitFailure, message) {}
};

// Failure is how an action ended; an exit code of 0 means success.
struct Failure {
  int exit_code = 0;
  std::string message;
};

// Runs `action` and returns its failure, if it has one.
template <typename Action>
Failure attempt(Action&& action) noexcept {
  try {
    action();
    return {};
  } catch (const Error& error) {
    return {error.exit_code(), error.what()};
  } catch (const std::bad_alloc&) {
    return {kExitFailure, "out of memory"};
  } catch (const std::exception& error) {
    return {kExitFailure, describe(error)};
  }
}

// Thrown by all ranks at the same place (Peers::agree), so that one of them can speak for all.
struct AgreedError : Error {
  using Error::Error;
};

} // namespace epx::bench
