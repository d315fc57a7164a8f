// SPDX-License-Identifier: Apache-2.0
#include "tests/moe/device.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
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

std::byte* allocate(size_t bytes) {
  void* memory = nullptr;
#if defined(EPX_WITH_CUDA)
  if (uses_cuda && cudaMallocManaged(&memory, bytes, cudaMemAttachGlobal) != cudaSuccess) throw std::bad_alloc();
#endif
  if (!uses_cuda) memory = std::aligned_alloc(kGuardBytes, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}

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
  static epx_moe_cuda place;
  place = {sizeof(place), cuda().stream, workspace.get(), workspace_bytes, cuda().errors, 0, 0};
  return &place;
}

void finish_call() {
  if (!on_cuda()) return;
  check(cudaStreamSynchronize(cuda().stream) == cudaSuccess, "cudaStreamSynchronize failed");
  const Report report = take_report();
  check(report.num_errors == 0, report.first.message);
}

Report take_report() {
  Report report{0, {}};
  if (!on_cuda()) return report;
  cudaStreamSynchronize(cuda().stream);
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
void finish_call() {}
Report take_report() {
  return {0, {}};
}
#endif

void* allocate_guarded(size_t bytes) {
  const size_t rounded = (bytes + kGuardBytes - 1) / kGuardBytes * kGuardBytes;
  std::byte* const memory = allocate(rounded + 2 * kGuardBytes);
  std::memset(memory, kGuard, rounded + 2 * kGuardBytes);
  std::memcpy(memory, &bytes, sizeof(bytes));
  return memory + kGuardBytes;
}

void free_guarded(void* memory) noexcept {
  if (memory == nullptr) return;
  auto* const bytes = static_cast<unsigned char*>(memory);
  const auto is_intact = [](unsigned char byte) { return byte == kGuard; };
  size_t size = 0;
  std::memcpy(&size, bytes - kGuardBytes, sizeof(size));
  const size_t rounded = (size + kGuardBytes - 1) / kGuardBytes * kGuardBytes;
  if (!std::all_of(bytes - kGuardBytes + sizeof(size), bytes, is_intact) ||
      !std::all_of(bytes + size, bytes + rounded + kGuardBytes, is_intact))
    ++num_broken_guards;
#if defined(EPX_WITH_CUDA)
  if (uses_cuda) {
    cudaFree(bytes - kGuardBytes);
    return;
  }
#endif
  std::free(bytes - kGuardBytes);
}

int64_t broken_guards() {
  return num_broken_guards;
}

} // namespace epx::test
