// SPDX-License-Identifier: Apache-2.0
// What the driver's management library (NVML) tells of a GPU's NVLink.
#pragma once

#include <span>

#include "transport/nccl/gpu_identity.h"
#include "transport/topology/rank_place.h"

namespace epx {

// Returns the fabric of the calling thread's current device, where one spans several machines. It is unknown where there is no
// such fabric, no NVML, or where NCCL is told not to use it (NCCL_MNNVL_ENABLE=0).
GpuFabric find_gpu_fabric() noexcept;

// Returns whether the GPU reaches the memory of all `peers` over NVLink. Those that NVML does not know are taken to be
// on other machines of its fabric, if it has one. Returns false where NVML does not tell.
bool reaches_over_nvlink(const GpuIdentity& gpu, std::span<const GpuIdentity> peers);

} // namespace epx
