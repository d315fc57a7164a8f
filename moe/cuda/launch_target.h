// SPDX-License-Identifier: Apache-2.0
// What host code tells the functions that launch kernels.
#pragma once

#include <cstddef>

#include "epx/epx.h"

namespace epx::moe {

struct LaunchTarget {
  epx_stream stream = nullptr; // a cudaStream_t
  int num_sms = 0;             // the most that the call may take; results do not depend on it
};

inline constexpr size_t kWorkspaceAlignment = 256; // bytes, as cudaMalloc aligns

constexpr size_t round_up_workspace(size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

} // namespace epx::moe
