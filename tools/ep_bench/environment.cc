// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/environment.h"

#include <array>
#include <cmath>
#include <fstream>
#include <string_view>
#include <vector>

#include <unistd.h>

#include "tools/ep_bench/stats.h"

namespace epx::bench {
namespace {

std::optional<Range> range_of(std::span<const GpuReading> readings, double GpuReading::*field) {
  std::vector<double> values;
  for (const GpuReading& reading : readings)
    if (!std::isnan(reading.*field)) values.push_back(reading.*field);
  if (values.empty()) return std::nullopt;
  return Range{minimum(values), median(values), percentile(values, 100)};
}

// Returns the model of the first processor of /proc/cpuinfo, or what the architecture is.
std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
#if defined(__aarch64__)
  return "aarch64";
#else
  return "unknown";
#endif
}

} // namespace

Environment summarise(std::span<const GpuReading> readings, int num_ranks) {
  Environment environment;
  environment.sm_clock_mhz = range_of(readings, &GpuReading::sm_clock_mhz);
  environment.power_w = range_of(readings, &GpuReading::power_w);
  environment.temperature_c = range_of(readings, &GpuReading::temperature_c);
  const size_t iterations = readings.size() / static_cast<size_t>(num_ranks);
  bool is_known = false;
  int64_t throttled = 0;
  for (size_t iteration = 0; iteration < iterations; ++iteration) {
    bool is_throttled = false;
    for (size_t i = iteration; i < readings.size(); i += iterations) {
      is_known |= readings[i].throttled >= 0;
      is_throttled |= readings[i].throttled == 1;
    }
    throttled += is_throttled ? 1 : 0;
  }
  if (is_known) environment.throttled_samples = throttled;
  return environment;
}

MachineFacts this_machine_facts() {
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host = {"unknown"};
  return {.host = host.data(),
          .cpu = cpu_model(),
          .cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)),
          .gpu = {},
          .driver = {},
          .nccl = {}};
}

} // namespace epx::bench
