// SPDX-License-Identifier: Apache-2.0
#include "transport/rails_exchange.h"

#include "transport/stream_wait.h"

namespace epx {

std::vector<ExchangeRecord> RailsExchange::gather(ExchangeRecord mine) {
  mine.rank = rank_;
  ExchangeRecord* const own = records_.get() + num_ranks_;
  std::vector<ExchangeRecord> all(static_cast<size_t>(num_ranks_));
  check_cuda(cudaMemcpyAsync(own, &mine, sizeof(mine), cudaMemcpyHostToDevice, stream_.get()), "cudaMemcpyAsync");
  rails_.all_gather(own, records_.get(), sizeof(ExchangeRecord), stream_.get());
  try {
    wait_for_stream(stream_.get(), timeout_);
  } catch (const StatusError&) {
    rails_.abort(); // the work on the stream uses memory of this object
    throw;
  }
  check_cuda(cudaMemcpyAsync(all.data(), records_.get(), all.size() * sizeof(ExchangeRecord), cudaMemcpyDeviceToHost,
                             stream_.get()),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize");
  if (rails_.has_ended()) // then the all-gather may have ended without its data
    fail(EPX_ERROR_ABORTED, "the rails between the nodes of the group were aborted");
  for (const ExchangeRecord& record : all)
    if (record.status != EPX_SUCCESS && mine.status == EPX_SUCCESS) throw_peer_failure(record);
  return all;
}

} // namespace epx
