// SPDX-License-Identifier: Apache-2.0
// The NCCL transport opens windows over NVLink: NCCL symmetric memory of the ranks of one LSA domain, which load from and store
// to each other's.
#pragma once

#include <cstdint>
#include <memory>

#include "transport/exchange.h"
#include "transport/transport.h"

namespace epx {

// An NcclTransport also exchanges small host-side records, for what ranks agree on after creation.
class NcclTransport : public Transport {
public:
  // Returns an exchange of all ranks through the GPU, bounded by timeout_ms. It may not be used while a call of the group waits
  // on the host.
  virtual Exchange& exchange() = 0;

  // Opens a window over memory that the caller keeps. The call is collective over `exchange`; all ranks succeed or all throw:
  // MISMATCH when bytes differ, INVALID_ARGUMENT (alignment), UNSUPPORTED when NCCL cannot register it, SYSTEM.
  virtual std::unique_ptr<Window> adopt_window(std::byte* memory, int64_t bytes, Exchange& exchange) = 0;
};

// The call is collective over `exchange`; all ranks succeed or all throw: UNSUPPORTED (no GPU, two ranks on one GPU, an NCCL
// that nccl_versions.h does not list, or not the same on all ranks, ranks beyond one LSA domain, no symmetric memory), TIMEOUT,
// SYSTEM.
std::unique_ptr<NcclTransport> make_nccl_transport(int rank, int num_ranks, int64_t timeout_ms, Exchange& exchange);

} // namespace epx
