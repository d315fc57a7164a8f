// SPDX-License-Identifier: Apache-2.0
// An NcclExchange gathers records by ncclAllGather on the GPU.
#pragma once

#include <chrono>
#include <vector>

#include "base/cuda.h"
#include "transport/exchange.h"
#include "transport/nccl/communicator.h"

namespace epx {

class NcclExchange final : public Exchange {
public:
  // `communicator` may be NULL for one rank; it must outlive the exchange.
  NcclExchange(Communicator* communicator, int rank, int num_ranks, std::chrono::milliseconds timeout);

protected:
  std::vector<ExchangeRecord> gather(ExchangeRecord mine) override;

private:
  Communicator* communicator_;
  int rank_;
  int num_ranks_;
  std::chrono::milliseconds timeout_;
  CudaStream stream_;
  DeviceMemory<ExchangeRecord> records_; // [num_ranks], then this rank's own
};

} // namespace epx
