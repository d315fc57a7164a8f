// SPDX-License-Identifier: Apache-2.0
// Checks that a run fits into the machine's memory before any of it is allocated.
#pragma once

#include <cstdint>

#include "tools/ep_bench/options.h"

namespace epx::bench {

// MemoryNeed is the least host memory that a rank takes, in bytes. These are doubles, since a product of options may be more
// than any integer type holds.
struct MemoryNeed {
  double inputs = 0;  // of all sets together
  double tensors = 0; // outputs and receive tensors; none on nccl, where they are the GPU's
  double group = 0;   // window, scratch and handle memory, from epx_group_memory_plan; likewise
  double block = 0;   // --block: tensors of the layers, the arena of the block, buffers of the native layer; likewise
  double gather = 0;  // --gather: matrices, whole and this rank's rows, and the group; likewise

  double all() const { return inputs + tensors + group + block + gather; }
};

// `rows` are those of the receive tensors; 0 while they are not known. Throws UsageError when no group can be of this shape.
MemoryNeed memory_need(const Options& options, int num_ranks, int64_t rows);

// Returns what each of num_ranks processes of this machine can have: an equal part of memory and swap, or less under RLIMIT_AS.
double available_memory(int num_ranks);

// Throws UsageError when a rank needs more than `available` bytes.
void require_memory(const Options& options, int num_ranks, int64_t rows, double available);

} // namespace epx::bench
