// SPDX-License-Identifier: Apache-2.0
// The C++20 layer over epx_mpi.h, apart from epx.hpp as libepx_mpi is from libepx: a program that does not use MPI needs
// neither mpi.h nor that library, and whether it sees MPI does not depend on what the machine has installed. See epx.hpp
// for the conventions.
#ifndef EPX_EPX_MPI_HPP_
#define EPX_EPX_MPI_HPP_

#include "epx/epx.hpp"
#include "epx/epx_mpi.h"

namespace epx {
inline namespace v0 {

// epx_bootstrap_mpi: collective over comm, which stays the caller's. The bootstrap must be gone before MPI_Finalize. Throws
// Error.
[[nodiscard]] inline Bootstrap bootstrap_mpi(MPI_Comm comm, std::chrono::milliseconds timeout) {
  epx_bootstrap bootstrap = {};
  require_success(epx_bootstrap_mpi(comm, timeout.count(), &bootstrap), "epx_bootstrap_mpi");
  return Bootstrap(bootstrap);
}

} // namespace v0
} // namespace epx

#endif // EPX_EPX_MPI_HPP_
