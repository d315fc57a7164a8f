// SPDX-License-Identifier: Apache-2.0
// An NcclExchange gathers records by ncclAllGather on the GPU.
#pragma once

#include <chrono>
#include <cstdint>

#include "transport/device_exchange.h"
#include "transport/nccl/communicator.h"

namespace epx {

class NcclExchange final : public DeviceExchange {
public:
  // `communicator` may be NULL for one rank; it must outlive the exchange.
  NcclExchange(Communicator* communicator, int rank, int num_ranks, std::chrono::milliseconds timeout)
      : DeviceExchange(rank, num_ranks, timeout), communicator_(communicator) {}

private:
  void gather_bytes(const void* mine, void* all, int64_t bytes, cudaStream_t stream) override;
  void give_up() noexcept override { communicator_->abort(); } // else NCCL's kernel would wait for ever

  Communicator* communicator_;
};

} // namespace epx
