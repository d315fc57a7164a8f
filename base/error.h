// SPDX-License-Identifier: Apache-2.0
// Failures inside the libraries are thrown as StatusError, and become an epx_status at the C boundary (c_boundary.h). Callers
// never see one: what they catch is Error, of the C++ API (epx.hpp).
#pragma once

#include <exception>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "epx/epx.h"

namespace epx {

class StatusError : public std::exception {
public:
  StatusError(epx_status status, std::string message) : status_(status), message_(std::move(message)) {}

  epx_status status() const noexcept { return status_; }
  const std::string& message() const noexcept { return message_; }
  const char* what() const noexcept override { return message_.c_str(); }

private:
  epx_status status_;
  std::string message_;
};

// Throws StatusError: fail(EPX_ERROR_INVALID_ARGUMENT, "top_k is {}; it must be 1..{}", top_k, max_top_k).
template <typename... Args>
[[noreturn]] void fail(epx_status status, fmt::format_string<Args...> format, Args&&... args) {
  throw StatusError(status, fmt::format(format, std::forward<Args>(args)...));
}

} // namespace epx
