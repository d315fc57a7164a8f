// SPDX-License-Identifier: Apache-2.0
// The ready-made bootstraps (files, MPI) run their callbacks through this guard.
#pragma once

#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/resource_limits.h"
#include "epx/epx.h"

namespace epx {

// Runs `body` inside a callback of epx_bootstrap. No exception crosses into C: a failure becomes a status and a `message`.
template <typename Body>
epx_status run_callback(char* message, size_t message_bytes, Body&& body) noexcept {
  const auto set_message = [&](std::string_view text) {
    if (message == nullptr || message_bytes == 0) return;
    message[text.copy(message, message_bytes - 1)] = '\0';
  };
  try {
    std::forward<Body>(body)();
    return EPX_SUCCESS;
  } catch (const StatusError& error) {
    set_message(error.message());
    return error.status();
  } catch (const std::bad_alloc&) {
    set_message(OutOfMemoryText().get());
    return EPX_ERROR_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    set_message(error.what());
    return EPX_ERROR_INTERNAL;
  } catch (...) {
    set_message("unknown exception");
    return EPX_ERROR_INTERNAL;
  }
}

} // namespace epx
