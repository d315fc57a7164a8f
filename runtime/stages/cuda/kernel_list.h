// SPDX-License-Identifier: Apache-2.0
// The list of all kernels of the stages: each is loaded before any is launched.
#pragma once

#include <cstddef>
#include <vector>

#include "runtime/config.h"

namespace epx::cuda {

constexpr int kMaxPrepareBlocks = 64;                // so many blocks sort 32768 routes with one tile each
const void* prepare_kernel_address(bool shares_sms); // for a grid that has two blocks on an SM
int prepare_threads();
size_t prepare_shared_bytes(int num_experts);
size_t prepare_scratch_words(int num_experts, int blocks); // LL packets in DeviceGroup::prepare_scratch

// So many blocks of a grid may make parts of a plan that others of the grid read (protocol/plan_parts.cuh): those of a grid of
// dispatch_rank_major, and kMaxPrepareBlocks of prepare_dispatch.
constexpr int kMaxPlanBlocks = 256;
static_assert(kMaxPrepareBlocks <= kMaxPlanBlocks);
// DeviceGroup::plan_packets begins with so many LlPacket8 of these blocks: their flags, and what they tell (LlPacket16).
constexpr size_t plan_part_words(int num_ranks) {
  return kMaxPlanBlocks * (1 + 2 * static_cast<size_t>(num_ranks));
}

// Those of prepare_dispatch: their blocks have the threads of a movement's.
std::vector<const void*> ll_prepare_dispatch_kernels();
const void* ht_prepare_dispatch_kernel_address();
size_t prepare_dispatch_shared_bytes(int num_experts);
size_t plan_packet_words(const GroupShape& shape); // LL packets in DeviceGroup::plan_packets

std::vector<const void*> scatter_kernels();
std::vector<const void*> combine_bwd_kernels();       // launched as those of scatter
std::vector<const void*> rank_major_kernels();        // launched as those of scatter
std::vector<const void*> rank_major_gather_kernels(); // launched as those of scatter
std::vector<const void*> gather_kernels();
std::vector<const void*> quantised_gather_kernels(); // launched as those of gather
std::vector<const void*> batch_gather_kernels();     // their blocks have kBatchGatherThreads
size_t movement_shared_bytes();                      // of each block of scatter and gather, ...
size_t batch_gather_shared_bytes();                  // ... and of gather by batches

const void* ragged_all_to_all_kernel_address(); // its blocks have the threads of a movement's
size_t ragged_shared_bytes();

std::vector<const void*> checksum_kernels();

const void* abort_kernel_address();

} // namespace epx::cuda
