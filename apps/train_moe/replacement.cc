// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/replacement.h"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <random>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "apps/train_moe/errors.h"

namespace train {
namespace {

std::string folder_of(const std::string& file) {
  const std::string folder = std::filesystem::path(file).parent_path();
  return folder.empty() ? "." : folder;
}

std::string new_name() {
  std::random_device random;
  const uint64_t high = random();
  return fmt::format(".train_moe-{:016x}.tmp", high << 32 | random());
}

// Opens a file that is not there yet, under a name that it chooses; -1 and errno when that fails.
int create_in(int folder, std::string& name) {
  constexpr int kAttempts = 16; // a name of 64 random bits exists already only if another program guesses it
  int file = -1;
  for (int attempt = 0; attempt < kAttempts && (attempt == 0 || (file < 0 && errno == EEXIST)); ++attempt) {
    name = new_name();
    file = ::openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  }
  return file;
}

} // namespace

Replacement::Replacement(const char* option, const std::string& file)
    : shown_(fmt::format("{} {}", option, file)), name_(std::filesystem::path(file).filename()),
      folder_(::open(folder_of(file).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (folder_.get() < 0) fail_with_errno();
  require_regular();
  temporary_ = Descriptor(create_in(folder_.get(), temporary_name_));
  if (temporary_.get() < 0) fail_with_errno();
  is_temporary_there_ = true;
}

Replacement::~Replacement() {
  if (is_temporary_there_) ::unlinkat(folder_.get(), temporary_name_.c_str(), 0);
}

void Replacement::write(std::span<const char> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(temporary_.get(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_with_errno();
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void Replacement::commit() {
  // Without the first fsync a crash could leave the new name with old or missing bytes; a full disk, as on NFS, is reported
  // here at the latest. The second one makes the new name last.
  if (::fsync(temporary_.get()) != 0) fail_with_errno();
  require_regular();
  if (::renameat(folder_.get(), temporary_name_.c_str(), folder_.get(), name_.c_str()) != 0) fail_with_errno();
  is_temporary_there_ = false;
  if (::fsync(folder_.get()) != 0 && errno != EINVAL) fail_with_errno(); // EINVAL: this file system needs none
}

void Replacement::require_regular() const {
  struct stat state {};
  if (name_.empty() || name_ == "." || name_ == "..") {
    state.st_mode = S_IFDIR;
  } else if (::fstatat(folder_.get(), name_.c_str(), &state, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return;
    fail_with_errno();
  }
  if (!S_ISREG(state.st_mode))
    fail(kExitUsage, "{}: it is {}; only a regular file is replaced", shown_, kind_of(state.st_mode));
}

void Replacement::fail_with_errno() const {
  fail(kExitUsage, "{}: {}", shown_, std::strerror(errno));
}

} // namespace train
