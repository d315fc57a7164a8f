// SPDX-License-Identifier: Apache-2.0
// A GpuMonitor reads clocks, power and temperature of the calling thread's GPU by NVML.
#pragma once

#include "tools/ep_bench/environment.h"

namespace epx::bench {

// NVML is opened where the machine has it; without it nothing is known, and nothing fails.
class GpuMonitor {
public:
  GpuMonitor();

  // Takes some tens of microseconds of the host, and none of the GPU. Power and temperature, which change slowly and take
  // longer, are read in every tenth call only.
  GpuReading read();

  // Sets the GPU's model, and the versions of the driver and of NCCL.
  void describe(MachineFacts& machine) const;

private:
  void* device_ = nullptr; // nvmlDevice_t; null: not known
  int64_t num_readings_ = 0;
};

} // namespace epx::bench
