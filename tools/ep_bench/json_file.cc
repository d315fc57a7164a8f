// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/json_file.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
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

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

struct FreeText {
  void operator()(char* text) const { std::free(text); }
};

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
  struct stat state {};
  is_regular_ = ::fstat(fd_, &state) == 0 && S_ISREG(state.st_mode);
}

JsonFile::~JsonFile() {
  ::close(fd_);
  if (is_new_ && !is_written_) ::unlink(file_.c_str());
}

void JsonFile::write(const nlohmann::json& json) {
  is_written_ = true;
  const std::string text = json.dump(2) + '\n';
  if (is_regular_ && replace(text)) return;
  if (is_regular_ && (::ftruncate(fd_, 0) != 0 || ::lseek(fd_, 0, SEEK_SET) != 0)) throw RuntimeError(reason_for(file_));
  if (!write_all(fd_, text)) throw RuntimeError(reason_for(file_));
}

bool JsonFile::replace(const std::string& text) const {
  const std::unique_ptr<char, FreeText> target(::realpath(file_.c_str(), nullptr)); // the target of a symbolic link, too
  struct stat state {};
  if (target == nullptr || ::fstat(fd_, &state) != 0) return false;
  std::string name = fmt::format("{}.XXXXXX", target.get());
  const int fd = ::mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) return false;
  const bool is_whole = ::fchmod(fd, state.st_mode & 0777) == 0 && write_all(fd, text);
  const int error = errno;
  if (::close(fd) == 0 && is_whole && ::rename(name.c_str(), target.get()) == 0) return true;
  if (!is_whole) errno = error;
  const std::string reason = reason_for(file_);
  ::unlink(name.c_str());
  throw RuntimeError(reason);
}

} // namespace epx::bench
