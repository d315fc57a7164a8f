// SPDX-License-Identifier: Apache-2.0
// The native layer's communication on GPUs: ncclAllGather of counts, grouped ncclSend and ncclRecv of rows.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "tools/ep_bench/block/row_exchange.h"
#include "tools/ep_bench/gpu/gpu.h"
#include "tools/ep_bench/gpu/nccl_comm.h"
#include "tools/ep_bench/gpu/pinned_integers.h"

namespace epx::bench {

// Returns the versions of CUDA's runtime, its driver and NCCL as this process has loaded them, by name. Throws RuntimeError.
std::map<std::string, std::string> loaded_libraries();

class NcclRowExchange final : public RowExchange {
public:
  // Creates a communicator of its own. Collective. Throws RuntimeError.
  NcclRowExchange(const Peers& peers, Gpu& gpu, int32_t num_experts, int64_t max_rows);

  void gather_counts(const Buffer& counts) override;
  const std::vector<int32_t>& wait_for_counts() override;
  std::span<int32_t> staging(int64_t count) override { return {staging_.get(), static_cast<size_t>(count)}; }
  void upload(std::span<const int32_t> staged, const Buffer& to) override;
  void exchange(const std::byte* send, std::span<const int64_t> send_rows, std::byte* receive,
                std::span<const int64_t> receive_rows, int64_t row_bytes) override;

private:
  Gpu& gpu_;
  NcclComm comm_;
  Buffer gathered_;        // [P, E]
  PinnedIntegers pinned_;  // [P, E]
  PinnedIntegers staging_; // [max_rows]; wait_for_counts() waits for the upload before it
  CopyEvent gathered_event_;
  std::vector<int32_t> counts_; // [P, E]
};

} // namespace epx::bench
