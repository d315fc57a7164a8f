// SPDX-License-Identifier: Apache-2.0
// The ranks of one job exchange messages through a rendezvous directory: complete files appear there, and disappear.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "transport/file_descriptor.h"
#include "transport/process_origin.h"

namespace epx {

// The directory is `<parent>/epx-<job_id>` with mode 0700; files in it have mode 0600. Several ranks create, use and remove it
// at the same time, on one machine or through a shared file system. What the file system refuses is thrown as EPX_ERROR_SYSTEM
// with the path.
//
// Others may write in the parent, and put something else in the directory's place. Therefore the directory is held by
// descriptor. Each time that the name leads to another directory, which happens when a rank that leaves has removed it and
// another has made it again, the new one is examined before it is used: it must be this user's, with mode 0700, and contain
// nothing but files of a rendezvous (and what a network file system calls `.nfs*`). Anything else is refused and left as it is.
class RendezvousDirectory {
public:
  using Names = std::set<std::string, std::less<>>;

  // Creates the directory unless it exists. `nonce` keeps the temporary names of different writers apart.
  RendezvousDirectory(const std::string& parent, const std::string& job_id, std::string nonce);

  const ProcessOrigin& origin() const { return origin_; } // this process's, which writes here

  // Writes a temporary file and renames it: the file appears, or replaces the one of this name, atomically.
  void write(std::string_view name, std::string_view content);

  // Writes a file in the same way that is locked (flock) from its appearance until the descriptor is closed.
  FileDescriptor write_locked(std::string_view name, std::string_view content);

  // Return nothing when there is no such file, or none that a rank could have written: one larger than max_bytes, not a plain
  // file, of another user, or with a second name.
  std::optional<std::string> read(std::string_view name, size_t max_bytes) const;
  std::optional<std::string> read_start(std::string_view name, size_t bytes) const; // the first `bytes`, or fewer

  // Returns true when this call removed the file. Of several ranks that try, unlink succeeds for exactly one: that is how ranks
  // agree on who came first.
  bool remove(std::string_view name) const noexcept;

  // Lists the directory that has the name now.
  Names list();

  bool contains(std::string_view name) const;

  // Opens the directory again, which makes files that other machines have just written visible here: a network file system
  // caches that a name did not exist until then.
  void refresh();

  // Returns whether every process sees a lock on a file here, and for as long as its holder lives, as on a local file system.
  bool has_reliable_locks() const;

  // Returns false only when it is certain that nobody holds the lock of this file.
  bool may_be_locked(std::string_view name) const;

  // Returns seconds, by the clock of the file system.
  std::optional<int64_t> last_written(std::string_view name) const;

  // Gives up a descriptor that this object keeps for this moment: a process that has no other left can write one more file, which
  // tells its peers.
  void release_spare() noexcept { spare_.close(); }

  // Removes the directory if it is empty. Returns true when it does not exist any more.
  bool leave() const noexcept;

private:
  void enter();
  [[noreturn]] void fail_creating(int error) const;
  FileDescriptor look();
  void examine(const FileDescriptor& directory) const;
  FileDescriptor create(std::string_view name, std::string_view content, bool locked);
  std::optional<std::string> read_checked(std::string_view name, size_t max_bytes, bool whole) const;
  std::string file(std::string_view name) const;

  std::string parent_path_;
  std::string name_;
  std::string path_;
  std::string nonce_;
  ProcessOrigin origin_;
  FileDescriptor parent_;
  FileDescriptor directory_;
  FileDescriptor spare_;
  unsigned num_written_ = 0;
};

} // namespace epx
