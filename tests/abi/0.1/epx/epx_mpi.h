/* Bootstrap from an MPI communicator. In a library of its own, libepx_mpi, so that libepx does not link MPI. */
#ifndef EPX_EPX_MPI_H_
#define EPX_EPX_MPI_H_

#include <mpi.h>

#include "epx/epx.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills in a bootstrap whose ranks are those of `comm`, any intracommunicator. Collective over comm. Messages travel in a
 * duplicate of comm, so that they never meet the caller's; comm stays the caller's and may be freed at once. MPI must be
 * initialised, and not yet finalised when epx_bootstrap_free releases the bootstrap.
 *   timeout_ms  > 0: the longest to wait for the other ranks here
 * Errors: INVALID_ARGUMENT (MPI not initialised or finalised, null or intercommunicator); TIMEOUT; SYSTEM (MPI's own words).
 * All-gathers of the bootstrap that time out list the ranks that never came. */
EPX_API epx_status epx_bootstrap_mpi(MPI_Comm comm, int64_t timeout_ms, epx_bootstrap* bootstrap);

#ifdef __cplusplus
}
#endif

#endif /* EPX_EPX_MPI_H_ */
