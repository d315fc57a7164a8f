// SPDX-License-Identifier: Apache-2.0
#include "transport/host/shared_segment.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"
#include "base/resource_limits.h"
#include "transport/host/memory_limit.h"

#if !defined(MFD_NOEXEC_SEAL)
#define MFD_NOEXEC_SEAL 0x0008U // since Linux 6.3
#endif

namespace epx {
namespace {

constexpr int kSeals =
    F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL; // a peer that shrank the file would give the others SIGBUS

// The registry finds the segments that this process created or opened and still maps, by name; nameless ones are here by the
// name that they would have.
class Registry {
public:
  std::shared_ptr<SharedSegment> find(const std::string& name) {
    const std::scoped_lock lock(mutex_);
    const auto found = segments_.find(name);
    return found == segments_.end() ? nullptr : found->second.lock();
  }
  void add(const std::string& name, const std::shared_ptr<SharedSegment>& segment) {
    const std::scoped_lock lock(mutex_);
    segments_[name] = segment;
  }
  void remove(const std::string& name) {
    const std::scoped_lock lock(mutex_);
    const auto found = segments_.find(name);
    if (found != segments_.end() && found->second.expired()) segments_.erase(found);
  }

private:
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<SharedSegment>> segments_;
};

Registry& registry() {
  static Registry* const kRegistry = new Registry; // it outlives every segment, also those of static storage
  return *kRegistry;
}

std::string path_of(const SegmentRecord& record) {
  return fmt::format("{}/{}", SharedSegment::kDirectory, segment_name(record));
}

std::string path_of_descriptor(const FileDescriptor& file) {
  return fmt::format("/proc/self/fd/{}", file.get());
}

// ---- Reserving ----

// Returns what is free in /dev/shm; none where it has no size of its own.
std::optional<MemoryLimit> limit_of_directory() {
  struct statvfs stats {};
  if (::statvfs(SharedSegment::kDirectory, &stats) != 0 || stats.f_blocks == 0) return std::nullopt;
  return MemoryLimit{static_cast<int64_t>(stats.f_bavail) * static_cast<int64_t>(stats.f_frsize), 0,
                     SharedSegment::kDirectory};
}

MemoryLimit current_limit(SegmentKind kind) {
  MemoryLimit limit = tightest_memory_limit();
  if (kind == SegmentKind::kNamed)
    if (const auto directory = limit_of_directory(); directory && directory->usable_bytes() < limit.usable_bytes())
      return *directory;
  return limit;
}

// The bytes that this segment has already reserved count as free, since they are given back.
std::string describe(const MemoryLimit& limit, int64_t reserved) {
  const int64_t free_bytes = std::min(limit.free_bytes, std::numeric_limits<int64_t>::max() - reserved) + reserved;
  return fmt::format("{} bytes are free, and {} of them have to stay so, in {}", free_bytes, limit.spare_bytes, limit.of);
}

// Reserves `file_bytes` for a window of window_bytes. The kernel does not refuse pages of shared memory for lack of memory, it
// kills a process. So this reads what is free and reserves in steps, since the other ranks reserve theirs at the same time.
// A step is a small part of what is free, so that all ranks of a machine together do not take more than there is between two
// reads.
void reserve(int fd, SegmentKind kind, int64_t file_bytes, int64_t window_bytes) {
  constexpr int64_t kMinStep = int64_t{256} << 10;
  constexpr int64_t kMaxStep = int64_t{16} << 20;
  constexpr int64_t kFractionOfFree = 256; // a step is at most 1/256 of what is free
  require_file_size(EPX_ERROR_OUT_OF_MEMORY, fmt::format("reserving {} bytes of shared memory", window_bytes), file_bytes);
  int64_t max_step = kMaxStep;
  for (int64_t reserved = 0; reserved < file_bytes;) {
    const MemoryLimit limit = current_limit(kind);
    const int64_t missing = file_bytes - reserved;
    if (missing > limit.usable_bytes())
      fail(EPX_ERROR_OUT_OF_MEMORY, "reserving {} bytes of shared memory failed: {}", window_bytes,
           describe(limit, reserved));
    const int64_t step = std::min(missing, std::clamp(limit.free_bytes / kFractionOfFree, kMinStep, max_step));
    const int error = ::posix_fallocate(fd, reserved, step);
    if (error == 0) {
      reserved += step;
    } else if (error == EINTR) { // older kernels undo a step that a signal interrupts; a shorter step can succeed
      max_step = std::max(max_step / 2, kMinStep);
    } else {
      const bool full = error == ENOSPC || error == ENOMEM || error == EFBIG;
      fail(full ? EPX_ERROR_OUT_OF_MEMORY : EPX_ERROR_SYSTEM, "reserving {} bytes of shared memory failed: {}; {}",
           window_bytes, describe_errno(error), describe(current_limit(kind), reserved));
    }
  }
}

std::byte* map(int fd, int64_t bytes, int flags, const char* what) {
  void* data = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, flags, fd, 0);
  if (data == MAP_FAILED)
    fail(errno == ENOMEM ? EPX_ERROR_OUT_OF_MEMORY : EPX_ERROR_SYSTEM, "mapping {} bytes of {} failed: {}", bytes, what,
         describe_errno(errno));
  return static_cast<std::byte*>(data);
}

// Says which step failed, by errno. A process without descriptors could not take another way either, so this throws then.
void set_why_not(std::string& why_not, const std::string& step) {
  const int error = errno;
  why_not = fmt::format("{} failed: {}", step, describe_errno(error));
  if (error == EMFILE || error == ENFILE) fail(EPX_ERROR_SYSTEM, "sharing memory with the other ranks: {}", why_not);
}

// ---- Nameless memory ----

FileDescriptor make_nameless_file(std::string& why_not) {
  FileDescriptor file(::memfd_create("epx-window", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL));
  if (!file && errno == EINVAL) file = FileDescriptor(::memfd_create("epx-window", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) set_why_not(why_not, "memfd_create");
  return file;
}

// Returns this process's number in /proc, where peers look it up. It differs from getpid() where /proc is of another PID
// namespace.
std::optional<int32_t> pid_in_proc() {
  char text[32] = "";
  const ssize_t length = ::readlink("/proc/self", text, sizeof(text) - 1);
  if (length <= 0) return std::nullopt;
  return static_cast<int32_t>(std::strtol(text, nullptr, 10));
}

bool is_the_file_of(const SegmentAddress& address, int fd) {
  struct stat file {};
  return ::fstat(fd, &file) == 0 && S_ISREG(file.st_mode) && file.st_dev == address.device &&
         file.st_ino == address.inode && file.st_size == segment_file_bytes(address.record.bytes);
}

// O_PATH opens only a handle first: if the number is another process's by now, or of another machine, opening its file to read
// and write might act on a pipe or a device.
FileDescriptor open_nameless(const SegmentAddress& address, std::string& why_not) {
  const std::string path = fmt::format("/proc/{}/fd/{}", address.pid, address.fd);
  const FileDescriptor handle(::open(path.c_str(), O_PATH | O_CLOEXEC));
  if (!handle) {
    set_why_not(why_not, "opening " + path);
    return FileDescriptor();
  }
  if (!is_the_file_of(address, handle.get())) {
    why_not = fmt::format("{} is not the peer's segment: the ranks have different PID namespaces or machines", path);
    return FileDescriptor();
  }
  FileDescriptor file(::open(path_of_descriptor(handle).c_str(), O_RDWR | O_CLOEXEC));
  if (!file) {
    set_why_not(why_not, fmt::format("opening {} to write", path));
  } else if ((::fcntl(file.get(), F_GET_SEALS) & kSeals) != kSeals) {
    why_not = fmt::format("{} is not sealed", path);
    file.close();
  }
  return file;
}

// ---- Named memory ----

FileDescriptor open_named(const SegmentAddress& address, std::string& why_not) {
  const std::string path = path_of(address.record);
  FileDescriptor file(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  if (!file) {
    set_why_not(why_not, "opening " + path);
  } else if (!is_the_file_of(address, file.get())) {
    why_not = fmt::format("{} is not the peer's segment", path);
    file.close();
  }
  return file;
}

// Gives a nameless file its name. The first call needs a capability or Linux 6.10, the second needs /proc.
bool link_file(const FileDescriptor& file, const std::string& path) {
  return ::linkat(file.get(), "", AT_FDCWD, path.c_str(), AT_EMPTY_PATH) == 0 ||
         ::linkat(AT_FDCWD, path_of_descriptor(file).c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0;
}

[[noreturn]] void fail_creating(const char* step) {
  const int error = errno;
  fail(error == ENOSPC || error == ENOMEM ? EPX_ERROR_OUT_OF_MEMORY : EPX_ERROR_SYSTEM,
       "creating shared memory in {} failed: {}: {}", SharedSegment::kDirectory, step, describe_errno(error));
}

SegmentAddress make_address(const SegmentRecord& record, const FileDescriptor& file, SegmentKind kind) {
  struct stat stats {};
  if (::fstat(file.get(), &stats) != 0) fail_creating("fstat");
  return {record, stats.st_dev, stats.st_ino, kind, 0, 0, 0};
}

} // namespace

std::shared_ptr<SharedSegment> SharedSegment::create_nameless(int64_t bytes, std::string& why_not) {
  const int64_t file_bytes = segment_file_bytes(bytes);
  const std::optional<int32_t> pid = pid_in_proc();
  if (!pid) {
    why_not = fmt::format("reading /proc/self failed: {}", describe_errno(errno));
    return nullptr;
  }
  FileDescriptor file = make_nameless_file(why_not);
  if (!file) return nullptr;
  reserve(file.get(), SegmentKind::kNameless, file_bytes, bytes);
  const SegmentRecord record = make_segment_record(bytes);
  if (::fchmod(file.get(), S_IRUSR | S_IWUSR) != 0 || !write_segment_record(file.get(), record) ||
      ::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) {
    why_not = fmt::format("sealing nameless memory failed: {}", describe_errno(errno));
    return nullptr;
  }
  std::shared_ptr<SharedSegment> segment(new SharedSegment(make_address(record, file, SegmentKind::kNameless)));
  segment->address_.pid = *pid;
  segment->address_.fd = file.get();
  segment->data_ = map(file.get(), bytes, MAP_SHARED, "shared memory");
  segment->file_ = std::move(file);
  registry().add(segment_name(record), segment);
  return segment;
}

// The file gets its name last: a process that finds the name finds a complete record and, while this process lives, the lock.
std::shared_ptr<SharedSegment> SharedSegment::create_named(int64_t bytes) {
  const int64_t file_bytes = segment_file_bytes(bytes);
  FileDescriptor file(::open(kDirectory, O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!file) fail_creating("O_TMPFILE");
  if (::fchmod(file.get(), S_IRUSR | S_IWUSR) != 0) fail_creating("fchmod"); // the umask may have taken some of it
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) fail_creating("flock");
  reserve(file.get(), SegmentKind::kNamed, file_bytes, bytes);
  const SegmentRecord record = make_segment_record(bytes);
  if (!write_segment_record(file.get(), record)) fail_creating("pwrite");
  std::shared_ptr<SharedSegment> segment(new SharedSegment(make_address(record, file, SegmentKind::kNamed)));
  segment->data_ = map(file.get(), bytes, MAP_SHARED, "shared memory");
  if (!link_file(file, path_of(record))) fail_creating("linkat");
  segment->linked_ = true;
  segment->file_ = std::move(file);
  registry().add(segment_name(record), segment);
  return segment;
}

std::shared_ptr<SharedSegment> SharedSegment::create_private(int64_t bytes) {
  SegmentAddress address{};
  address.record.bytes = bytes;
  std::shared_ptr<SharedSegment> segment(new SharedSegment(address));
  segment->data_ = map(-1, bytes, MAP_PRIVATE | MAP_ANONYMOUS, "private memory");
  return segment;
}

std::shared_ptr<SharedSegment> SharedSegment::open(const SegmentAddress& address, std::string& why_not) {
  const std::string name = segment_name(address.record);
  if (auto segment = registry().find(name)) return segment;
  const FileDescriptor file =
      address.kind == SegmentKind::kNamed ? open_named(address, why_not) : open_nameless(address, why_not);
  if (!file) return nullptr;
  const std::optional<SegmentRecord> record = read_segment_record(file.get());
  if (!record || !(*record == address.record)) {
    why_not = "the peer's segment carries another record than the peer sent";
    return nullptr;
  }
  std::shared_ptr<SharedSegment> segment(new SharedSegment(address));
  segment->data_ = map(file.get(), address.record.bytes, MAP_SHARED, "a peer's shared memory");
  registry().add(name, segment);
  return segment;
}

// Without memory for the path the name stays, and whoever next looks for dead segments removes it.
void SharedSegment::remove_name(const SegmentAddress& address) noexcept {
  if (address.kind != SegmentKind::kNamed) return;
  try {
    const std::string path = path_of(address.record);
    const FileDescriptor file(::open(path.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    if (!file || !is_the_file_of(address, file.get())) return;
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) // ENOENT: a peer was quicker
      log::transport().warn("removing {} failed: {}", path, describe_errno(errno));
  } catch (const std::exception& error) {
    log::transport().warn("removing the name of a segment failed: {}", error.what());
  }
}

// Without memory for the name the registry keeps its entry, which find() takes for none.
SharedSegment::~SharedSegment() {
  withdraw();
  if (data_ != nullptr && ::munmap(data_, static_cast<size_t>(bytes())) != 0)
    log::transport().warn("unmapping {} bytes of shared memory failed: {}", bytes(), describe_errno(errno));
  if (address_.kind == SegmentKind::kPrivate) return;
  try {
    registry().remove(segment_name(address_.record));
  } catch (const std::exception& error) {
    log::transport().warn("forgetting a segment failed: {}", error.what());
  }
}

// Closing the file releases its lock, so the name is removed first.
void SharedSegment::withdraw() {
  if (std::exchange(linked_, false)) remove_name(address_);
  file_.close();
}

} // namespace epx
