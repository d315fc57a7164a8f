// SPDX-License-Identifier: Apache-2.0
// Failures inside libepx_moe: thrown as epx::Error, turned into an epx_status at the C boundary. The module knows nothing of epx
// but its public headers.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "epx/epx.hpp"

namespace epx::moe {

// A bad argument, in one sentence with the names and the values.
template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(EPX_ERROR_INVALID_ARGUMENT, fmt::format(format, std::forward<Args>(args)...));
}

// Runs the body of `function`; what it throws becomes this thread's last error, with the function's name before it.
template <typename Body>
epx_status at_c_boundary(const char* function, Body&& body) noexcept {
  const auto report = [&](epx_status status, const char* what) {
    try {
      epx_set_last_error(fmt::format("{}: {}", function, what).c_str());
    } catch (...) { // no memory for the sentence
      epx_set_last_error(function);
    }
    return status;
  };
  try {
    std::forward<Body>(body)();
    return EPX_SUCCESS;
  } catch (const Error& error) {
    return report(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return report(EPX_ERROR_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::length_error&) { // more than a container can hold
    return report(EPX_ERROR_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception& error) {
    return report(EPX_ERROR_INTERNAL, error.what());
  } catch (...) {
    return report(EPX_ERROR_INTERNAL, "unknown exception");
  }
}

} // namespace epx::moe
