// SPDX-License-Identifier: Apache-2.0
// A MemoryLimit says how much memory this process may still take before the kernel has to kill a process for it.
#pragma once

#include <cstdint>
#include <string>

namespace epx {

struct MemoryLimit {
  int64_t free_bytes;  // may be taken without swapping; the page cache can be reclaimed and counts as free
  int64_t spare_bytes; // the part of these that has to be left to others
  std::string of;      // "this machine" or the cgroup's directory and its limit, for messages

  int64_t usable_bytes() const { return free_bytes - spare_bytes; } // may be negative
};

// Returns the tightest of the machine's available memory and the limits of this process's cgroups (version 1 or 2) from its own
// up to the mounted root. Limits that cannot be read do not count; without any, free_bytes is INT64_MAX. `root` is prepended to
// each path: it is "", or a directory that a test filled.
MemoryLimit tightest_memory_limit(const std::string& root = "");

} // namespace epx
