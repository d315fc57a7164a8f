// SPDX-License-Identifier: Apache-2.0
// Identifies the ranks' GPUs, before a transport is chosen.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

namespace epx {

// Each rank contributes the identity of its GPU.
struct GpuIdentity {
  int32_t device = -1;            // CUDA ordinal; -1: none
  int32_t compute_capability = 0; // 10 * major + minor
  std::array<char, 16> uuid{};
  uint64_t host_id_hash = 0; // of NCCL_HOSTID; 0 where it is not set
};

// Identifies the calling thread's current device; `device` is -1 where there is no driver or no GPU.
GpuIdentity find_gpu() noexcept;

// Returns why these ranks cannot use transport nccl (one has no GPU, or two share one); "" when each has its own. Ranks with
// another NCCL_HOSTID may share a GPU, as NCCL allows: so a machine with one GPU can run the tests of several nodes.
std::string why_not_a_gpu_each(std::span<const GpuIdentity> gpus);

// Returns why epx's kernels do not run on all of these GPUs; "" when they do.
std::string why_not_new_enough(std::span<const GpuIdentity> gpus);

} // namespace epx
