// A duplicate of the caller's communicator, made within a deadline.
#pragma once

#include <mpi.h>

#include "base/suspension_aware_deadline.h"

namespace epx {

// Collective over `comm`, which returns its errors. The duplicate returns its errors, too. Throws TIMEOUT, and names the ranks
// that never came. MPI's collective calls cannot tell who is missing; so, from a quarter of the timeout on, the ranks that
// wait say hello to each other in `comm` itself, with EPX_MPI_TAG. On success nothing of that is left there.
MPI_Comm duplicate_within(MPI_Comm comm, SuspensionAwareDeadline deadline);

} // namespace epx
