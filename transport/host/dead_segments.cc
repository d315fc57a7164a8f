// SPDX-License-Identifier: Apache-2.0
#include "transport/host/dead_segments.h"

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "transport/file_descriptor.h"
#include "transport/host/segment_record.h"
#include "transport/host/shared_segment.h"

namespace epx {
namespace {

bool has_the_form_of_a_name(std::string_view name) {
  constexpr std::string_view kPrefix = "epx-";
  constexpr size_t kDigits = 32;
  return name.size() == kPrefix.size() + kDigits && name.starts_with(kPrefix) &&
         name.find_first_not_of("0123456789abcdef", kPrefix.size()) == std::string_view::npos;
}

// SharedSegment makes private files of this user with one name.
bool may_be_a_segment(const struct stat& file) {
  return S_ISREG(file.st_mode) && (file.st_mode & ALLPERMS) == (S_IRUSR | S_IWUSR) && file.st_uid == ::geteuid() &&
         file.st_nlink == 1;
}

void remove_if_dead(int directory, const std::string& name) {
  struct stat found {};
  if (::fstatat(directory, name.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0 || !may_be_a_segment(found)) return;
  const FileDescriptor file(::openat(directory, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat opened {};
  if (!file || ::fstat(file.get(), &opened) != 0 || opened.st_ino != found.st_ino || opened.st_dev != found.st_dev) return;
  const std::optional<SegmentRecord> record = read_segment_record(file.get());
  if (!record || segment_name(*record) != name || !is_of_this_kind(*record)) return;
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) return;                    // its creator lives and holds the lock
  if (::fstat(file.get(), &opened) != 0 || !may_be_a_segment(opened)) return; // it has changed before the lock was free
  if (::unlinkat(directory, name.c_str(), 0) == 0)
    log::transport().info("removed {}/{}: {} bytes that a dead process left", SharedSegment::kDirectory, name,
                          opened.st_size);
}

} // namespace

void remove_dead_segments() noexcept {
  try {
    const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(SharedSegment::kDirectory), ::closedir);
    if (directory == nullptr) return;
    while (const dirent* entry = ::readdir(directory.get()))
      if (has_the_form_of_a_name(entry->d_name)) remove_if_dead(::dirfd(directory.get()), entry->d_name);
  } catch (const std::exception& error) {
    log::transport().warn("looking for dead segments in {} failed: {}", SharedSegment::kDirectory, error.what());
  }
}

} // namespace epx
