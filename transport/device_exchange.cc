// SPDX-License-Identifier: Apache-2.0
#include "transport/device_exchange.h"

#include <cstddef>

#include "transport/stream_wait.h"

namespace epx {

DeviceExchange::DeviceExchange(int rank, int num_ranks, std::chrono::milliseconds timeout)
    : rank_(rank), num_ranks_(num_ranks), timeout_(timeout),
      records_(make_device_memory<ExchangeRecord>(static_cast<size_t>(num_ranks) + 1)) {}

std::vector<ExchangeRecord> DeviceExchange::gather(ExchangeRecord mine) {
  mine.rank = rank_;
  if (num_ranks_ == 1) return {mine};
  ExchangeRecord* const own = records_.get() + num_ranks_;
  std::vector<ExchangeRecord> all(static_cast<size_t>(num_ranks_));
  check_cuda(cudaMemcpyAsync(own, &mine, sizeof(mine), cudaMemcpyHostToDevice, stream_.get()), "cudaMemcpyAsync");
  gather_bytes(own, records_.get(), sizeof(ExchangeRecord), stream_.get());
  try {
    wait_for_stream(stream_.get(), timeout_); // before the copy, which would wait for the stream without a limit
  } catch (const StatusError&) {
    give_up();
    throw;
  }
  check_cuda(cudaMemcpyAsync(all.data(), records_.get(), all.size() * sizeof(ExchangeRecord), cudaMemcpyDeviceToHost,
                             stream_.get()),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize");
  require_complete();
  throw_peer_failure(mine, all);
  return all;
}

} // namespace epx
