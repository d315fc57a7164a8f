// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/lsa_pointers.h"

#include <array>

#include <cuda_runtime_api.h>
#include <nccl_device.h>

#include "base/cuda.h"
#include "transport/nccl/nccl_library.h"

namespace epx {
namespace {

// The compiler checks nccl_versions.cc for the release whose headers this file is compiled with.
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 29, 2)
static_assert(offsetof(ncclWindow_vidmem, lsaFlatBase) == 8 && offsetof(ncclWindow_vidmem, stride4G) == 24);
#endif

void ask_library(const NcclVersion& version, ncclWindow_t window, std::span<std::byte*> bases) {
  if (nccl().GetLsaDevicePointer == nullptr)
    fail(EPX_ERROR_SYSTEM, "NCCL {} is loaded, but has no ncclGetLsaDevicePointer", version.name);
  for (size_t rank = 0; rank < bases.size(); ++rank) {
    void* pointer = nullptr;
    if (const ncclResult_t result = nccl().GetLsaDevicePointer(window, 0, static_cast<int>(rank), &pointer);
        result != ncclSuccess)
      fail(EPX_ERROR_SYSTEM, "ncclGetLsaDevicePointer of LSA rank {}: {} ({})", rank, nccl().GetErrorString(result),
           nccl().GetLastError(nullptr));
    bases[rank] = static_cast<std::byte*>(pointer);
  }
}

void read_struct(const NcclWindowLayout& layout, ncclWindow_t window, std::span<std::byte*> bases) {
  std::array<std::byte, 64> bytes;
  if (layout.bytes > bytes.size())
    fail(EPX_ERROR_INTERNAL, "{} bytes of a window's struct do not fit into {}", layout.bytes, bytes.size());
  const CudaStream stream;
  check_cuda(cudaMemcpyAsync(bytes.data(), window, layout.bytes, cudaMemcpyDeviceToHost, stream.get()), "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
  for (size_t rank = 0; rank < bases.size(); ++rank)
    bases[rank] = lsa_base(layout, bytes, static_cast<int>(rank));
}

} // namespace

void find_lsa_pointers(const NcclVersion& version, ncclWindow_t window, std::span<std::byte*> bases) {
  if (version.window == nullptr)
    ask_library(version, window, bases);
  else
    read_struct(*version.window, window, bases);
}

} // namespace epx
