// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/nccl_exchange.h"

#include "transport/nccl/nccl_library.h"
#include "transport/stream_wait.h"

namespace epx {

NcclExchange::NcclExchange(Communicator* communicator, int rank, int num_ranks, std::chrono::milliseconds timeout)
    : communicator_(communicator), rank_(rank), num_ranks_(num_ranks), timeout_(timeout),
      records_(make_device_memory<ExchangeRecord>(static_cast<size_t>(num_ranks) + 1)) {}

std::vector<ExchangeRecord> NcclExchange::gather(ExchangeRecord mine) {
  mine.rank = rank_;
  if (num_ranks_ == 1) return {mine};
  ExchangeRecord* const own = records_.get() + num_ranks_;
  std::vector<ExchangeRecord> all(static_cast<size_t>(num_ranks_));
  check_cuda(cudaMemcpyAsync(own, &mine, sizeof(mine), cudaMemcpyHostToDevice, stream_.get()), "cudaMemcpyAsync");
  communicator_->wait(
      nccl().AllGather(own, records_.get(), sizeof(ExchangeRecord), ncclChar, communicator_->get(), stream_.get()),
      "ncclAllGather");
  check_cuda(cudaMemcpyAsync(all.data(), records_.get(), all.size() * sizeof(ExchangeRecord), cudaMemcpyDeviceToHost,
                             stream_.get()),
             "cudaMemcpyAsync");
  wait_for_stream(stream_.get(), timeout_);
  for (const ExchangeRecord& record : all)
    if (record.status != EPX_SUCCESS && mine.status == EPX_SUCCESS) throw_peer_failure(record);
  return all;
}

} // namespace epx
