// The host transport: POSIX shared memory, one segment per rank and window, mapped by all ranks of the group. For ranks
// that are processes or threads of one machine.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace epx {

// `rank` and `num_ranks` are those of the group.
std::unique_ptr<Transport> make_host_transport(int rank, int num_ranks);

} // namespace epx
