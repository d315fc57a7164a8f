// SPDX-License-Identifier: Apache-2.0
// epx_mpi.hpp compiles as the first header of a file. tests/multiprocess uses it.
#include "epx/epx_mpi.hpp"

static_assert(
    std::is_same_v<std::invoke_result_t<decltype(epx::bootstrap_mpi), MPI_Comm, std::chrono::seconds>, epx::Bootstrap>);
