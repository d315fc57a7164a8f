// SPDX-License-Identifier: Apache-2.0
// A RailsExchange gathers records of all ranks of a group of several nodes, by the all-gather of its rails.
#pragma once

#include <chrono>
#include <vector>

#include "base/cuda.h"
#include "transport/exchange.h"
#include "transport/rails.h"

namespace epx {

// It may be used while no call of the group is in progress, since all ranks use the rails in the same order.
class RailsExchange final : public Exchange {
public:
  // `rails` must outlive the exchange. A rank that does not come within `timeout` ends the rails.
  RailsExchange(Rails& rails, int rank, int num_ranks, std::chrono::milliseconds timeout)
      : rails_(rails), rank_(rank), num_ranks_(num_ranks), timeout_(timeout),
        records_(make_device_memory<ExchangeRecord>(static_cast<size_t>(num_ranks) + 1)) {}

protected:
  std::vector<ExchangeRecord> gather(ExchangeRecord mine) override;

private:
  Rails& rails_;
  int rank_;
  int num_ranks_;
  std::chrono::milliseconds timeout_;
  CudaStream stream_;
  DeviceMemory<ExchangeRecord> records_; // [num_ranks], then this rank's own
};

} // namespace epx
