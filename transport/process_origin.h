// SPDX-License-Identifier: Apache-2.0
// A ProcessOrigin says where a process runs, as far as that decides whether another process can know that it has died.
#pragma once

#include <cstdint>

namespace epx {

// A process can know only of processes of its own machine (host name and boot) and PID namespace whether they still live. The
// struct is part of the file format of the rendezvous; segments of shared memory, which never leave the machine, record the
// boot and the PID namespace.
struct ProcessOrigin {
  char host[64] = {};    // padded with zeros
  char boot_id[40] = {}; // of the kernel, drawn at each boot; padded with zeros
  uint64_t pid_namespace = 0;

  bool operator==(const ProcessOrigin& other) const;
  // Returns false where the system does not provide one of the three: such an origin equals none, not even itself.
  bool known() const { return host[0] != '\0' && boot_id[0] != '\0' && pid_namespace != 0; }
  uint64_t hash() const;
};
static_assert(sizeof(ProcessOrigin) == 112);

ProcessOrigin this_process_origin();

} // namespace epx
