// SPDX-License-Identifier: Apache-2.0
// A SharedSegment is one segment of shared memory, mapped into this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "transport/file_descriptor.h"
#include "transport/host/segment_record.h"

namespace epx {

// The kind of a segment says how peers find it.
enum class SegmentKind : int32_t {
  kPrivate,  // peers do not find it; it serves a group of one rank
  kNameless, // peers open the creator's /proc/PID/fd; it has no name, so nothing is left whenever its processes die
  kNamed     // peers open a name in /dev/shm, where they may not look into /proc, or have another PID namespace
};

// A SegmentAddress is what a peer needs to open a segment. The ranks exchange it; a zero one opens nothing.
struct SegmentAddress {
  SegmentRecord record;
  uint64_t device; // the file's, with the inode
  uint64_t inode;
  SegmentKind kind;
  int32_t pid; // nameless: the creator's, as its /proc numbers it
  int32_t fd;  // nameless: in the creator
  int32_t reserved;
};

// Ranks that are threads of one process share one mapping of a segment, so that they access it at one address.
class SharedSegment {
public:
  static constexpr const char* kDirectory = "/dev/shm"; // named segments are there

  // These create a segment of zero bytes. Every page is reserved: memory that is exhausted (the machine's, a cgroup's, that of
  // /dev/shm) is an error here, not a SIGBUS or an out-of-memory kill later. Peers can open it until withdraw(). They throw
  // OUT_OF_MEMORY or SYSTEM.

  // Returns NULL and says why where the system has no such memory. Throws SYSTEM too when the process has no descriptor left.
  static std::shared_ptr<SharedSegment> create_nameless(int64_t bytes, std::string& why_not);
  // The file gets its name, with mode 0600, when it is complete and locked. The lock is held as long as the name exists (see
  // dead_segments.h).
  static std::shared_ptr<SharedSegment> create_named(int64_t bytes);

  // Maps memory that only this process sees; its pages are not reserved.
  static std::shared_ptr<SharedSegment> create_private(int64_t bytes);

  // Maps a segment that another rank created. Returns NULL and says why if it cannot be opened or is not the one of `address`.
  // Throws OUT_OF_MEMORY or SYSTEM when mapping it fails, and SYSTEM when the process has no descriptor left.
  static std::shared_ptr<SharedSegment> open(const SegmentAddress& address, std::string& why_not);

  // Removes the name of a segment if it still has one. The surviving ranks call it, since the segment's creator may have died.
  static void remove_name(const SegmentAddress& address) noexcept;

  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;
  ~SharedSegment();

  std::byte* data() const { return data_; }
  int64_t bytes() const { return address_.record.bytes; }
  const SegmentAddress& address() const { return address_; }

  // The creator calls this when no peer will open the segment any more. It removes the name and closes the file; the memory
  // lives as long as a process maps it.
  void withdraw();

private:
  explicit SharedSegment(const SegmentAddress& address) : address_(address) {}

  SegmentAddress address_;
  std::byte* data_ = nullptr; // NULL: not yet mapped
  FileDescriptor file_;       // open in the creator until withdraw(); a named segment's holds the lock
  bool linked_ = false;       // true: this object still has to remove the name
};

} // namespace epx
