// Where the ranks of an LSA domain see each other's share of a window.
#pragma once

#include <cstddef>

#include <nccl.h>

namespace epx {

// Writes the address of each rank's share of the window, as this GPU sees it, to bases[num_ranks] in device memory.
// Asynchronous on the stream.
cudaError_t find_lsa_pointers(ncclWindow_t window, int num_ranks, std::byte** bases, cudaStream_t stream);

} // namespace epx
