// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/gpu/gpu_monitor.h"

#include <array>
#include <limits>
#include <string>

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>

namespace epx::bench {
namespace {

constexpr int kSuccess = 0;
constexpr int kClockSm = 1, kTemperatureGpu = 0; // NVML_CLOCK_SM, NVML_TEMPERATURE_GPU
// nvmlClocksEventReason*: power cap 0x4, hardware slowdown 0x8, sync boost is none, heat by software 0x20 and hardware 0x40,
// power brake 0x80. An idle GPU and clocks that were set by hand are no throttling.
constexpr unsigned long long kThrottled = 0x4 | 0x8 | 0x20 | 0x40 | 0x80;
constexpr int64_t kSlowReadings = 10;

// The functions of NVML that are needed here; nvml.h is not needed to build ep_bench. The library stays loaded.
struct Nvml {
  int (*init)() = nullptr;
  int (*get_handle)(const char* pci_bus_id, void** device) = nullptr;
  int (*get_clock)(void* device, int type, unsigned* mhz) = nullptr;
  int (*get_power)(void* device, unsigned* milliwatts) = nullptr;
  int (*get_temperature)(void* device, int sensor, unsigned* degrees) = nullptr;
  int (*get_reasons)(void* device, unsigned long long* reasons) = nullptr;
  int (*get_name)(void* device, char* name, unsigned bytes) = nullptr;
  int (*get_driver)(char* version, unsigned bytes) = nullptr;

  Nvml() {
    void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    const auto find = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    };
    find("nvmlInit_v2", init);
    find("nvmlDeviceGetHandleByPciBusId_v2", get_handle);
    find("nvmlDeviceGetClockInfo", get_clock);
    find("nvmlDeviceGetPowerUsage", get_power);
    find("nvmlDeviceGetTemperature", get_temperature);
    find("nvmlDeviceGetCurrentClocksThrottleReasons", get_reasons);
    find("nvmlDeviceGetName", get_name);
    find("nvmlSystemGetDriverVersion", get_driver);
  }
};

const Nvml& nvml() {
  static const Nvml library;
  return library;
}

// Returns the address of the current device on its machine's PCI bus as NVML takes it; "" where CUDA does not tell.
std::string pci_bus_id() {
  int device = 0;
  std::array<int, 3> address{};
  const std::array attributes{cudaDevAttrPciDomainId, cudaDevAttrPciBusId, cudaDevAttrPciDeviceId};
  bool is_known = cudaGetDevice(&device) == cudaSuccess;
  for (size_t i = 0; is_known && i < attributes.size(); ++i)
    is_known = cudaDeviceGetAttribute(&address[i], attributes[i], device) == cudaSuccess;
  if (is_known) return fmt::format("{:08x}:{:02x}:{:02x}.0", address[0], address[1], address[2]);
  cudaGetLastError();
  return {};
}

} // namespace

GpuMonitor::GpuMonitor() {
  const std::string address = pci_bus_id();
  void* device = nullptr;
  if (!address.empty() && nvml().init != nullptr && nvml().get_handle != nullptr && nvml().init() == kSuccess &&
      nvml().get_handle(address.c_str(), &device) == kSuccess)
    device_ = device;
}

GpuReading GpuMonitor::read() {
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  GpuReading reading{kUnknown, kUnknown, kUnknown, -1, 0};
  if (device_ == nullptr) return reading;
  unsigned value = 0;
  unsigned long long reasons = 0;
  if (nvml().get_clock != nullptr && nvml().get_clock(device_, kClockSm, &value) == kSuccess) reading.sm_clock_mhz = value;
  if (nvml().get_reasons != nullptr && nvml().get_reasons(device_, &reasons) == kSuccess)
    reading.throttled = (reasons & kThrottled) != 0 ? 1 : 0;
  if (num_readings_++ % kSlowReadings != 0) return reading;
  if (nvml().get_power != nullptr && nvml().get_power(device_, &value) == kSuccess) reading.power_w = value / 1e3;
  if (nvml().get_temperature != nullptr && nvml().get_temperature(device_, kTemperatureGpu, &value) == kSuccess)
    reading.temperature_c = value;
  return reading;
}

void GpuMonitor::describe(MachineFacts& machine) const {
  if (device_ == nullptr) return;
  std::array<char, 128> text{};
  if (nvml().get_name != nullptr && nvml().get_name(device_, text.data(), text.size()) == kSuccess)
    machine.gpu = text.data();
  if (nvml().get_driver != nullptr && nvml().get_driver(text.data(), text.size()) == kSuccess) machine.driver = text.data();
}

} // namespace epx::bench
