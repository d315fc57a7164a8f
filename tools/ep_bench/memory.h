// Memory for tensors, and where it comes from.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "epx/epx.h"
#include "tools/ep_bench/errors.h"

namespace epx::bench {

// Bytes that an output tensor lies in. Window memory comes from epx_mem_alloc and is freed with the group.
class Buffer {
public:
  Buffer() = default;

  static Buffer plain(size_t bytes) {
    Buffer buffer;
    buffer.owned_.resize(bytes);
    buffer.bytes_ = buffer.owned_;
    return buffer;
  }

  // Collective; bytes > 0 and the same on all ranks. Throws RuntimeError.
  static Buffer window(epx_group group, size_t bytes) {
    void* memory = nullptr;
    const epx_status status = epx_mem_alloc(group, bytes, &memory);
    if (status != EPX_SUCCESS)
      throw RuntimeError(fmt::format("epx_mem_alloc: {}: {}", epx_status_string(status), epx_last_error()));
    Buffer buffer;
    buffer.bytes_ = {static_cast<std::byte*>(memory), bytes};
    return buffer;
  }

  Buffer(Buffer&&) = default; // a moved vector keeps its storage, so the span stays right
  Buffer& operator=(Buffer&&) = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const { return bytes_.data(); }
  std::span<std::byte> bytes() const { return bytes_; }
  std::span<float> floats() const { return {reinterpret_cast<float*>(bytes_.data()), bytes_.size() / sizeof(float)}; }

private:
  std::vector<std::byte> owned_;
  std::span<std::byte> bytes_;
};

} // namespace epx::bench
