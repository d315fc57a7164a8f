// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/gpu/peer_memory.h"

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/gpu/gpu.h"

namespace epx::bench {
namespace {

// CUDA exports whole blocks of its allocator, and its manual recommends to allocate whole ones.
constexpr size_t kExportedBlock = size_t{2} << 20;

} // namespace

PeerMemory::PeerMemory(size_t bytes, const Peers& peers)
    : rank_(peers.rank()), memory_(static_cast<size_t>(peers.num_ranks()), nullptr) {
  bytes = (bytes + kExportedBlock - 1) / kExportedBlock * kExportedBlock;
  cudaIpcMemHandle_t mine{};
  peers.together([&] {
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, bytes);
    if (error != cudaSuccess)
      throw RuntimeError(fmt::format("cudaMalloc of {} bytes for peers: {}", bytes, cudaGetErrorString(error)));
    memory_[rank_] = static_cast<std::byte*>(memory);
    check_cuda(cudaMemset(memory, 0, bytes), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); // peers may store there as soon as they have opened it
    if (peers.num_ranks() > 1) check_cuda(cudaIpcGetMemHandle(&mine, memory), "cudaIpcGetMemHandle");
  });
  const std::vector<cudaIpcMemHandle_t> handles = peers.gather(mine);
  const Failure failure = attempt([&] {
    for (int rank = 0; rank < peers.num_ranks(); ++rank) {
      if (rank == rank_) continue;
      void* memory = nullptr;
      const cudaError_t error = cudaIpcOpenMemHandle(&memory, handles[rank], cudaIpcMemLazyEnablePeerAccess);
      if (error != cudaSuccess)
        throw RuntimeError(fmt::format(
            "cudaIpcOpenMemHandle of rank {}'s memory: {}; the GPUs must be of one machine, visible to all ranks, "
            "and able to access each other",
            rank, cudaGetErrorString(error)));
      memory_[rank] = static_cast<std::byte*>(memory);
    }
  });
  try {
    peers.agree(failure);
  } catch (...) {
    close();
    throw;
  }
}

PeerMemory::~PeerMemory() {
  close();
}

void PeerMemory::close() noexcept {
  for (size_t rank = 0; rank < memory_.size(); ++rank) {
    if (static_cast<int>(rank) == rank_ || memory_[rank] == nullptr) continue;
    cudaIpcCloseMemHandle(memory_[rank]);
    memory_[rank] = nullptr;
  }
}

void PeerMemory::release(const Peers& peers) {
  close();
  peers.barrier();
  check_cuda(cudaFree(memory_[rank_]), "cudaFree");
  memory_[rank_] = nullptr;
}

} // namespace epx::bench
