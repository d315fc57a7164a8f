// SPDX-License-Identifier: Apache-2.0
// CallBuffers holds the tensors of one call, each between guard bytes, in memory of its own or in memory from epx_mem_alloc. In
// one half of the calls their addresses are aligned to no more than their elements, in the other to 16 bytes, as a framework's.
#pragma once

#include <cstddef>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "tests/support/case.h"
#include "tests/support/device.h"
#include "tests/support/rng.h"

namespace epx::test {

// An arena is memory from epx_mem_alloc of which one call at a time gets pieces.
struct Arena {
  std::byte* base = nullptr;
  size_t bytes = 0;
  size_t used = 0;
};

class CallBuffers {
public:
  // Placement::random decides per tensor. The arenas are taken over from the previous call.
  CallBuffers(Device& device, std::vector<Arena>& arenas, Placement placement, Rng& rng);
  CallBuffers(const CallBuffers&) = delete;
  CallBuffers& operator=(const CallBuffers&) = delete;
  ~CallBuffers();

  // Returns memory on the device; sometimes NULL where it has no bytes.
  void* input(const std::string& name, std::span<const std::byte> contents, size_t alignment);
  void* output(const std::string& name, size_t bytes, size_t alignment); // holds kScribble
  // An output that holds `contents` before the call.
  void* in_out(const std::string& name, std::span<const std::byte> contents, size_t alignment);

  // Call once the operation has finished. Throws CheckFailure when a guard or an input has changed.
  void check_surroundings();

  // Returns what the index-th output holds, in the order of the calls to output() and in_out().
  std::vector<std::byte> read_output(size_t index);

private:
  struct Buffer {
    std::string name;
    bool is_output = false;
    std::byte* base = nullptr; // of the guard, the contents and the second guard
    size_t offset = 0;         // from base to the contents
    size_t bytes = 0;
    std::vector<std::byte> before; // the bytes of guard, contents and guard before the call
    bool owned = false;
  };

  void* add(const std::string& name, bool is_output, std::span<const std::byte> contents, size_t alignment);
  std::byte* take_from_arena(size_t bytes);

  Device& device_;
  std::vector<Arena>& arenas_;
  Placement placement_;
  static constexpr size_t kWideAlignment = 16;

  Rng& rng_;
  bool is_aligned_ = rng_.chance(50);
  std::deque<Buffer> buffers_;
};

} // namespace epx::test
