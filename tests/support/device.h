// SPDX-License-Identifier: Apache-2.0
// A Device is what the tests need of a transport: the memory that its calls accept, and the stream that they run on. A new
// transport runs the same suites once it has one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "epx/epx.h"

namespace epx::test {

// Each rank has one. All functions may block.
class Device {
public:
  virtual ~Device() = default;

  virtual epx_transport transport() const = 0;
  virtual epx_stream stream() const = 0;
  virtual std::byte* allocate(size_t bytes) = 0; // aligned to 256 bytes; throws when it cannot
  virtual void free(std::byte* memory) noexcept = 0;
  virtual void write(void* to, const void* host, size_t bytes) = 0;  // into memory of the device
  virtual void read(void* host, const void* from, size_t bytes) = 0; // from memory of the device
  virtual void finish() = 0;                                         // waits for the stream
  virtual int num_sms() const = 0;                                   // of the GPU; 0 for the host
  virtual int64_t bytes_in_use() const = 0; // of the GPU's memory, by all processes; 0 for the host
};

// `transport` is "host", or "nccl" where the build has it; throws CheckFailure for others, and Skipped
// where num_ranks ranks cannot have a device each. `rank` chooses the device; it becomes the calling thread's.
std::unique_ptr<Device> make_device(const std::string& transport, int rank, int num_ranks);

} // namespace epx::test
