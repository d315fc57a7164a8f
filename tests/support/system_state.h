// SPDX-License-Identifier: Apache-2.0
// What tests leave on the machine: temporary directories of their own, and shared memory segments of epx. And what processes may
// see of each other on it.
#pragma once

#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

namespace epx::test {

// A fresh directory, removed with everything in it at the end.
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
  // Names that have come since construction and are still there after `grace`; returns early when there are none.
  std::set<std::string> leftovers(std::chrono::milliseconds grace = std::chrono::milliseconds(5'000)) const;

private:
  std::set<std::string> before_;
};

// From now on this process and its peers cannot look into each other's /proc/PID/fd, in one direction at least: memory without a
// name cannot be shared with it. For processes that are given up afterwards.
void hide_from_proc();

} // namespace epx::test
