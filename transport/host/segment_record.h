// What a shared memory segment says of itself, in a page of its own after the window: whose it is, and where it was made.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

namespace epx {

// Peers compare it with what they were told before they map a segment, so that no other file can take its place. A process that
// finds a named segment learns from it whether the segment is of its own kind.
struct SegmentRecord {
  char magic[16];
  uint64_t nonce[2];      // random
  char boot_id[40];       // of the running kernel, and with it of the machine; "" where /proc does not tell
  uint64_t pid_namespace; // inode of the creator's; 0 where /proc does not tell
  uint64_t uid;           // effective user of the creator
  int64_t bytes;          // of the window
};
static_assert(std::is_trivially_copyable_v<SegmentRecord> && std::has_unique_object_representations_v<SegmentRecord>);

bool operator==(const SegmentRecord& a, const SegmentRecord& b);

// Of a new segment of this process, with a new nonce.
SegmentRecord make_segment_record(int64_t bytes);

// Whether a process like this one wrote the record: same boot of the same machine, same PID namespace, same user. False where
// /proc does not tell.
bool is_of_this_kind(const SegmentRecord& record);

// "epx-" and the nonce as 32 hexadecimal digits: the name in /dev/shm, where there is one.
std::string segment_name(const SegmentRecord& record);

// The window rounded up to pages, and the record's page.
int64_t segment_file_bytes(int64_t window_bytes);

// Writes the record into the last page of a file of segment_file_bytes(record.bytes). Returns whether that succeeded.
bool write_segment_record(int fd, const SegmentRecord& record);

// The record of a file, or none if the file is not a segment of epx.
std::optional<SegmentRecord> read_segment_record(int fd);

} // namespace epx
