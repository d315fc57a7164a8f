// SPDX-License-Identifier: Apache-2.0
// This header has what tests leave on the machine, temporary directories and shared memory segments of epx, and what processes
// may see of each other on it.
#pragma once

#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

namespace epx::test {

// Creates a fresh directory, and removes it with everything in it at the end.
class TempDirectory {
public:
  TempDirectory();
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  ~TempDirectory();

  const std::filesystem::path& path() const { return path_; }
  std::vector<std::string> entries() const; // names

private:
  std::filesystem::path path_;
};

// Watches /dev/shm for epx's segments. Others may run epx on the machine at the same time, but their segments are visible
// for a moment only: a name that is new and stays is a leftover.
class SharedMemoryWatch {
public:
  SharedMemoryWatch();
  // Returns the names that are new since construction and still there after `grace`; returns early when there are none.
  std::set<std::string> leftovers(std::chrono::milliseconds grace = std::chrono::milliseconds(5'000)) const;

private:
  std::set<std::string> before_;
};

// From then on this process and its peers cannot open each other's /proc/PID/fd, in one direction at least, so that nameless
// memory cannot be shared with it. The process cannot undo this.
void hide_from_proc();

} // namespace epx::test
