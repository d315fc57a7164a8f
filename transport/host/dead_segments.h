// SPDX-License-Identifier: Apache-2.0
// Segments in /dev/shm whose processes are dead are removed here.
#pragma once

namespace epx {

// Removes the names of segments that processes of this user left in /dev/shm when they were killed while a window was opened by
// name (shared_segment.h). A segment's creator holds a lock on its file for as long as the file has the name, and the kernel
// releases the lock when the creator dies: a file that can be locked has no owner. A file stays unless all of this holds: its
// owner is this process's user, its name and content are those of a segment, and its record names the same boot, machine, PID
// namespace and user as this process's. Anything else in /dev/shm is not opened, or is left as it is.
void remove_dead_segments() noexcept;

} // namespace epx
