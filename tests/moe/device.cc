// SPDX-License-Identifier: Apache-2.0
#include "tests/moe/device.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#if defined(EPX_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace epx::test {
namespace {

constexpr size_t kGuardBytes = 256; // also the alignment
constexpr unsigned char kGuard = 0xC3;

bool uses_cuda = false;
thread_local bool stays_on_host = false;
std::atomic<int64_t> num_broken_guards = 0;

#if defined(EPX_WITH_CUDA)
void check(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

// The stream and the record of all calls.
struct Cuda {
  cudaStream_t stream = nullptr;
  epx_moe_errors errors = nullptr;
  int64_t errors_taken = 0;

  Cuda() {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "cudaStreamCreateWithFlags failed");
    check(epx_moe_errors_create(&errors) == EPX_SUCCESS, epx_last_error());
  }
};
Cuda& cuda() {
  static Cuda& instance = *new Cuda; // the program ends with it
  return instance;
}
#endif

#if defined(EPX_WITH_CUDA)
// An allocation of the host, guard zones included, and its copy on the device, made when a call first needs it.
struct Allocation {
  size_t bytes;
  std::byte* on_device = nullptr;
};

// By the address on the host.
std::map<std::byte*, Allocation>& allocations() {
  static auto& instance = *new std::map<std::byte*, Allocation>; // the program ends with it
  return instance;
}

void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  check(cudaMemcpyAsync(to, from, bytes, kind, cuda().stream) == cudaSuccess, "cudaMemcpyAsync failed");
}

void synchronize() {
  check(cudaStreamSynchronize(cuda().stream) == cudaSuccess, "cudaStreamSynchronize failed");
}
#endif

} // namespace

bool on_cuda() {
  return uses_cuda && !stays_on_host;
}

OnHost::OnHost() : before_(stays_on_host) {
  stays_on_host = true;
}
OnHost::~OnHost() {
  stays_on_host = before_;
}

#if defined(EPX_WITH_CUDA)
bool use_cuda() {
  int count = 0;
  uses_cuda = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  return uses_cuda;
}

const epx_moe_cuda* place_of_call(size_t workspace_bytes) {
  if (!on_cuda()) return nullptr;
  using Owner = std::unique_ptr<void, void (*)(void*)>;
  static Owner& workspace = *new Owner{nullptr, free_guarded}; // the program ends with it
  workspace.reset(workspace_bytes > 0 ? allocate_guarded(workspace_bytes) : nullptr);
  if (workspace_bytes > 0) std::memset(workspace.get(), 0x77, workspace_bytes);
  copy_to_device();
  static epx_moe_cuda place;
  place = {sizeof(place), cuda().stream, address_for_call(workspace.get()), workspace_bytes, cuda().errors, 0, 0};
  return &place;
}

void* address_for_call(void* memory) {
  if (memory == nullptr || !on_cuda()) return memory;
  auto* const bytes = static_cast<std::byte*>(memory);
  auto& [base, allocation] = *std::prev(allocations().upper_bound(bytes));
  if (allocation.on_device == nullptr) {
    void* device = nullptr;
    if (cudaMalloc(&device, allocation.bytes) != cudaSuccess) throw std::bad_alloc();
    allocation.on_device = static_cast<std::byte*>(device);
  }
  copy(allocation.on_device, base, allocation.bytes, cudaMemcpyHostToDevice);
  synchronize();
  return allocation.on_device + (bytes - base);
}

void copy_to_device() {
  for (const auto& [base, allocation] : allocations())
    if (allocation.on_device != nullptr) copy(allocation.on_device, base, allocation.bytes, cudaMemcpyHostToDevice);
  synchronize();
}

void copy_from_device() {
  for (const auto& [base, allocation] : allocations())
    if (allocation.on_device != nullptr) copy(base, allocation.on_device, allocation.bytes, cudaMemcpyDeviceToHost);
  synchronize();
}

void finish_call() {
  if (!on_cuda()) return;
  const Report report = take_report();
  check(report.num_errors == 0, report.first.message);
}

Report take_report() {
  Report report{0, {}};
  if (!on_cuda()) return report;
  copy_from_device();
  report.first.struct_size = sizeof(report.first);
  check(epx_moe_errors_read(cuda().errors, &report.first) == EPX_SUCCESS, epx_last_error());
  report.num_errors = report.first.num_errors - cuda().errors_taken;
  if (report.num_errors == 0) return report;
  epx_moe_errors_destroy(cuda().errors); // the next error is the first one again
  check(epx_moe_errors_create(&cuda().errors) == EPX_SUCCESS, epx_last_error());
  return report;
}
#else
bool use_cuda() {
  return false;
}
const epx_moe_cuda* place_of_call(size_t) {
  return nullptr;
}
void* address_for_call(void* memory) {
  return memory;
}
void copy_to_device() {}
void finish_call() {}
Report take_report() {
  return {0, {}};
}
#endif

void* allocate_guarded(size_t bytes) {
  const size_t rounded = (bytes + kGuardBytes - 1) / kGuardBytes * kGuardBytes;
  auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kGuardBytes, rounded + 2 * kGuardBytes));
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, kGuard, rounded + 2 * kGuardBytes);
  std::memcpy(memory, &bytes, sizeof(bytes));
#if defined(EPX_WITH_CUDA)
  if (uses_cuda) allocations().emplace(memory, Allocation{rounded + 2 * kGuardBytes});
#endif
  return memory + kGuardBytes;
}

void free_guarded(void* memory) noexcept {
  if (memory == nullptr) return;
  auto* const bytes = static_cast<unsigned char*>(memory);
  auto* const base = static_cast<std::byte*>(memory) - kGuardBytes;
  const auto is_intact = [](unsigned char byte) { return byte == kGuard; };
  size_t size = 0;
  std::memcpy(&size, bytes - kGuardBytes, sizeof(size));
  const size_t rounded = (size + kGuardBytes - 1) / kGuardBytes * kGuardBytes;
  if (!std::all_of(bytes - kGuardBytes + sizeof(size), bytes, is_intact) ||
      !std::all_of(bytes + size, bytes + rounded + kGuardBytes, is_intact))
    ++num_broken_guards;
#if defined(EPX_WITH_CUDA)
  if (const auto allocation = allocations().find(base); allocation != allocations().end()) {
    cudaFree(allocation->second.on_device);
    allocations().erase(allocation);
  }
#endif
  std::free(base);
}

int64_t broken_guards() {
  return num_broken_guards;
}

} // namespace epx::test
