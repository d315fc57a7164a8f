// SPDX-License-Identifier: Apache-2.0
#include "tests/support/call_buffers.h"

#include <algorithm>
#include <cstring>

#include "tests/support/check.h"
#include "tests/support/values.h"

namespace epx::test {

namespace {
constexpr size_t kGuardBytes = 64;
constexpr size_t kBaseAlignment = 256;

// memcmp, memcpy and memset are one access to a sanitizer, where a loop over bytes, or an algorithm that is one, makes an
// access for each byte.
bool are_equal(const std::byte* one, const std::byte* other, size_t bytes) {
  return bytes == 0 || std::memcmp(one, other, bytes) == 0;
}
} // namespace

CallBuffers::CallBuffers(Device& device, std::vector<Arena>& arenas, Placement placement, Rng& rng)
    : device_(device), arenas_(arenas), placement_(placement), rng_(rng) {
  for (Arena& arena : arenas_)
    arena.used = 0;
}

CallBuffers::~CallBuffers() {
  for (const Buffer& buffer : buffers_) {
    if (buffer.owned) device_.free(buffer.base);
  }
}

void* CallBuffers::input(const std::string& name, std::span<const std::byte> contents, size_t alignment) {
  return add(name, false, contents, alignment);
}

void* CallBuffers::output(const std::string& name, size_t bytes, size_t alignment) {
  return add(name, true, std::vector<std::byte>(bytes, kScribble), alignment);
}

void* CallBuffers::in_out(const std::string& name, std::span<const std::byte> contents, size_t alignment) {
  return add(name, true, contents, alignment);
}

void* CallBuffers::add(const std::string& name, bool is_output, std::span<const std::byte> contents, size_t alignment) {
  if (is_aligned_) alignment = std::max(alignment, kWideAlignment);
  Buffer buffer;
  buffer.name = name;
  buffer.is_output = is_output;
  buffer.offset = kGuardBytes + alignment * static_cast<size_t>(rng_.below(static_cast<int64_t>(kGuardBytes / alignment)));
  buffer.bytes = contents.size();
  buffer.before.resize(buffer.offset + buffer.bytes + kGuardBytes);
  std::memset(buffer.before.data(), static_cast<int>(kScribble), buffer.before.size());
  if (!contents.empty()) std::memcpy(buffer.before.data() + buffer.offset, contents.data(), contents.size());

  if (placement_ == Placement::in_place || (placement_ == Placement::random && rng_.chance(50))) {
    buffer.base = take_from_arena(buffer.before.size());
  }
  if (buffer.base == nullptr) {
    buffer.base = device_.allocate(buffer.before.size());
    buffer.owned = true;
  }
  device_.write(buffer.base, buffer.before.data(), buffer.before.size());
  buffers_.push_back(std::move(buffer));
  if (contents.empty() && rng_.chance(50)) return nullptr;
  return buffers_.back().base + buffers_.back().offset;
}

std::byte* CallBuffers::take_from_arena(size_t bytes) {
  const auto start = static_cast<size_t>(arenas_.empty() ? 0 : rng_.below(static_cast<int64_t>(arenas_.size())));
  for (size_t i = 0; i < arenas_.size(); ++i) {
    Arena& arena = arenas_[(start + i) % arenas_.size()];
    if (arena.bytes - arena.used < bytes) continue;
    std::byte* taken = arena.base + arena.used;
    arena.used += std::min((bytes + kBaseAlignment - 1) / kBaseAlignment * kBaseAlignment, arena.bytes - arena.used);
    return taken;
  }
  return nullptr; // full
}

void CallBuffers::check_surroundings() {
  device_.finish();
  for (const Buffer& buffer : buffers_) {
    std::vector<std::byte> after(buffer.before.size());
    device_.read(after.data(), buffer.base, after.size());
    count_check();
    const size_t end = buffer.offset + buffer.bytes;
    const bool is_right = buffer.is_output
                              ? are_equal(after.data(), buffer.before.data(), buffer.offset) &&
                                    are_equal(after.data() + end, buffer.before.data() + end, after.size() - end)
                              : are_equal(after.data(), buffer.before.data(), after.size());
    if (is_right) continue;
    for (size_t i = 0; i < after.size(); ++i) {
      const bool inside = i >= buffer.offset && i < end;
      if (after[i] == buffer.before[i] || (inside && buffer.is_output)) continue;
      fail_check("{} {}: byte {} of {} was overwritten", buffer.is_output ? "output" : "input", buffer.name,
                 static_cast<int64_t>(i) - static_cast<int64_t>(buffer.offset), buffer.bytes);
    }
  }
}

std::vector<std::byte> CallBuffers::read_output(size_t index) {
  for (const Buffer& buffer : buffers_) {
    if (!buffer.is_output || index-- != 0) continue;
    std::vector<std::byte> contents(buffer.bytes);
    device_.read(contents.data(), buffer.base + buffer.offset, buffer.bytes);
    return contents;
  }
  fail_check("a test reads an output that it has not made");
}

} // namespace epx::test
