// SPDX-License-Identifier: Apache-2.0
// The one guard between C++ code, which throws, and its C callers, which get a status.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "base/resource_limits.h"
#include "epx/epx.h"

namespace epx {

// Runs `body` and returns EPX_SUCCESS; when it throws, sets this thread's last error and returns its status. The last error is
// what was thrown, after the name of `function` unless that is NULL.
template <typename Body>
epx_status at_c_boundary(const char* function, Body&& body) noexcept {
  const auto report = [&](epx_status status, const char* what) {
    try {
      epx_set_last_error(function == nullptr ? what : fmt::format("{}: {}", function, what).c_str());
    } catch (...) { // no memory for the sentence
      epx_set_last_error(function);
    }
    return status;
  };
  try {
    std::forward<Body>(body)();
    return EPX_SUCCESS;
  } catch (const StatusError& error) {
    return report(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return report(EPX_ERROR_OUT_OF_MEMORY, OutOfMemoryText().get());
  } catch (const std::length_error&) { // more than a container can hold
    return report(EPX_ERROR_OUT_OF_MEMORY, OutOfMemoryText().get());
  } catch (const std::exception& error) {
    return report(EPX_ERROR_INTERNAL, error.what());
  } catch (...) {
    return report(EPX_ERROR_INTERNAL, "unknown exception");
  }
}

template <typename Body>
epx_status at_c_boundary(Body&& body) noexcept {
  return at_c_boundary(nullptr, std::forward<Body>(body));
}

} // namespace epx
