// SPDX-License-Identifier: Apache-2.0
// Where calls of epx_moe.h compute: the calling thread's current device, and a stream of it.
#pragma once

#include <optional>

#include <torch/csrc/stable/accelerator.h>

#include <epx/epx_moe.h>

#include "registry.h"
#include "tensors.h"

namespace epx_torch {

inline epx_moe_cuda make_cuda(const Place& place) {
  epx_moe_cuda cuda = {};
  cuda.struct_size = sizeof(cuda);
  cuda.stream = current_stream(place);
  return cuda;
}

// Makes the GPU of the tensors the current device while the object lives.
struct OnDevice {
  explicit OnDevice(const Place& place) {
    if (place.is_cuda) guard.emplace(place.device_index);
  }
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
};

} // namespace epx_torch
