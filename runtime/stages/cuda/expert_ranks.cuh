// SPDX-License-Identifier: Apache-2.0
// Which rank owns an expert, without a division: kernels ask that for every route.
#pragma once

#include <cstdint>

#include "runtime/layout/slots.h"

namespace epx::cuda {

// Divides a number below 2^16 by a divisor below 2^16: a division takes long, and each route needs one.
class FastDivisor {
public:
  FastDivisor() = default;
  explicit FastDivisor(int divisor)
      : inverse_(((uint64_t{1} << 32) + static_cast<uint64_t>(divisor) - 1) / static_cast<uint64_t>(divisor)) {}
  __device__ int divide(int number) const { return static_cast<int>(static_cast<uint64_t>(number) * inverse_ >> 32); }

private:
  uint64_t inverse_ = 0;
};

// ExpertBlocks::rank_of on the device. Kernels have fewer experts than an int16 can number (prepare_context.cuh).
struct ExpertRanks {
  ExpertBlocks blocks;
  int per_rank, extra, in_larger_blocks;
  FastDivisor larger, smaller;

  explicit ExpertRanks(const ExpertBlocks& experts)
      : blocks(experts), per_rank(experts.num_experts / experts.num_ranks), extra(experts.num_experts % experts.num_ranks),
        in_larger_blocks(extra * (per_rank + 1)), larger(per_rank + 1), smaller(max_of_1(per_rank)) {}

  __device__ int rank_of(int expert) const {
    return expert < in_larger_blocks ? larger.divide(expert) : extra + smaller.divide(expert - in_larger_blocks);
  }
  __device__ int first_expert(int rank) const { return rank * per_rank + min(rank, extra); }
  __device__ int num_local_experts(int rank) const { return per_rank + (rank < extra ? 1 : 0); }

private:
  static int max_of_1(int value) { return value < 1 ? 1 : value; } // a block without experts has no number to divide
};

} // namespace epx::cuda
