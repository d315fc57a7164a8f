// SPDX-License-Identifier: Apache-2.0
// The block's own kernels: small integers that no other kernel writes.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/cuda/launch_target.h"
#include "moe/integers.h"

namespace epx::moe::cuda {

std::vector<const void*> block_kernels();

// The launches return a cudaError_t.

// to[i] = from[i] for i < count, each of either width.
int launch_copy_integers(Integers from, Integers to, int64_t count, const LaunchTarget& target);

// As clamp_zone for every expert, in place.
int launch_clamp_zones(Integers counts, Integers offsets, int num_experts, int64_t num_rows, const LaunchTarget& target);

// Calls step(i) for each i < count. Step is one of moe/block/tables.h.
template <typename Step>
int launch_for_each(const Step& step, int64_t count, const LaunchTarget& target);

} // namespace epx::moe::cuda
