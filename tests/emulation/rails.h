// SPDX-License-Identifier: Apache-2.0
// Rails of the emulation: data of ranks of other processes comes through mailboxes in memory that all ranks share.
#pragma once

#include <cstdint>
#include <memory>

#include "transport/rails.h"
#include "transport/transport.h"

namespace epx::emulation {

// Each rank has so many bytes of mailboxes, one for each rank that sends to it.
int64_t mailbox_bytes(int num_ranks);

// `window` has the mailboxes of all ranks at `offset`; they are zeros.
std::unique_ptr<Rails> make_rails(std::shared_ptr<Window> window, int64_t offset, int ranks_per_node);

} // namespace epx::emulation
