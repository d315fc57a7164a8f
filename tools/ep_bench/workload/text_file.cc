// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/workload/text_file.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"

namespace epx::bench {
namespace {

[[noreturn]] void refuse(const std::string& name, const std::string& reason) {
  throw UsageError(fmt::format("cannot read {}: {}", name, reason));
}

void require_at_most(int64_t bytes, const std::string& name) {
  if (bytes > kMaxTextBytes)
    refuse(name, fmt::format("it has {} bytes or more; at most {} are allowed", bytes, kMaxTextBytes));
}

class InputFile {
public:
  // O_NONBLOCK: opening a fifo that nobody writes to returns at once. It changes nothing for a regular file.
  InputFile(const std::string& file, const std::string& name)
      : name_(name), fd_(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)) {
    if (fd_ < 0) refuse(name, std::strerror(errno));
  }
  ~InputFile() { ::close(fd_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  struct stat state() const {
    struct stat state {};
    if (::fstat(fd_, &state) != 0) refuse(name_, std::strerror(errno));
    return state;
  }

  // Returns how many bytes were read; 0 at the end.
  size_t read(char* to, size_t bytes) const {
    for (;;) {
      const ssize_t got = ::read(fd_, to, bytes);
      if (got >= 0) return static_cast<size_t>(got);
      if (errno != EINTR) refuse(name_, std::strerror(errno));
    }
  }

private:
  const std::string& name_;
  int fd_;
};

} // namespace

std::string read_text(const std::string& file, const std::string& name) {
  constexpr size_t kAtOnce = size_t{1} << 20;
  const InputFile input(file, name);
  const struct stat state = input.state();
  if (!S_ISREG(state.st_mode))
    refuse(name, S_ISDIR(state.st_mode) ? "it is a directory, and not a regular file"
                                        : "it is a device, fifo or socket, and not a regular file");
  require_at_most(state.st_size, name);
  std::string text;
  for (;;) { // ignores the size: a file of /proc has none, and one that is being written grows
    const size_t before = text.size();
    text.resize(before + kAtOnce);
    const size_t got = input.read(text.data() + before, kAtOnce);
    text.resize(before + got);
    require_at_most(static_cast<int64_t>(text.size()), name);
    if (got == 0) return text;
  }
}

} // namespace epx::bench
