// SPDX-License-Identifier: Apache-2.0
// A FileDescriptor owns an open file and closes it in its destructor.
#pragma once

#include <utility>

#include <unistd.h>

namespace epx {

class FileDescriptor {
public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() { close(); }

  int get() const { return fd_; } // negative: none
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); } // the caller closes it
  int close() {
    return fd_ >= 0 ? ::close(release()) : 0;
  } // returns what ::close returns, by which some file systems report failed writes

private:
  int fd_;
};

} // namespace epx
