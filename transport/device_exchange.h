// SPDX-License-Identifier: Apache-2.0
// A DeviceExchange gathers records by an all-gather on the GPU, which its subclasses have.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "base/cuda.h"
#include "transport/exchange.h"

namespace epx {

class DeviceExchange : public Exchange {
protected:
  // `timeout` bounds the wait for each all-gather.
  DeviceExchange(int rank, int num_ranks, std::chrono::milliseconds timeout);

  std::vector<ExchangeRecord> gather(ExchangeRecord mine) final;

private:
  // Enqueues the all-gather of `bytes` bytes of each rank; `mine` and `all` are memory of the GPU. Not called for one rank.
  virtual void gather_bytes(const void* mine, void* all, int64_t bytes, cudaStream_t stream) = 0;
  // The all-gather has not ended in time, or has failed. Until the work on the stream ends, it uses memory of this object.
  virtual void give_up() noexcept {}
  // Throws where an all-gather that has ended may not have brought its data.
  virtual void require_complete() const {}

  int rank_;
  int num_ranks_;
  std::chrono::milliseconds timeout_;
  CudaStream stream_;
  DeviceMemory<ExchangeRecord> records_; // [num_ranks], then this rank's own
};

} // namespace epx
