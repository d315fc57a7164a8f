// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/files.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "apps/train_moe/errors.h"

namespace train {

const char* kind_of(mode_t mode) {
  switch (mode & S_IFMT) {
  case S_IFREG:
    return "a regular file";
  case S_IFDIR:
    return "a directory";
  case S_IFLNK:
    return "a symbolic link";
  case S_IFCHR:
    return "a character device";
  case S_IFBLK:
    return "a block device";
  case S_IFIFO:
    return "a fifo";
  case S_IFSOCK:
    return "a socket";
  }
  return "a file of an unknown kind";
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

// O_NONBLOCK: opening a fifo that nobody writes to returns at once. It changes nothing for a regular file.
InputFile::InputFile(const char* option, const std::string& file)
    : name_(fmt::format("{} {}", option, file)), file_(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)) {
  struct stat state {};
  if (file_.get() < 0 || ::fstat(file_.get(), &state) != 0) fail(kExitUsage, "{}: {}", name_, std::strerror(errno));
  if (!S_ISREG(state.st_mode)) fail(kExitUsage, "{}: it is {}; it must be a regular file", name_, kind_of(state.st_mode));
  size_ = state.st_size;
}

size_t InputFile::read(std::span<char> bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = ::read(file_.get(), bytes.data() + done, bytes.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(kExitUsage, "{}: {}", name_, std::strerror(errno));
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

std::vector<unsigned char> read_file(const char* option, const std::string& file, int64_t max_bytes) {
  InputFile input(option, file);
  const auto require_at_most = [&](int64_t size) {
    if (size > max_bytes)
      fail(kExitUsage, "{} {}: it has {} bytes or more; at most {} are allowed", option, file, size, max_bytes);
  };
  require_at_most(input.size());
  std::vector<unsigned char> bytes;
  // The bytes read are counted, since a file of /proc has a size of 0, and one that is being written grows.
  for (size_t next = static_cast<size_t>(input.size()) + 1;; next = size_t{1} << 20) {
    const size_t before = bytes.size();
    bytes.resize(before + next);
    const size_t got = input.read({reinterpret_cast<char*>(bytes.data()) + before, next});
    bytes.resize(before + got);
    require_at_most(std::ssize(bytes));
    if (got < next) return bytes;
  }
}

} // namespace train
