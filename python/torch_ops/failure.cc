// SPDX-License-Identifier: Apache-2.0
#include "failure.h"

#include <stdexcept>
#include <utility>

namespace {
thread_local epx_status last_failure = EPX_SUCCESS;
}

void epx_torch::fail(epx_status status, const std::string& sentence) {
  const std::string copy = sentence; // may be the library's own buffer
  epx_set_last_error(copy.c_str());
  last_failure = status;
  throw std::runtime_error(copy);
}

int32_t epx_torch_take_failure() {
  return std::exchange(last_failure, EPX_SUCCESS);
}
