// SPDX-License-Identifier: Apache-2.0
// The NCCL transport opens windows over NVLink: NCCL symmetric memory of the ranks of one LSA domain, which load from and store
// to each other's. A group of several nodes has windows inside nodes, and rails between them by ncclSend and ncclRecv.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/exchange.h"
#include "transport/rails.h"
#include "transport/transport.h"

namespace epx {

// Loads NCCL. Returns why this process cannot use it (it cannot be loaded, or epx does not support the release), or "".
std::string why_no_nccl();

// The call is collective over `exchange`; all ranks succeed or all throw: UNSUPPORTED (no GPU, two ranks on one GPU, no NCCL or
// one that nccl_versions.h does not list, or not the same on all ranks), TIMEOUT, SYSTEM. NCCL then makes the communicator in a
// thread of its own, which takes longer than all else at a group's creation: the first window waits for it when its memory is
// allocated, and throws UNSUPPORTED (ranks beyond one LSA domain, no symmetric memory), TIMEOUT, SYSTEM. Waits of the
// transport's own exchange, which goes through the GPU, are bounded by timeout_ms.
std::unique_ptr<Transport> make_nccl_transport(int rank, int num_ranks, int64_t timeout_ms, Exchange& exchange);

// The same for a group of several nodes of ranks_per_node ranks each, whose rails take at most rail_ctas SMs, as many on all
// ranks. All communicators are made when it returns. Windows of the node's transport are opened over a NodeExchange of the
// ranks of this node. The call makes one exchange more than make_nccl_transport.
MultiNodeTransport make_nccl_multi_node_transport(int rank, int num_ranks, int ranks_per_node, int rail_ctas,
                                                  int64_t timeout_ms, Exchange& exchange);

} // namespace epx
