// SPDX-License-Identifier: Apache-2.0
// The native way's communication on GPUs: an all-gather of counts, and one group of sends and receives of rows, by a
// Communicator with NCCL's defaults.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "tools/ep_bench/gpu/communicator.h"
#include "tools/ep_bench/gpu/gpu.h"
#include "tools/ep_bench/gpu/pinned_integers.h"
#include "tools/ep_bench/native/all_to_all.h"

namespace epx::bench {

class GpuAllToAll final : public AllToAll {
public:
  // Makes a communicator of its own. `gpu` must outlive this. Collective. Throws AgreedError.
  GpuAllToAll(const Peers& peers, Gpu& gpu, int32_t num_experts, int64_t max_rows);

  void gather_counts(const Buffer& counts) override;
  const std::vector<int32_t>& wait_for_counts() override;
  std::span<int32_t> staging(int64_t count) override { return {staging_.get(), static_cast<size_t>(count)}; }
  void upload(std::span<const int32_t> staged, const Buffer& to) override;
  void exchange(const Buffer& send, std::span<const int64_t> sent, const Buffer& receive, std::span<const int64_t> received,
                int64_t row_bytes) override;

private:
  Gpu& gpu_;
  std::unique_ptr<Communicator> communicator_;
  Buffer gathered_;        // [P, E]
  PinnedIntegers pinned_;  // [P, E]
  PinnedIntegers staging_; // [max_rows]; wait_for_counts() waits for the upload before it
  CopyEvent gathered_event_;
  std::vector<int32_t> counts_; // [P, E]
};

} // namespace epx::bench
