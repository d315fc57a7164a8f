// Every kernel of the stages, so that all can be loaded before any is launched.
#pragma once

#include <cstddef>
#include <vector>

namespace epx::cuda {

constexpr int kMaxPrepareBlocks = 64; // enough to sort 32768 routes in a tile each
const void* prepare_kernel_address();
int prepare_threads();
size_t prepare_shared_bytes(int num_experts);
size_t prepare_scratch_words(int num_experts, int blocks); // of DeviceGroup::prepare_scratch

std::vector<const void*> scatter_kernels();
int scatter_threads();
size_t scatter_shared_bytes();

std::vector<const void*> gather_kernels();
int gather_threads();
size_t gather_shared_bytes();

std::vector<const void*> checksum_kernels();

const void* abort_kernel_address();

} // namespace epx::cuda
