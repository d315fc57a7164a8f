#include "transport/bootstrap/rendezvous_directory.h"

#include <cerrno>
#include <cstdint>
#include <memory>
#include <system_error>
#include <utility>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/error.h"

namespace epx {
namespace {

// How often a writer creates the directory anew after a rank that leaves has removed it in between.
constexpr int kMaxAttempts = 1000;

class FileDescriptor {
public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }
  int close() { return ::close(std::exchange(fd_, -1)); } // file systems may report a failed write only here

private:
  int fd_;
};

std::string words(int error) {
  return std::generic_category().message(error);
}

[[noreturn]] void fail_on(const char* what, const std::string& path, int error) {
  fail(EPX_ERROR_SYSTEM, "file rendezvous: cannot {} '{}': {}", what, path, words(error));
}

int open_directory(const std::string& path) {
  return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

// 0 or an errno.
int write_all(int fd, std::string_view content) {
  while (!content.empty()) {
    const ssize_t written = ::write(fd, content.data(), content.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    content.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
}

} // namespace

RendezvousDirectory::RendezvousDirectory(const std::string& parent, const std::string& job_id, std::string writer)
    : parent_(parent), path_(parent + "/epx-" + job_id), writer_(std::move(writer)) {
  create();
}

void RendezvousDirectory::create() const {
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    if (::mkdir(path_.c_str(), 0700) != 0 && errno != EEXIST)
      fail(EPX_ERROR_SYSTEM, "file rendezvous: cannot create '{}': {}; the directory '{}' must exist and be writable",
           path_, words(errno), parent_);
    // Whoever else can write to the parent may have put something here that others can read, or that leads elsewhere.
    const FileDescriptor directory(open_directory(path_));
    if (!directory && errno == ENOENT) continue; // a rank that leaves has just removed it
    if (!directory) fail_on("open as a directory", path_, errno);
    struct stat info {};
    if (::fstat(directory.get(), &info) != 0) fail_on("examine", path_, errno);
    if (info.st_uid != ::geteuid())
      fail(EPX_ERROR_SYSTEM, "file rendezvous: '{}' belongs to user {}, and this rank runs as user {}", path_, info.st_uid,
           ::geteuid());
    if ((info.st_mode & 0777) != 0700 && ::fchmod(directory.get(), 0700) != 0) fail_on("set mode 0700 of", path_, errno);
    return;
  }
  fail(EPX_ERROR_SYSTEM, "file rendezvous: '{}' is removed as often as it is created", path_);
}

std::string RendezvousDirectory::file(std::string_view name) const {
  return fmt::format("{}/{}", path_, name);
}

void RendezvousDirectory::write(std::string_view name, std::string_view content) {
  const std::string final_path = file(name);
  const std::string path = file(fmt::format("tmp.{}.{}", writer_, num_written_++));
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    FileDescriptor out(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!out && errno == ENOENT) {
      create(); // a rank that left has removed the directory, which was empty
      continue;
    }
    if (!out) fail_on("create", path, errno);
    int error = write_all(out.get(), content);
    if (out.close() != 0 && error == 0) error = errno;
    if (error == 0 && ::rename(path.c_str(), final_path.c_str()) != 0) error = errno;
    if (error == 0) return;
    ::unlink(path.c_str());
    fail_on("write", final_path, error);
  }
  fail(EPX_ERROR_SYSTEM, "file rendezvous: '{}' is removed as often as it is created", path_);
}

std::optional<std::string> RendezvousDirectory::read(std::string_view name, size_t max_bytes) const {
  const std::string path = file(name);
  const FileDescriptor in(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  // ESTALE: removed on another machine while this one looked; ELOOP: a link, which no rank leaves.
  if (!in && (errno == ENOENT || errno == ESTALE || errno == ELOOP || errno == ENXIO)) return std::nullopt;
  if (!in) fail_on("open", path, errno);
  struct stat info {};
  if (::fstat(in.get(), &info) != 0) {
    if (errno == ESTALE) return std::nullopt;
    fail_on("examine", path, errno);
  }
  if (!S_ISREG(info.st_mode) || static_cast<uint64_t>(info.st_size) > max_bytes) return std::nullopt;
  std::string content(static_cast<size_t>(info.st_size), '\0');
  size_t have = 0;
  while (have < content.size()) {
    const ssize_t got = ::read(in.get(), content.data() + have, content.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == ESTALE) return std::nullopt;
    if (got < 0) fail_on("read", path, errno);
    if (got == 0) break;
    have += static_cast<size_t>(got);
  }
  content.resize(have);
  return content;
}

bool RendezvousDirectory::remove(std::string_view name) const noexcept {
  try {
    return ::unlink(file(name).c_str()) == 0;
  } catch (...) {
    return false;
  }
}

RendezvousDirectory::Names RendezvousDirectory::list() const {
  Names names;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path_.c_str()), ::closedir);
  if (directory == nullptr) {
    if (errno == ENOENT || errno == ESTALE) return names; // removed because it was empty
    fail_on("list", path_, errno);
  }
  while (const dirent* entry = ::readdir(directory.get()))
    names.insert(entry->d_name);
  return names;
}

void RendezvousDirectory::refresh() const noexcept {
  const FileDescriptor opened(open_directory(path_));
}

void RendezvousDirectory::remove_older_than(std::string_view reference, std::chrono::seconds age) const noexcept {
  try {
    struct stat now {};
    if (::stat(file(reference).c_str(), &now) != 0) return;
    for (const std::string& name : list()) {
      const std::string path = file(name);
      struct stat info {};
      if (::lstat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
      if (now.st_mtime - info.st_mtime >= age.count()) ::unlink(path.c_str());
    }
  } catch (...) { // leftovers do no harm
  }
}

void RendezvousDirectory::leave() const noexcept {
  ::rmdir(path_.c_str());
}

} // namespace epx
