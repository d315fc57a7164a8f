// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/gpu_fabric.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

#include <cuda_runtime_api.h>
#include <dlfcn.h>

namespace epx {
namespace {

// The first version of nvmlGpuFabricInfo_t (nvml.h), which every driver since 535 fills in. nvml.h is not needed to build epx.
struct FabricInfo {
  unsigned char cluster[16];
  int status;
  unsigned int clique;
  unsigned char state;
};
constexpr unsigned char kFabricNotSupported = 0; // NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
constexpr int kNvmlSuccess = 0;

// The functions of NVML that tell of fabrics. The library is loaded once and stays loaded, as NCCL keeps it.
struct Nvml {
  int (*init)() = nullptr;
  int (*get_handle)(const char* pci_bus_id, void** device) = nullptr;
  int (*get_fabric)(void* device, FabricInfo* info) = nullptr;

  Nvml() {
    void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    get_handle = reinterpret_cast<int (*)(const char*, void**)>(dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"));
    get_fabric = reinterpret_cast<int (*)(void*, FabricInfo*)>(dlsym(library, "nvmlDeviceGetGpuFabricInfo"));
  }
  bool is_complete() const { return init != nullptr && get_handle != nullptr && get_fabric != nullptr; }
};

} // namespace

GpuFabric find_gpu_fabric() noexcept {
  const char* const enable = std::getenv("NCCL_MNNVL_ENABLE");
  if (enable != nullptr && std::string_view(enable) == "0") return {};
  static const Nvml nvml;
  std::array<char, 32> bus_id{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), device) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  void* handle = nullptr;
  FabricInfo info{};
  if (!nvml.is_complete() || nvml.init() != kNvmlSuccess || nvml.get_handle(bus_id.data(), &handle) != kNvmlSuccess ||
      nvml.get_fabric(handle, &info) != kNvmlSuccess || info.state == kFabricNotSupported)
    return {};
  GpuFabric fabric;
  std::copy_n(info.cluster, fabric.cluster.size(), fabric.cluster.begin()); // all zeros: one machine
  if (fabric.is_known()) fabric.clique = info.clique;
  return fabric;
}

} // namespace epx
