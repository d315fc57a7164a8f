// SPDX-License-Identifier: Apache-2.0
// Memory allocates memory for tensors; a Buffer is a part of it.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "epx/epx.hpp"
#include "tools/copy_engine_gather.h"
#include "tools/ep_bench/options.h"

namespace epx::bench {

// A SideStream takes calls that run beside those of a Memory's stream.
class SideStream {
public:
  virtual ~SideStream() = default;

  virtual epx_stream stream() const = 0;

  // These wait for nothing, and throw RuntimeError.
  virtual void begin() = 0; // what it gets from now on follows what the Memory's stream has so far
  virtual void end() = 0;   // what the Memory's stream gets from now on follows what this one has so far
};

// Memory is what calls of a transport take, the host's own or a GPU's, with the stream that they run on.
class Memory {
public:
  virtual ~Memory() = default;

  virtual bool is_host() const = 0;
  virtual epx_stream stream() const = 0;
  virtual std::unique_ptr<SideStream> make_side_stream() = 0; // this must outlive it; throws RuntimeError
  // NULL on the host. Collective. Throws std::runtime_error.
  virtual std::unique_ptr<CopyEngineGather> make_copy_engine_gather(int rank, int num_ranks, const ShareBytes& share) = 0;
  virtual std::byte* allocate(size_t bytes) = 0; // > 0; aligned to 256 bytes and zeroed; throws RuntimeError
  virtual void free(std::byte* memory) noexcept = 0;

  // These wait for the stream's earlier work, and have finished when they return.
  virtual void write(std::byte* to, std::span<const std::byte> from) = 0;
  virtual void read(std::span<std::byte> to, const std::byte* from) = 0;
  virtual void fill(std::span<std::byte> bytes, std::byte value) = 0;
  virtual void finish() = 0;
};

// Returns that of the options' transport. On nccl the rank's GPU becomes the calling thread's device. Throws RuntimeError.
std::unique_ptr<Memory> make_memory(const Options& options, int rank);

// A Buffer has the bytes of a Memory that a tensor lies in; the Memory must outlive it.
class Buffer {
public:
  Buffer() = default;
  ~Buffer() { reset(); }

  static Buffer plain(Memory& memory, size_t bytes);

  // Returns memory from epx_mem_alloc, which is freed with the group. Collective; bytes > 0 and the same on all ranks. Throws
  // epx::Error.
  static Buffer window(Memory& memory, GroupView group, size_t bytes);

  // Returns memory of somebody else's, which must outlive the buffer.
  static Buffer lent(Memory& memory, std::span<std::byte> bytes) { return {memory, bytes.data(), bytes.size(), false}; }

  // Returns `bytes` for calls to read: on the host the bytes themselves, which must outlive the buffer; else a copy.
  static Buffer input(Memory& memory, std::span<const std::byte> bytes);

  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }
  std::span<std::byte> bytes() const { return bytes_; } // readable where the memory is the host's

  template <typename T>
  std::vector<T> read() const {
    std::vector<T> values(size() / sizeof(T));
    if (size() > 0) memory_->read(std::as_writable_bytes(std::span(values)), data());
    return values;
  }
  // Writes at most size() bytes to the buffer's begin.
  template <typename T>
  void write(const std::vector<T>& values) const {
    if (!values.empty()) memory_->write(data(), std::as_bytes(std::span(values)));
  }
  void fill(std::byte value) const {
    if (size() > 0) memory_->fill(bytes_, value);
  }

private:
  Buffer(Memory& memory, std::byte* data, size_t bytes, bool is_owned)
      : memory_(&memory), bytes_(data, bytes), is_owned_(is_owned) {}
  void swap(Buffer& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    std::swap(is_owned_, other.is_owned_);
  }
  void reset() noexcept {
    if (is_owned_) memory_->free(data());
  }

  Memory* memory_ = nullptr;
  std::span<std::byte> bytes_;
  bool is_owned_ = false;
};

} // namespace epx::bench
