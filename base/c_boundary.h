// SPDX-License-Identifier: Apache-2.0
// The one guard between C++ code, which throws, and its C callers, which get a status.
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "base/error.h"
#include "epx/epx.h"

namespace epx {

// Runs `body` and returns EPX_SUCCESS; when it throws, sets this thread's last error and returns its status.
template <typename Body>
epx_status at_c_boundary(Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return EPX_SUCCESS;
  } catch (const StatusError& error) {
    epx_set_last_error(error.what());
    return error.status();
  } catch (const std::bad_alloc&) {
    epx_set_last_error("out of host memory");
    return EPX_ERROR_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    epx_set_last_error(error.what());
    return EPX_ERROR_INTERNAL;
  } catch (...) {
    epx_set_last_error("unknown exception");
    return EPX_ERROR_INTERNAL;
  }
}

} // namespace epx
