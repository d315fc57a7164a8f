// SPDX-License-Identifier: Apache-2.0
#include "tests/support/device.h"

#include <cstring>
#include <new>

#include "tests/support/check.h"

namespace epx::test {

namespace {

constexpr std::align_val_t kAlignment{256};

class HostDevice final : public Device {
public:
  epx_transport transport() const override { return EPX_TRANSPORT_HOST; }
  epx_stream stream() const override { return nullptr; }
  std::byte* allocate(size_t bytes) override { return static_cast<std::byte*>(::operator new(bytes, kAlignment)); }
  void free(std::byte* memory) noexcept override { ::operator delete(memory, kAlignment); }
  void write(void* to, const void* host, size_t bytes) override { copy(to, host, bytes); }
  void read(void* host, const void* from, size_t bytes) override { copy(host, from, bytes); }
  void finish() override {}
  int num_sms() const override { return 0; }
  int64_t bytes_in_use() const override { return 0; }

private:
  static void copy(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes); // memcpy takes no NULL, not even for nothing
  }
};

} // namespace

#if defined(EPX_WITH_CUDA)
std::unique_ptr<Device> make_cuda_device(int rank, int num_ranks); // cuda_device.cc
#endif

std::unique_ptr<Device> make_device(const std::string& transport, [[maybe_unused]] int rank,
                                    [[maybe_unused]] int num_ranks) {
#if defined(EPX_WITH_CUDA)
  if (transport == "nccl") return make_cuda_device(rank, num_ranks);
#endif
  check(transport == "host", "no tests for transport \"{}\" in this build", transport);
  return std::make_unique<HostDevice>();
}

} // namespace epx::test
