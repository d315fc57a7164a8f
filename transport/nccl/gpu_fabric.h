// SPDX-License-Identifier: Apache-2.0
// Finds the NVLink fabric of a GPU where one spans several machines.
#pragma once

#include "transport/topology/rank_place.h"

namespace epx {

// Returns the fabric of the calling thread's current device, as the driver's management library (NVML) tells it. It is unknown
// where there is no such fabric, no NVML, or where NCCL is told not to use it (NCCL_MNNVL_ENABLE=0).
GpuFabric find_gpu_fabric() noexcept;

} // namespace epx
