// SPDX-License-Identifier: Apache-2.0
// A RailsExchange gathers records of all ranks of a group of several nodes, by the all-gather of its rails.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/error.h"
#include "transport/device_exchange.h"
#include "transport/rails.h"

namespace epx {

// It may be used while no call of the group is in progress, since all ranks use the rails in the same order.
class RailsExchange final : public DeviceExchange {
public:
  // `rails` must outlive the exchange. A rank that does not come within `timeout` ends the rails.
  RailsExchange(Rails& rails, int rank, int num_ranks, std::chrono::milliseconds timeout)
      : DeviceExchange(rank, num_ranks, timeout), rails_(rails) {}

private:
  void gather_bytes(const void* mine, void* all, int64_t bytes, cudaStream_t stream) override {
    rails_.all_gather(mine, all, bytes, stream);
  }
  void give_up() noexcept override { rails_.abort(); }
  void require_complete() const override {
    if (rails_.has_ended()) fail(EPX_ERROR_ABORTED, "the rails between the nodes of the group were aborted");
  }

  Rails& rails_;
};

} // namespace epx
