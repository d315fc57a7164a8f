// The five operations as kernels. Each launch is asynchronous on the stream, and one kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/stages/cuda/device_group.h"
#include "runtime/stages/stages.h"

namespace epx::cuda {

// Who of a movement's grid does what. The first warps of the first blocks send, and the last ones of these blocks tell.
// When these are all blocks, their other warps receive; else all other blocks do.
struct Division {
  int sender_blocks;
  int sender_warps; // of each of these blocks
  int teller_warps; // likewise: 1; or 0, when senders tell
};
constexpr int kMostSendersOfTeller = 15; // warps; with it they are a block

// What the host knows of a launch; fixed at creation.
struct LaunchShape {
  int prepare_blocks;
  size_t prepare_shared_bytes;
  int scatter_blocks;
  int gather_blocks;
  Division scatter_division;
  Division gather_division;
  // Kernels follow each other without a gap, by holding multiprocessors before their time. Not when the group leaves some to
  // others, such as another group, whose kernel would wait for them.
  bool early;
};

// Loads all kernels, and chooses grids of blocks that all run at the same time on at most num_sms multiprocessors (0: all).
// Throws.
LaunchShape plan_launches(const GroupShape& shape, int num_sms);

// A tensor's place in an allocation of the group; allocation -1: none.
struct Reach {
  int64_t rows_allocation;
  int64_t rows_offset;
};
constexpr Reach kNoReach{-1, 0};

cudaError_t launch_prepare(const DeviceGroup& group, const LaunchShape& shape, const PrepareCall& call,
                           cudaStream_t stream);
cudaError_t launch_dispatch(const DeviceGroup& group, const LaunchShape& shape, const DispatchCall& call,
                            const Reach& reach, cudaStream_t stream);
cudaError_t launch_combine_bwd(const DeviceGroup& group, const LaunchShape& shape, const CombineBwdCall& call,
                               const Reach& reach, cudaStream_t stream);
cudaError_t launch_combine(const DeviceGroup& group, const LaunchShape& shape, const CombineCall& call,
                           cudaStream_t stream);
cudaError_t launch_dispatch_bwd(const DeviceGroup& group, const LaunchShape& shape, const DispatchBwdCall& call,
                                cudaStream_t stream);

// Stores a poison record into every rank's window that has none.
cudaError_t launch_poison(const DeviceGroup& group, const Poison& poison, cudaStream_t stream);

} // namespace epx::cuda
