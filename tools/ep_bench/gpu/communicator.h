// SPDX-License-Identifier: Apache-2.0
// A Communicator moves bytes between the GPUs of any ranks without the measured library, as NCCL does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <cuda_runtime_api.h>

#include "tools/ep_bench/gpu/gpu.h"
#include "tools/ep_bench/peers.h"

namespace epx::bench {

// A Transfer has the bytes that a rank sends to a peer and receives from it; where a number is 0, nothing travels.
struct Transfer {
  int peer;
  const std::byte* send;
  int64_t send_bytes;
  std::byte* receive;
  int64_t receive_bytes;
};

class Communicator {
public:
  virtual ~Communicator() = default;

  // Each enqueues on the stream, all ranks in the same order, and throws RuntimeError.

  // Makes all transfers at the same time; each has another peer, which may be the own rank, and which has the same sizes the
  // other way round.
  virtual void exchange(std::span<const Transfer> transfers, cudaStream_t stream) = 0;

  // Gathers `bytes` bytes of each rank into `all`, by rank.
  virtual void all_gather(const std::byte* mine, std::byte* all, int64_t bytes, cudaStream_t stream) = 0;

  // No rank's stream goes on before those of all ranks have come here.
  virtual void barrier(cudaStream_t stream) = 0;
};

// Returns a communicator of all ranks over NCCL, with calls ncclSend, ncclRecv, ncclAllGather and ncclAllReduce. `gpu` must
// outlive it. Collective. Throws AgreedError.
std::unique_ptr<Communicator> make_communicator(const Peers& peers, Gpu& gpu);

// Returns the version of the NCCL that is loaded, such as "2.28.3". Throws RuntimeError.
std::string nccl_version();

} // namespace epx::bench
