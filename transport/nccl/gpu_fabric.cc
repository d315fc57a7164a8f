// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/gpu_fabric.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>

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
constexpr int kNvmlNotFound = 6;  // NVML_ERROR_NOT_FOUND
constexpr int kP2pCapsNvlink = 2; // NVML_P2P_CAPS_INDEX_NVLINK
constexpr int kP2pStatusOk = 0;   // NVML_P2P_STATUS_OK

// The functions of NVML that tell of NVLink. The library is loaded once and stays loaded, as NCCL keeps it.
struct Nvml {
  int (*init)() = nullptr;
  int (*get_handle)(const char* pci_bus_id, void** device) = nullptr;
  int (*get_fabric)(void* device, FabricInfo* info) = nullptr;
  int (*get_handle_by_uuid)(const char* uuid, void** device) = nullptr;
  int (*get_p2p_status)(void* device, void* other, int capability, int* status) = nullptr;

  Nvml() {
    void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    get_handle = reinterpret_cast<int (*)(const char*, void**)>(dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"));
    get_fabric = reinterpret_cast<int (*)(void*, FabricInfo*)>(dlsym(library, "nvmlDeviceGetGpuFabricInfo"));
    get_handle_by_uuid = reinterpret_cast<int (*)(const char*, void**)>(dlsym(library, "nvmlDeviceGetHandleByUUID"));
    get_p2p_status = reinterpret_cast<int (*)(void*, void*, int, int*)>(dlsym(library, "nvmlDeviceGetP2PStatus"));
  }
  bool tells_fabrics() const { return init != nullptr && get_handle != nullptr && get_fabric != nullptr; }
  bool tells_links() const { return init != nullptr && get_handle_by_uuid != nullptr && get_p2p_status != nullptr; }
};

const Nvml& nvml() {
  static const Nvml library;
  return library;
}

// As NVML writes it: GPU-8d1f9c1e-....
std::string uuid_text(const GpuIdentity& gpu) {
  std::string text = "GPU";
  for (size_t i = 0; i < gpu.uuid.size(); ++i)
    text += fmt::format("{}{:02x}", i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                        static_cast<unsigned char>(gpu.uuid[i]));
  return text;
}

} // namespace

GpuFabric find_gpu_fabric() noexcept {
  const char* const enable = std::getenv("NCCL_MNNVL_ENABLE");
  if (enable != nullptr && std::string_view(enable) == "0") return {};
  std::array<char, 32> bus_id{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), device) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  void* handle = nullptr;
  FabricInfo info{};
  if (!nvml().tells_fabrics() || nvml().init() != kNvmlSuccess ||
      nvml().get_handle(bus_id.data(), &handle) != kNvmlSuccess || nvml().get_fabric(handle, &info) != kNvmlSuccess ||
      info.state == kFabricNotSupported)
    return {};
  GpuFabric fabric;
  std::copy_n(info.cluster, fabric.cluster.size(), fabric.cluster.begin()); // all zeros: one machine
  if (fabric.is_known()) fabric.clique = info.clique;
  return fabric;
}

bool reaches_over_nvlink(const GpuIdentity& gpu, std::span<const GpuIdentity> peers) {
  if (std::ranges::all_of(peers, [&](const GpuIdentity& peer) { return peer.uuid == gpu.uuid; })) return true;
  void* handle = nullptr;
  if (!nvml().tells_links() || nvml().init() != kNvmlSuccess ||
      nvml().get_handle_by_uuid(uuid_text(gpu).c_str(), &handle) != kNvmlSuccess)
    return false;
  return std::all_of(peers.begin(), peers.end(), [&](const GpuIdentity& peer) {
    if (peer.uuid == gpu.uuid) return true;
    void* peer_handle = nullptr;
    int status = -1;
    const int found = nvml().get_handle_by_uuid(uuid_text(peer).c_str(), &peer_handle);
    if (found == kNvmlNotFound) return find_gpu_fabric().is_known(); // of another machine, or out of this process's sight
    return found == kNvmlSuccess && nvml().get_p2p_status(handle, peer_handle, kP2pCapsNvlink, &status) == kNvmlSuccess &&
           status == kP2pStatusOk;
  });
}

} // namespace epx
