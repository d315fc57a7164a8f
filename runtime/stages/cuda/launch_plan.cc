#include <algorithm>

#include "runtime/base/cuda.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/kernels.h"

namespace epx::cuda {
namespace {

constexpr int kBlocksPerSm = 2; // at most, of a movement

// Senders have multiprocessors of their own where there are enough: stores to peers that wait for the wire would hold up
// the stores that receivers make beside them. No more than fill the wire: the fewer rows are under way at a time, the
// earlier the first ones arrive, and the less is left to do for receivers when the last have come. `own`: that division.
constexpr int kMostSenderBlocks = 64;
constexpr Division divide(int blocks, const Division& own, int warps_in_shared_blocks) {
  if (blocks >= 2 * kMostSenderBlocks) return own;
  return {blocks, warps_in_shared_blocks, own.teller_warps};
}

constexpr int kScatterSenderWarps = 6;
static_assert(kScatterSenderWarps <= kMostSendersOfTeller);
// The fewer ranks, the fewer senders: more of a rank's rows stay where they are, and the wire is less of what takes long.
// dispatch on 2 H200 (4096 tokens of 7168 bfloat16, top-8 of 256) took 206 us with 32 such blocks, 217 with 24.
Division scatter_division(int blocks, int num_ranks) {
  return divide(blocks, {std::min(16 * num_ranks, kMostSenderBlocks), kScatterSenderWarps, 1}, kScatterSenderWarps);
}
Division gather_division(int blocks) {
  return divide(blocks, {kMostSenderBlocks, 16, 0}, 10);
}

struct Device {
  int num_sms;
  int max_shared_bytes; // per block
};

Device this_device() {
  int ordinal = 0;
  Device device{};
  check_cuda(cudaGetDevice(&ordinal), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&device.num_sms, cudaDevAttrMultiProcessorCount, ordinal), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&device.max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal),
             "cudaDeviceGetAttribute");
  return device;
}

// Loads a kernel: lazy loading behind a kernel that waits for a peer would never end. Returns the dynamic shared memory that a
// block of it may have; every group sets the same limit, since the limit is the kernel's and not the group's.
size_t load(const void* kernel, const Device& device) {
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  const size_t most = static_cast<size_t>(device.max_shared_bytes) - attributes.sharedSizeBytes;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)),
             "cudaFuncSetAttribute");
  // The same for all: a kernel that wants another division of the cache than the one before it waits until that is made.
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
             "cudaFuncSetAttribute");
  return most;
}

// Blocks of a kernel that one multiprocessor runs at the same time.
int blocks_per_sm(const void* kernel, int threads, size_t shared_bytes) {
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks;
}

} // namespace

LaunchShape plan_launches(const GroupShape& shape, int num_sms) {
  const Device device = this_device();
  const int sms = num_sms == 0 ? device.num_sms : std::min(num_sms, device.num_sms);
  LaunchShape launch{};
  launch.early = sms == device.num_sms;
  launch.prepare_shared_bytes = prepare_shared_bytes(shape.num_experts);
  const size_t most_shared_bytes = load(prepare_kernel_address(), device);
  if (launch.prepare_shared_bytes > most_shared_bytes)
    fail(EPX_ERROR_UNSUPPORTED, "epx_group_config.num_experts is {}; on this GPU prepare has shared memory for {}",
         shape.num_experts,
         (most_shared_bytes - prepare_shared_bytes(0)) / (prepare_shared_bytes(1) - prepare_shared_bytes(0)));
  launch.prepare_blocks = std::min(
      kMostPrepareBlocks, sms * blocks_per_sm(prepare_kernel_address(), prepare_threads(), launch.prepare_shared_bytes));
  load(poison_kernel_address(), device);
  const auto blocks_of_all = [&](const std::vector<const void*>& kernels, int threads, size_t shared_bytes) {
    int per_sm = kBlocksPerSm;
    for (const void* kernel : kernels) {
      load(kernel, device);
      per_sm = std::min(per_sm, blocks_per_sm(kernel, threads, shared_bytes));
    }
    return sms * per_sm;
  };
  launch.scatter_blocks = blocks_of_all(scatter_kernels(), scatter_threads(), scatter_shared_bytes());
  launch.gather_blocks = blocks_of_all(gather_kernels(), gather_threads(), gather_shared_bytes());
  launch.scatter_division = scatter_division(launch.scatter_blocks, shape.num_ranks);
  launch.gather_division = gather_division(launch.gather_blocks);
  if (launch.prepare_blocks < 1 || launch.scatter_blocks < 1 || launch.gather_blocks < 1)
    fail(EPX_ERROR_UNSUPPORTED, "this GPU cannot run a block of epx's kernels");
  return launch;
}

} // namespace epx::cuda
