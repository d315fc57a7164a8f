// SPDX-License-Identifier: Apache-2.0
// Connects the ranks to rank 0. Both ends prove by a keyed hash of the other's nonce that they have the group's secret, so that
// whoever else finds the port is not taken for a rank, and no one else for rank 0.
#pragma once

#include <chrono>
#include <vector>

#include "transport/exchange.h"
#include "transport/file_descriptor.h"

namespace epx {

// The call is collective over `exchange`; all ranks succeed or all throw SYSTEM, with the ranks that are missing or the
// addresses that were tried. Returns the sockets of ranks 1 to P - 1 on rank 0, and the one to rank 0 on the others.
std::vector<FileDescriptor> join_control(int rank, int num_ranks, std::chrono::milliseconds limit, Exchange& exchange);

} // namespace epx
