// One POSIX shared memory segment, mapped into this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace epx {

// Ranks that are threads of one process share one mapping of a segment, so that their accesses to it meet at one address.
class SharedSegment {
public:
  // Creates a segment of zero bytes, every page reserved (a full /dev/shm is an error here, not a SIGBUS later). The name
  // is visible, mode 0600, until unlink() or destruction by the creator. Throws OUT_OF_MEMORY or SYSTEM.
  static std::shared_ptr<SharedSegment> create(const std::string& name, int64_t bytes);

  // Maps a segment that another rank created. Throws SYSTEM.
  static std::shared_ptr<SharedSegment> open(const std::string& name, int64_t bytes);

  // Memory that only this process sees, for a group of one rank.
  static std::shared_ptr<SharedSegment> create_private(int64_t bytes);

  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;
  ~SharedSegment();

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

  // Removes the name; the memory lives as long as somebody maps it.
  void unlink();

private:
  SharedSegment(std::string name, std::byte* data, int64_t bytes, bool linked)
      : name_(std::move(name)), data_(data), bytes_(bytes), linked_(linked) {}

  std::string name_; // "" when private
  std::byte* data_;
  int64_t bytes_;
  bool linked_; // this object still has to remove the name
};

} // namespace epx
