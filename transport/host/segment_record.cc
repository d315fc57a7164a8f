// SPDX-License-Identifier: Apache-2.0
#include "transport/host/segment_record.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>

#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>

#include "base/error.h"
#include "base/random.h"
#include "transport/process_origin.h"

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
  const ProcessOrigin origin = this_process_origin();
  static_assert(sizeof(record.boot_id) == sizeof(origin.boot_id));
  std::copy(std::begin(origin.boot_id), std::end(origin.boot_id), record.boot_id);
  record.pid_namespace = origin.pid_namespace;
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
