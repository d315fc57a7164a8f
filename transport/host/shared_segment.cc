#include "transport/host/shared_segment.h"

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace epx {
namespace {

// Segments that this process created or opened and still maps.
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
  static Registry* const kRegistry = new Registry; // outlives every segment, also those of static storage
  return *kRegistry;
}

class FileDescriptor {
public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

private:
  int fd_;
};

int64_t free_shared_memory() {
  struct statvfs stats {};
  if (::statvfs("/dev/shm", &stats) != 0) return -1;
  return static_cast<int64_t>(stats.f_bavail) * static_cast<int64_t>(stats.f_frsize);
}

std::byte* map(int fd, int64_t bytes, int flags, const char* what) {
  void* data = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, flags, fd, 0);
  if (data == MAP_FAILED)
    fail(errno == ENOMEM ? EPX_ERROR_OUT_OF_MEMORY : EPX_ERROR_SYSTEM, "mapping {} bytes of {} failed: {}", bytes, what,
         std::strerror(errno));
  return static_cast<std::byte*>(data);
}

} // namespace

std::shared_ptr<SharedSegment> SharedSegment::create(const std::string& name, int64_t bytes) {
  const FileDescriptor file(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, S_IRUSR | S_IWUSR));
  if (file.get() < 0) fail(EPX_ERROR_SYSTEM, "creating shared memory {} failed: {}", name, std::strerror(errno));
  // From here on the name is removed if anything fails.
  std::shared_ptr<SharedSegment> segment(new SharedSegment(name, nullptr, 0, true));
  int error = EINTR;
  while (error == EINTR)
    error = ::posix_fallocate(file.get(), 0, bytes);
  if (error != 0) {
    const bool full = error == ENOSPC || error == ENOMEM || error == EFBIG;
    fail(full ? EPX_ERROR_OUT_OF_MEMORY : EPX_ERROR_SYSTEM,
         "reserving {} bytes of shared memory failed: {}; /dev/shm has {} bytes free", bytes, std::strerror(error),
         free_shared_memory());
  }
  segment->data_ = map(file.get(), bytes, MAP_SHARED, "shared memory");
  segment->bytes_ = bytes;
  registry().add(name, segment);
  return segment;
}

std::shared_ptr<SharedSegment> SharedSegment::open(const std::string& name, int64_t bytes) {
  if (auto segment = registry().find(name)) return segment;
  const FileDescriptor file(::shm_open(name.c_str(), O_RDWR, 0));
  if (file.get() < 0)
    fail(EPX_ERROR_SYSTEM,
         "opening shared memory {} failed: {}; ranks of the host transport must share one machine and one /dev/shm", name,
         std::strerror(errno));
  std::byte* data = map(file.get(), bytes, MAP_SHARED, "a peer's shared memory");
  std::shared_ptr<SharedSegment> segment(new SharedSegment(name, data, bytes, false));
  registry().add(name, segment);
  return segment;
}

std::shared_ptr<SharedSegment> SharedSegment::create_private(int64_t bytes) {
  std::byte* data = map(-1, bytes, MAP_PRIVATE | MAP_ANONYMOUS, "private memory");
  return std::shared_ptr<SharedSegment>(new SharedSegment("", data, bytes, false));
}

SharedSegment::~SharedSegment() {
  unlink();
  if (data_ != nullptr && ::munmap(data_, static_cast<size_t>(bytes_)) != 0)
    log::transport().warn("unmapping {} bytes of {} failed: {}", bytes_, name_, std::strerror(errno));
  registry().remove(name_);
}

void SharedSegment::unlink() {
  if (!linked_) return;
  linked_ = false;
  if (::shm_unlink(name_.c_str()) != 0) log::transport().warn("removing {} failed: {}", name_, std::strerror(errno));
}

} // namespace epx
