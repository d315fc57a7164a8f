// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/nccl_exchange.h"

#include <cstddef>

#include "transport/nccl/nccl_library.h"

namespace epx {

void NcclExchange::gather_bytes(const void* mine, void* all, int64_t bytes, cudaStream_t stream) {
  communicator_->wait(nccl().AllGather(mine, all, static_cast<size_t>(bytes), ncclChar, communicator_->get(), stream),
                      "ncclAllGather");
}

} // namespace epx
