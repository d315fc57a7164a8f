// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/json_file.h"

#include <cerrno>
#include <cstring>
#include <string_view>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/ep_bench/errors.h"

namespace epx::bench {
namespace {

std::string reason_for(const std::string& file) {
  return fmt::format("cannot write '{}' of --json: {}", file, std::strerror(errno));
}

} // namespace

// O_NONBLOCK: opening a fifo that nobody reads fails at once. Writes then wait for the reader, as to any pipe.
JsonFile::JsonFile(const std::string& file) : file_(file) {
  constexpr int kFlags = O_WRONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
  fd_ = ::open(file.c_str(), kFlags | O_CREAT | O_EXCL, 0666);
  is_new_ = fd_ >= 0;
  if (fd_ < 0 && errno == EEXIST)
    fd_ = ::open(file.c_str(), kFlags | O_CREAT, 0666); // this creates the target of a symbolic link, too
  if (fd_ < 0) throw UsageError(reason_for(file));
  ::fcntl(fd_, F_SETFL, 0);
}

JsonFile::~JsonFile() {
  ::close(fd_);
  if (is_new_ && !is_written_) ::unlink(file_.c_str());
}

void JsonFile::write(const nlohmann::json& json) {
  is_written_ = true;
  struct stat state {};
  const bool is_regular = ::fstat(fd_, &state) == 0 && S_ISREG(state.st_mode);
  if (is_regular && ::ftruncate(fd_, 0) != 0) throw RuntimeError(reason_for(file_));
  const std::string text = json.dump(2) + '\n';
  for (std::string_view left = text; !left.empty();) {
    const ssize_t written = ::write(fd_, left.data(), left.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw RuntimeError(reason_for(file_));
    left.remove_prefix(static_cast<size_t>(written));
  }
}

} // namespace epx::bench
