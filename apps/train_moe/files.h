// SPDX-License-Identifier: Apache-2.0
// Files that options name are read here: regular files only, up to a stated size, so that a device, a fifo or a wrong name ends
// in a sentence instead of hanging or taking all memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>

namespace train {

// Returns "a regular file", "a directory", "a symbolic link", "a character device", ... for a mode from stat().
const char* kind_of(mode_t mode);

// Owns a file descriptor; -1 is none.
class Descriptor {
public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();

  int get() const { return fd_; }

private:
  int fd_;
};

// Opens a regular file for reading from its begin. `option` names it in sentences. Throws Error.
class InputFile {
public:
  InputFile(const char* option, const std::string& file);

  int64_t size() const { return size_; } // bytes, when it was opened

  // Reads on until `bytes` are full or the file ends, and returns how many were read.
  size_t read(std::span<char> bytes);

private:
  std::string name_; // "--text FILE"
  Descriptor file_;
  int64_t size_ = 0;
};

// Returns all bytes of a regular file. Throws Error, also when it has more than `max_bytes`.
std::vector<unsigned char> read_file(const char* option, const std::string& file, int64_t max_bytes);

} // namespace train
