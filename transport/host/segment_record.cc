#include "transport/host/segment_record.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>

#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>

#include "runtime/base/error.h"
#include "runtime/base/random.h"

namespace epx {
namespace {

constexpr char kMagic[16] = "epx segment 1";

int64_t page_bytes() {
  static const int64_t kBytes = ::sysconf(_SC_PAGESIZE);
  return kBytes;
}

SegmentRecord record_of_this_process() {
  SegmentRecord record{};
  std::copy(std::begin(kMagic), std::end(kMagic), record.magic);
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  boot_id.copy(record.boot_id, sizeof(record.boot_id) - 1);
  struct stat name_space {};
  if (::stat("/proc/self/ns/pid", &name_space) == 0) record.pid_namespace = name_space.st_ino;
  record.uid = ::geteuid();
  return record;
}

} // namespace

bool operator==(const SegmentRecord& a, const SegmentRecord& b) {
  return std::memcmp(&a, &b, sizeof(SegmentRecord)) == 0;
}

SegmentRecord make_segment_record(int64_t bytes) {
  SegmentRecord record = record_of_this_process();
  record.nonce[0] = random_u64();
  record.nonce[1] = random_u64();
  record.bytes = bytes;
  return record;
}

bool is_of_this_kind(const SegmentRecord& record) {
  SegmentRecord own = record_of_this_process();
  if (own.boot_id[0] == '\0' || own.pid_namespace == 0) return false;
  std::copy(std::begin(record.nonce), std::end(record.nonce), own.nonce);
  own.bytes = record.bytes;
  return own == record;
}

std::string segment_name(const SegmentRecord& record) {
  return fmt::format("epx-{:016x}{:016x}", record.nonce[0], record.nonce[1]);
}

int64_t segment_file_bytes(int64_t window_bytes) {
  const int64_t page = page_bytes();
  if (window_bytes > std::numeric_limits<int64_t>::max() - 2 * page)
    fail(EPX_ERROR_OUT_OF_MEMORY, "{} bytes of shared memory are more than a file can have", window_bytes);
  return (window_bytes + page - 1) / page * page + page;
}

bool write_segment_record(int fd, const SegmentRecord& record) {
  const int64_t offset = segment_file_bytes(record.bytes) - page_bytes();
  return ::pwrite(fd, &record, sizeof(record), offset) == static_cast<ssize_t>(sizeof(record));
}

std::optional<SegmentRecord> read_segment_record(int fd) {
  struct stat file {};
  if (::fstat(fd, &file) != 0 || !S_ISREG(file.st_mode) || file.st_size < page_bytes()) return std::nullopt;
  SegmentRecord record{};
  if (::pread(fd, &record, sizeof(record), file.st_size - page_bytes()) != static_cast<ssize_t>(sizeof(record)))
    return std::nullopt;
  if (!std::equal(std::begin(kMagic), std::end(kMagic), record.magic)) return std::nullopt;
  if (record.bytes < 0 || record.bytes > file.st_size || segment_file_bytes(record.bytes) != file.st_size)
    return std::nullopt;
  return record;
}

} // namespace epx
