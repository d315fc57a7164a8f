// SPDX-License-Identifier: Apache-2.0
// Owns communicators of NCCL that ep_bench makes for itself.
#pragma once

#include <memory>

#include <nccl.h>

#include "tools/ep_bench/peers.h"

namespace epx::bench {

// Throws RuntimeError with the call's name and NCCL's message.
void check_nccl(ncclResult_t result, const char* call);

struct AbortNcclComm {
  using pointer = ncclComm_t;
  void operator()(ncclComm_t comm) const { ncclCommAbort(comm); } // waits for no peer
};
using NcclComm = std::unique_ptr<ncclComm, AbortNcclComm>;

// Makes a communicator of all ranks for the calling thread's device. Collective. Throws AgreedError.
NcclComm make_nccl_comm(const Peers& peers);

} // namespace epx::bench
