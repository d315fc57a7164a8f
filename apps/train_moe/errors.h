// SPDX-License-Identifier: Apache-2.0
// train_moe throws these errors; main turns them into an exit status.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

#include <fmt/format.h>

#include "epx/epx.hpp"

namespace train {

inline constexpr int kExitFailure = 1; // a call failed, or training cannot go on
inline constexpr int kExitUsage = 2;   // the command line, or a file that it names, is no good

class Error : public std::runtime_error {
public:
  Error(int exit_code, const std::string& message) : std::runtime_error(message), exit_code_(exit_code) {}

  int exit_code() const noexcept { return exit_code_; }

private:
  int exit_code_;
};

// Thrown by all ranks at the same place, so that one of them can speak for all.
struct AgreedError : Error {
  using Error::Error;
};

template <typename... Args>
[[noreturn]] void fail(int exit_code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(exit_code, fmt::format(format, std::forward<Args>(args)...));
}

using epx::describe; // the text that train_moe prints for a failure

} // namespace train
