// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/memory.h"

#include <cstring>
#include <new>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"
#if defined(EPX_WITH_CUDA)
#include "tools/ep_bench/gpu/gpu.h"
#endif

namespace epx::bench {
namespace {

constexpr std::align_val_t kAlignment{256};

// A call has finished when it returns, so nothing runs beside another.
class HostSideStream final : public SideStream {
public:
  epx_stream stream() const override { return nullptr; }
  void begin() override {}
  void end() override {}
};

class HostMemory final : public Memory {
public:
  bool is_host() const override { return true; }
  epx_stream stream() const override { return nullptr; }
  std::unique_ptr<SideStream> make_side_stream() override { return std::make_unique<HostSideStream>(); }
  std::unique_ptr<CopyEngineGather> make_copy_engine_gather(int, int, const ShareBytes&) override { return nullptr; }
  std::byte* allocate(size_t bytes) override {
    void* memory = ::operator new(bytes, kAlignment, std::nothrow);
    if (memory == nullptr) throw RuntimeError(fmt::format("out of memory: a tensor of {} bytes", bytes));
    return static_cast<std::byte*>(
        std::memset(memory, 0, bytes)); // touches all pages, so that no page fault falls into a measurement
  }
  void free(std::byte* memory) noexcept override { ::operator delete(memory, kAlignment); }

  void write(std::byte* to, std::span<const std::byte> from) override { std::memcpy(to, from.data(), from.size()); }
  void read(std::span<std::byte> to, const std::byte* from) override { std::memcpy(to.data(), from, to.size()); }
  void fill(std::span<std::byte> bytes, std::byte value) override {
    std::memset(bytes.data(), static_cast<int>(value), bytes.size());
  }
  void finish() override {} // a call has finished when it returns
};

} // namespace

std::unique_ptr<Memory> make_memory([[maybe_unused]] const Options& options, [[maybe_unused]] int rank) {
#if defined(EPX_WITH_CUDA)
  if (options.transport == EPX_TRANSPORT_NCCL) return std::make_unique<Gpu>(rank);
#endif
  return std::make_unique<HostMemory>();
}

Buffer Buffer::plain(Memory& memory, size_t bytes) {
  if (bytes == 0) return {};
  return {memory, memory.allocate(bytes), bytes, true};
}

Buffer Buffer::window(Memory& memory, GroupView group, size_t bytes) {
  return {memory, group.mem_alloc(bytes).release(), bytes, false};
}

Buffer Buffer::input(Memory& memory, std::span<const std::byte> bytes) {
  if (memory.is_host()) return {memory, const_cast<std::byte*>(bytes.data()), bytes.size(), false}; // calls only read it
  Buffer copy = plain(memory, bytes.size());
  if (!bytes.empty()) memory.write(copy.data(), bytes);
  return copy;
}

} // namespace epx::bench
