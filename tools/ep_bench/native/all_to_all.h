// SPDX-License-Identifier: Apache-2.0
// What the native way asks of its ranks' communication: collectives on plain memory, and the host between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tools/ep_bench/memory.h"
#include "tools/ep_bench/peers.h"

namespace epx::bench {

class AllToAll {
public:
  virtual ~AllToAll() = default;

  // Gathers all ranks' counts, [P, E]; wait_for_counts() returns them in the host's memory. Work that is enqueued between the
  // two runs while the host waits.
  virtual void gather_counts(const Buffer& counts) = 0;
  virtual const std::vector<int32_t>& wait_for_counts() = 0;

  // Returns memory for `count` integers from which upload() need not wait for the device.
  virtual std::span<int32_t> staging(int64_t count) = 0;
  virtual void upload(std::span<const int32_t> staged, const Buffer& to) = 0;

  // Sends sent[r] rows to each rank r, one rank's after the other's, and receives received[r] likewise.
  virtual void exchange(const Buffer& send, std::span<const int64_t> sent, const Buffer& receive,
                        std::span<const int64_t> received, int64_t row_bytes) = 0;
};

// Exchanges through the ranks' bootstrap, on the host. It is there so that the native layer can be compared with the block
// where there is no GPU; its time says nothing.
class BootstrapAllToAll final : public AllToAll {
public:
  explicit BootstrapAllToAll(const Peers& peers) : peers_(peers) {}

  void gather_counts(const Buffer& counts) override;
  const std::vector<int32_t>& wait_for_counts() override { return counts_; }
  std::span<int32_t> staging(int64_t count) override;
  void upload(std::span<const int32_t> staged, const Buffer& to) override;
  void exchange(const Buffer& send, std::span<const int64_t> sent, const Buffer& receive, std::span<const int64_t> received,
                int64_t row_bytes) override;

private:
  const Peers& peers_;
  std::vector<int32_t> counts_, staging_;
};

} // namespace epx::bench
