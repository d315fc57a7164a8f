// SPDX-License-Identifier: Apache-2.0
#include "transport/bootstrap/rendezvous_directory.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <utility>

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/error.h"
#include "base/resource_limits.h"
#include "transport/bootstrap/file_messages.h"
#include "transport/bootstrap/private_directory.h"
#include "transport/bootstrap/rendezvous_names.h"

namespace epx {
namespace {

// A writer begins anew so often after a rank that leaves has removed the directory in between.
constexpr int kMaxAttempts = 1000;

[[noreturn]] void fail_on(const char* what, const std::string& path, int error) {
  fail(EPX_ERROR_SYSTEM, "file rendezvous: cannot {} '{}': {}", what, path, describe_errno(error));
}

// A file is gone when it was removed on this machine (ENOENT) or, while this one looked, on another (ESTALE).
bool is_gone(int error) {
  return error == ENOENT || error == ESTALE;
}

bool is_same(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

FileDescriptor open_directory(int parent, const std::string& name) {
  return FileDescriptor(::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

FileDescriptor open_to_read(int directory, const std::string& name) {
  return FileDescriptor(::openat(directory, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
}

// Returns why a rank cannot have written such a file; "" when it can.
std::string why_foreign(const struct stat& info) {
  if (!S_ISREG(info.st_mode)) return "which is not a plain file";
  if (info.st_uid != ::geteuid()) return fmt::format("which belongs to user {}", info.st_uid);
  if (info.st_nlink > 1) return "which has another name elsewhere";
  return "";
}

// Returns 0 or an errno.
int write_all(int fd, std::string_view content) {
  while (!content.empty()) {
    const ssize_t written = ::write(fd, content.data(), content.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    content.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
}

// Reads up to content.size() bytes, fewer at the end of the file. Returns 0 or an errno.
int read_all(int fd, std::string& content) {
  size_t have = 0;
  while (have < content.size()) {
    const ssize_t got = ::read(fd, content.data() + have, content.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) break;
    have += static_cast<size_t>(got);
  }
  content.resize(have);
  return 0;
}

// Takes the descriptor. Returns nothing on failure, with the reason in errno, ENOENT or ESTALE when the directory has been
// removed.
std::optional<RendezvousDirectory::Names> names_in(FileDescriptor directory) {
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(directory.get()), ::closedir);
  if (stream == nullptr) return std::nullopt;
  directory.release(); // the stream closes it
  RendezvousDirectory::Names names;
  while (const dirent* entry = ::readdir(stream.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace(name);
  }
  return names;
}

// Returns why the file of this name cannot be a rank's; "" when it can.
std::string why_foreign(int directory, const std::string& name) {
  if (name.starts_with(".nfs"))
    return ""; // a network file system gives this name to a file that was removed while it was open
  struct stat info {};
  if (::fstatat(directory, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0)
    return is_gone(errno) ? "" : fmt::format("which cannot be examined: {}", describe_errno(errno));
  if (!is_rendezvous_name(name)) return "which epx did not write";
  if (std::string why = why_foreign(info); !why.empty()) return why;
  const FileDescriptor in = open_to_read(directory, name);
  // Under a umask that takes it from the owner, the file that a rank is writing cannot be read until it has its mode.
  if (!in && errno == EACCES && is_temporary(name)) return "";
  if (!in) return is_gone(errno) ? "" : fmt::format("which cannot be read: {}", describe_errno(errno));
  std::string start(kMagicBytes, '\0');
  if (const int error = read_all(in.get(), start); error != 0)
    return is_gone(error) ? "" : fmt::format("which cannot be read: {}", describe_errno(error));
  if (begins_like_older_message(start))
    return "which an older epx wrote (if no job with that epx and this job_id runs any more, remove the directory)";
  return begins_like_message(start) ? "" : "which epx did not write";
}

} // namespace

RendezvousDirectory::RendezvousDirectory(const std::string& parent, const std::string& job_id, std::string nonce)
    : parent_path_(parent), name_("epx-" + job_id), path_(parent + "/" + name_), nonce_(std::move(nonce)),
      origin_(this_process_origin()), parent_(::open(parent.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)) {
  if (!parent_) fail_creating(errno);
  enter();
}

void RendezvousDirectory::fail_creating(int error) const {
  const std::string why = describe_thread_errno(error); // a child may have to make the directory
  if (error == EMFILE || error == ENFILE || error == EAGAIN)
    fail(EPX_ERROR_SYSTEM, "file rendezvous: cannot create '{}': {}", path_, why);
  fail(EPX_ERROR_SYSTEM, "file rendezvous: cannot create '{}': {}; the directory '{}' must exist and be writable", path_,
       why, parent_path_);
}

void RendezvousDirectory::enter() {
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    FileDescriptor directory = open_directory(parent_.get(), name_);
    if (!directory && is_gone(errno)) {
      const int error = make_private_directory(parent_.get(), name_);
      if (error != 0 && error != EEXIST) fail_creating(error);
      continue; // a rank that leaves may remove it before this one opens it
    }
    if (!directory) fail_on("open as a directory", path_, errno);
    examine(directory);
    directory_ = std::move(directory);
    if (!spare_) spare_ = FileDescriptor(::openat(parent_.get(), ".", O_PATH | O_DIRECTORY | O_CLOEXEC));
    return;
  }
  fail(EPX_ERROR_SYSTEM, "file rendezvous: '{}' is removed as often as it is created", path_);
}

// Another user who can write to the parent may have put something there that others can read, or that is not epx's.
void RendezvousDirectory::examine(const FileDescriptor& directory) const {
  struct stat info {};
  if (::fstat(directory.get(), &info) != 0) fail_on("examine", path_, errno);
  if (info.st_uid != ::geteuid())
    fail(EPX_ERROR_SYSTEM, "file rendezvous: '{}' belongs to user {}, and this rank runs as user {}", path_, info.st_uid,
         ::geteuid());
  if ((info.st_mode & 0777) != 0700)
    fail(EPX_ERROR_SYSTEM, "file rendezvous: '{}' has mode {:04o}; epx uses only a directory of mode 0700, as it makes it",
         path_, info.st_mode & 07777);
  // Listing needs an open file description of its own, because reading moves its offset.
  FileDescriptor to_list(::openat(directory.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const std::optional<Names> names = to_list ? names_in(std::move(to_list)) : std::nullopt;
  if (!names && is_gone(errno)) return; // a rank removed the directory because it was empty
  if (!names) fail_on("list", path_, errno);
  for (const std::string& name : *names)
    if (const std::string why = why_foreign(directory.get(), name); !why.empty())
      fail(EPX_ERROR_SYSTEM,
           "file rendezvous: '{}' holds '{}', {}; epx uses only a directory that holds nothing but its own files", path_,
           name, why);
}

// Opens the directory that has the name now, and uses that one from now on if it is another. Returns no descriptor when it has
// been removed.
FileDescriptor RendezvousDirectory::look() {
  FileDescriptor now = open_directory(parent_.get(), name_);
  if (!now) {
    const int error = errno;
    // Something that is no directory has taken its place.
    if (error == ENOTDIR || error == ELOOP) fail_on("open as a directory", path_, error);
    errno = error;
    return now;
  }
  struct stat held {};
  struct stat found {};
  if (::fstat(directory_.get(), &held) == 0 && ::fstat(now.get(), &found) == 0 && is_same(held, found)) return now;
  examine(now);
  FileDescriptor again(::openat(now.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (again) directory_ = std::move(again);
  return now;
}

std::string RendezvousDirectory::file(std::string_view name) const {
  return fmt::format("{}/{}", path_, name);
}

FileDescriptor RendezvousDirectory::create(std::string_view name, std::string_view content, bool locked) {
  require_file_size(EPX_ERROR_SYSTEM, fmt::format("file rendezvous: writing '{}'", file(name)),
                    static_cast<int64_t>(content.size()));
  const std::string final_name(name);
  const std::string temporary = temporary_name(origin_.hash(), nonce_, num_written_++);
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    FileDescriptor out(
        ::openat(directory_.get(), temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!out && is_gone(errno)) {
      enter(); // a rank that left has removed the directory, which was empty
      continue;
    }
    if (!out) fail_on("create", file(temporary), errno);
    int error = ::fchmod(out.get(), 0600) == 0 ? 0 : errno; // the umask may have taken permissions from the owner
    if (error == 0 && locked && ::flock(out.get(), LOCK_EX | LOCK_NB) != 0 && has_reliable_locks()) error = errno;
    if (error == 0) error = write_all(out.get(), content);
    if (!locked && out.close() != 0 && error == 0) error = errno;
    if (error == 0 && ::renameat(directory_.get(), temporary.c_str(), directory_.get(), final_name.c_str()) == 0)
      return out;
    if (error == 0 && is_gone(errno)) continue; // another rank removed it with the files of a dead job
    if (error == 0) error = errno;
    ::unlinkat(directory_.get(), temporary.c_str(), 0);
    fail_on("write", file(name), error);
  }
  fail(EPX_ERROR_SYSTEM, "file rendezvous: '{}' is removed as often as it is created", path_);
}

void RendezvousDirectory::write(std::string_view name, std::string_view content) {
  create(name, content, false);
}

FileDescriptor RendezvousDirectory::write_locked(std::string_view name, std::string_view content) {
  return create(name, content, true);
}

std::optional<std::string> RendezvousDirectory::read(std::string_view name, size_t max_bytes) const {
  return read_checked(name, max_bytes, true);
}

std::optional<std::string> RendezvousDirectory::read_start(std::string_view name, size_t bytes) const {
  return read_checked(name, bytes, false);
}

std::optional<std::string> RendezvousDirectory::read_checked(std::string_view name, size_t max_bytes, bool whole) const {
  const FileDescriptor in = open_to_read(directory_.get(), std::string(name));
  // ELOOP means a symbolic link, which no rank makes; ENXIO means a FIFO or a socket; EACCES means another mode than a rank's.
  if (!in && (is_gone(errno) || errno == ELOOP || errno == ENXIO || errno == EACCES)) return std::nullopt;
  if (!in) fail_on("open", file(name), errno);
  struct stat info {};
  if (::fstat(in.get(), &info) != 0) {
    if (is_gone(errno)) return std::nullopt;
    fail_on("examine", file(name), errno);
  }
  if (!why_foreign(info).empty()) return std::nullopt;
  const auto size = static_cast<uint64_t>(info.st_size);
  if (whole && size > max_bytes) return std::nullopt;
  std::string content(static_cast<size_t>(std::min<uint64_t>(size, max_bytes)), '\0');
  const int error = read_all(in.get(), content);
  if (is_gone(error)) return std::nullopt;
  if (error != 0) fail_on("read", file(name), error);
  return content;
}

bool RendezvousDirectory::remove(std::string_view name) const noexcept {
  try {
    return ::unlinkat(directory_.get(), std::string(name).c_str(), 0) == 0;
  } catch (...) {
    return false;
  }
}

RendezvousDirectory::Names RendezvousDirectory::list() {
  FileDescriptor now = look();
  std::optional<Names> names = now ? names_in(std::move(now)) : std::nullopt;
  if (!names && !is_gone(errno)) fail_on("list", path_, errno);
  return names ? *std::move(names) : Names{};
}

bool RendezvousDirectory::contains(std::string_view name) const {
  struct stat info {};
  return ::fstatat(directory_.get(), std::string(name).c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 || !is_gone(errno);
}

void RendezvousDirectory::refresh() {
  look();
}

bool RendezvousDirectory::has_reliable_locks() const {
  // These magic numbers come from linux/magic.h, and those of ZFS and F2FS, which older systems' headers lack.
  constexpr std::array<uint64_t, 8> kLocal = {0xef53,     /* ext2, ext3, ext4 */
                                              0x58465342, /* XFS */
                                              0x9123683e, /* Btrfs */
                                              0x01021994, /* tmpfs */
                                              0x858458f6, /* ramfs */
                                              0x794c7630, /* overlayfs */
                                              0x2fc12fc1, /* ZFS */
                                              0xf2f52010 /* F2FS */};
  struct statfs info {};
  if (::fstatfs(directory_.get(), &info) != 0) return false;
  return std::find(kLocal.begin(), kLocal.end(), static_cast<uint64_t>(info.f_type)) != kLocal.end();
}

bool RendezvousDirectory::may_be_locked(std::string_view name) const {
  const FileDescriptor in = open_to_read(directory_.get(), std::string(name));
  if (!in) return !is_gone(errno);
  // LOCK_SH keeps two ranks that ask at the same time from taking each other for the holder.
  return ::flock(in.get(), LOCK_SH | LOCK_NB) != 0;
}

std::optional<int64_t> RendezvousDirectory::last_written(std::string_view name) const {
  struct stat info {};
  if (::fstatat(directory_.get(), std::string(name).c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) return std::nullopt;
  return info.st_mtime;
}

// Removes only the directory whose descriptor this object holds: another one that has got the name is not epx's to remove.
bool RendezvousDirectory::leave() const noexcept {
  struct stat held {};
  struct stat found {};
  if (::fstat(directory_.get(), &held) != 0) return false;
  if (::fstatat(parent_.get(), name_.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) return errno == ENOENT;
  return is_same(held, found) && ::unlinkat(parent_.get(), name_.c_str(), AT_REMOVEDIR) == 0;
}

} // namespace epx
