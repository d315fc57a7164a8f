// SPDX-License-Identifier: Apache-2.0
// The host transport opens windows in shared memory: one segment per rank and window, which all ranks of the group map. The
// ranks are processes or threads of one machine.
#pragma once

#include <memory>

#include "transport/host/shared_segment.h"
#include "transport/transport.h"

namespace epx {

// `rank` and `num_ranks` are those of the group. Windows are nameless memory (memfd), unless a rank cannot make it or open a
// peer's: then this transport's windows have names in /dev/shm until all ranks have mapped them. Tests pass kNamed, on all
// ranks, to have those names from the start.
//
// The names that dead processes of this user left in /dev/shm are removed first (dead_segments.h).
std::unique_ptr<Transport> make_host_transport(int rank, int num_ranks, SegmentKind kind = SegmentKind::kNameless);

} // namespace epx
