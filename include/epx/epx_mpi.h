/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * Bootstrap from an MPI communicator. In a library of its own, libepx_mpi, so that libepx does not link MPI. */
#ifndef EPX_EPX_MPI_H_
#define EPX_EPX_MPI_H_

#include <mpi.h>

#include "epx/epx.h"

#ifdef __cplusplus
extern "C" {
#endif

/** The one tag that epx uses in a communicator of the caller's; see epx_bootstrap_mpi. */
#define EPX_MPI_TAG 32767

/** Fills in a bootstrap whose ranks are those of `comm`, any intracommunicator. Collective over comm. Messages travel in a
 * duplicate of comm, so that they never match the caller's; comm stays the caller's and may be freed at once. MPI must be
 * initialised, and not yet finalised when epx_bootstrap_free releases the bootstrap.
 *
 *   timeout_ms  > 0: the longest to wait for the other ranks here.
 *
 * Errors: INVALID_ARGUMENT (MPI not initialised or finalised, null or intercommunicator); SYSTEM (MPI's own words); TIMEOUT.
 * A TIMEOUT names the ranks that never came, also to a rank that comes later. All-gathers of the bootstrap that time out list
 * the ranks that never came.
 *
 * Before there is a duplicate, only messages in comm itself can show who is missing. A rank sends them, at most 1024 bytes to
 * each other rank with the tag EPX_MPI_TAG, when it has waited for a quarter of timeout_ms, or has got one. Where ranks may
 * come that far apart, no receive or probe of the caller's that takes this tag (MPI_ANY_TAG does) may be pending in comm during
 * the call. When the call has succeeded on all ranks, all these messages have been received.
 *
 * After a TIMEOUT or SYSTEM some of these messages may stay in comm for ever. So may its duplication, which MPI cannot cancel.
 * comm is then of no use for another call of this function. Nor is it for collective functions of MPI, unless every rank has
 * called this function. */
EPX_API epx_status epx_bootstrap_mpi(MPI_Comm comm, int64_t timeout_ms, epx_bootstrap* bootstrap);

#ifdef __cplusplus
}
#endif

#endif /* EPX_EPX_MPI_H_ */
