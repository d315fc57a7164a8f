// SPDX-License-Identifier: Apache-2.0
// What machine a run had, and what its GPUs' clocks did meanwhile.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace epx::bench {

// A GpuReading is what NVML tells of one rank's GPU at one time; NaN where it does not.
struct GpuReading {
  double sm_clock_mhz;
  double power_w;
  double temperature_c;
  int32_t throttled; // 1: heat, power or a brake held the clocks down; 0: nothing did; -1: not known
  int32_t reserved;
};

struct Range {
  double min = 0, median = 0, max = 0;
};

// The ranges are over all ranks and timed iterations; empty where nothing is known.
struct Environment {
  std::optional<Range> sm_clock_mhz, power_w, temperature_c;
  std::optional<int64_t> throttled_samples; // iterations in which any rank's GPU was throttled
};

// `readings` [rank][iteration], as many from each rank.
Environment summarise(std::span<const GpuReading> readings, int num_ranks);

// A MachineFacts is of rank 0's machine.
struct MachineFacts {
  std::string host, cpu;
  int cores = 0;
  std::optional<std::string> gpu, driver, nccl; // empty on the host transport, and where nothing tells them
};

// Returns host, cpu and cores.
MachineFacts this_machine_facts();

} // namespace epx::bench
