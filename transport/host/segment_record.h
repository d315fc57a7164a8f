// SPDX-License-Identifier: Apache-2.0
// A shared memory segment has a record in a page of its own after the window, which identifies it, its owner and its machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

namespace epx {

// A peer compares the record with the one that the creator sent before it maps a segment, so that no other file can take its
// place. A process that finds a named segment learns from the record whether a process like itself made it.
struct SegmentRecord {
  char magic[16];
  uint64_t nonce[2];      // random
  char boot_id[40];       // the running kernel's, and with it the machine's; "" where /proc does not have it
  uint64_t pid_namespace; // inode of the creator's; 0 where /proc does not have it
  uint64_t uid;           // effective user of the creator
  int64_t bytes;          // the window's
};
static_assert(std::is_trivially_copyable_v<SegmentRecord> && std::has_unique_object_representations_v<SegmentRecord>);

bool operator==(const SegmentRecord& a, const SegmentRecord& b);

// Makes the record of a new segment of this process, with a new nonce.
SegmentRecord make_segment_record(int64_t bytes);

// Returns whether a process like this one wrote the record: same boot of the same machine, same PID namespace, same user.
// Returns false where /proc does not have them.
bool is_of_this_kind(const SegmentRecord& record);

// Returns "epx-" and the nonce as 32 hexadecimal digits: the name in /dev/shm, where the segment has one.
std::string segment_name(const SegmentRecord& record);

// Returns the bytes of the window, rounded up to pages, and of the record's page.
int64_t segment_file_bytes(int64_t window_bytes);

// Writes the record into the last page of a file of segment_file_bytes(record.bytes). Returns whether that succeeded.
bool write_segment_record(int fd, const SegmentRecord& record);

// Returns the record of a file, or none if the file is not a segment of epx.
std::optional<SegmentRecord> read_segment_record(int fd);

} // namespace epx
