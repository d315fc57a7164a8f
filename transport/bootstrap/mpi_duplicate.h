// SPDX-License-Identifier: Apache-2.0
// The caller's communicator is duplicated here within a deadline.
#pragma once

#include <chrono>

#include <mpi.h>

#include "base/suspension_aware_deadline.h"

namespace epx {

// The sleep between two tests of an MPI request grows from the first of these to the other (PollingPace).
inline constexpr std::chrono::microseconds kFirstSleep{10};
inline constexpr std::chrono::milliseconds kLongestSleep{1};

// The call is collective over `comm`, whose error handler must be MPI_ERRORS_RETURN; the duplicate gets the same one. Throws
// TIMEOUT, and names the ranks that never came. MPI's collective calls cannot name who is missing; so, from a quarter of the
// timeout on, the ranks that wait send hellos to each other in `comm` itself, with EPX_MPI_TAG. On success no message of these
// is left there.
MPI_Comm duplicate_within(MPI_Comm comm, SuspensionAwareDeadline deadline);

} // namespace epx
