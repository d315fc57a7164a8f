// SPDX-License-Identifier: Apache-2.0
// Ranks find out here which processes of a rendezvous directory live, and remove the files that dead jobs have left there.
#pragma once

#include <chrono>
#include <set>
#include <string>

#include "transport/bootstrap/rendezvous_directory.h"
#include "transport/file_descriptor.h"

namespace epx {

// An AliveFile marks this process as alive: the file alive.<rank>.<nonce> exists, locked, from before the process's first other
// file until after its last. The kernel releases the lock when this process and all children of fork() that inherited it have
// ended, however they end.
class AliveFile {
public:
  AliveFile(RendezvousDirectory& directory, int rank, int num_ranks, const std::string& nonce);
  ~AliveFile() { directory_.remove(name_); }
  AliveFile(const AliveFile&) = delete;
  AliveFile& operator=(const AliveFile&) = delete;

  const std::string& name() const { return name_; }

  // Makes the file again if another process has removed it.
  void keep();

private:
  RendezvousDirectory& directory_;
  std::string name_;
  std::string content_;
  FileDescriptor lock_;
};

// Attendance keeps the ranks that have been seen in the directory and were not known to be dead then.
class Attendance {
public:
  explicit Attendance(const RendezvousDirectory& directory) : directory_(directory) {}

  void note(const RendezvousDirectory::Names& names);
  bool has_come(int rank) const { return ranks_.contains(rank); }

  // Returns whether a process that was seen as this rank is known to live now; false where that cannot be known.
  bool lives(int rank) const;

private:
  const RendezvousDirectory& directory_;
  RendezvousDirectory::Names known_;
  std::set<int> ranks_;
};

// Removes the files of dead jobs that this process's host, PID namespace and user wrote, if it is certain that nobody uses the
// directory any more: the file system is local, and of every alive file the lock is free and the writer was of this origin.
void remove_files_of_dead_jobs(RendezvousDirectory& directory) noexcept;

// Removes what such processes wrote `age` or longer before `reference` was written, for directories where that is not certain;
// but no alive file that is locked.
void remove_old_files(RendezvousDirectory& directory, const std::string& reference, std::chrono::seconds age) noexcept;

} // namespace epx
