// The directory in which the ranks of one job meet: whole files appear there, and disappear.
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

// `<parent>/epx-<job_id>`, mode 0700; files in it have mode 0600. Several ranks create, use and remove it at the same time,
// on one machine or through a shared file system. What the file system refuses is thrown as EPX_ERROR_SYSTEM with the path.
//
// Others may write in the parent, and put something else in the directory's place. It is therefore held by descriptor, and
// each time that the name leads to another directory, which happens when a rank that leaves has removed it and another has
// made it again, that one is examined before it is used: it must be this user's, with mode 0700, and hold nothing but files of
// a rendezvous (and what a network file system calls `.nfs*`). Anything else is refused as it is.
class RendezvousDirectory {
public:
  using Names = std::set<std::string, std::less<>>;

  // Creates the directory unless it is there. `nonce` keeps the temporary names of different writers apart.
  RendezvousDirectory(const std::string& parent, const std::string& job_id, std::string nonce);

  const ProcessOrigin& origin() const { return origin_; } // of this process, who writes here

  // The file appears as a whole, or replaces the one of this name as a whole.
  void write(std::string_view name, std::string_view content);

  // The same, and from its appearance on it is locked until the descriptor is closed.
  FileDescriptor write_locked(std::string_view name, std::string_view content);

  // Nothing when there is no such file, or none that a rank could have written: larger than max_bytes, not a plain file, of
  // another user, or with a second name.
  std::optional<std::string> read(std::string_view name, size_t max_bytes) const;
  std::optional<std::string> read_start(std::string_view name, size_t bytes) const; // the first `bytes`, or fewer

  // True when this call removed it. Of several that try, exactly one does: that is how ranks agree on who came first.
  bool remove(std::string_view name) const noexcept;

  // Looks at the directory that has the name now.
  Names list();

  bool contains(std::string_view name) const;

  // Makes files that other machines have just written visible here: a network file system caches that a name did not exist,
  // and opening the directory is what makes it ask again.
  void refresh();

  // Whether a lock on a file here is seen by everybody, and held as long as its holder lives: a local file system.
  bool has_reliable_locks() const;

  // False only when it is certain that nobody holds the lock of this file.
  bool may_be_locked(std::string_view name) const;

  // In seconds, by the clock of the file system.
  std::optional<int64_t> last_written(std::string_view name) const;

  // Removes the directory if it is empty. True when it is gone.
  bool leave() const noexcept;

private:
  void enter();
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
  unsigned num_written_ = 0;
};

} // namespace epx
