// SPDX-License-Identifier: Apache-2.0
// Failures inside the libraries are thrown as StatusError, and become an epx_status at the C boundary (c_boundary.h). Callers
// never see one: what they catch is Error, of the C++ API (epx.hpp).
#pragma once

#include <exception>
#include <new>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/resource_limits.h"
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

// Returns what reports to peers say of an exception that is no StatusError.
inline StatusError status_error_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return {EPX_ERROR_OUT_OF_MEMORY, OutOfMemoryText().get()};
  return {EPX_ERROR_INTERNAL, error.what()};
}

// Runs `body`. Whatever it throws is thrown on as a StatusError, so that one kind of failure is left to report to peers.
template <typename Body>
decltype(auto) as_status_error(Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const StatusError&) {
    throw;
  } catch (const std::exception& error) {
    throw status_error_of(error);
  }
}

} // namespace epx
