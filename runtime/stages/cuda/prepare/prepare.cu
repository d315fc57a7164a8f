// prepare in one kernel. All that blocks and ranks tell each other are words that tell of themselves (Call::wait_for_word),
// so that nobody fences or waits for all.
//
// Ranks exchange only their counts; each computes its own slots by a stable counting sort (CountExchange):
//   count    Each block counts the routes of its own run of tokens, by expert.
//   publish  Each block takes some experts, adds their counts up over the blocks, stores the sums into every peer's window,
//            and tells each block how many routes the blocks before it have.
//   assign   Each block now knows where its routes of each expert begin: the zone, then the ranks before this one, then the
//            blocks before this one. It walks its tokens tile by tile, gives every route its slot, and stores where the
//            slot comes from into the window of the slot's rank.
//   deliver  All blocks write the handle memory and the outputs from what has come.
//
// When all ranks have few routes they exchange those, and each computes everybody's slots, so that ranks wait for each other
// once and blocks not at all (RoutingAllGather):
//   tell     Every block stores some of this rank's routes into every peer's window.
//   count    Each block counts all routes of all ranks, and those before its own run of all ranks' tokens.
//   assign   As above, but for the tokens of all ranks, and what concerns other ranks is left to them.
//   deliver  What is left; a block that has no tokens, the clerk, has begun with it.
//
// Such a kernel passes through its code once, and waits for instructions as others do for data. So loops stay loops.
#include "runtime/stages/cuda/kernels.h"

#include "base/device/launch.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/prepare/count_exchange.cuh"
#include "runtime/stages/cuda/prepare/routing_all_gather.cuh"

namespace epx::cuda {
namespace {

constexpr int kThreads = PrepareCta::kThreads;

__device__ __forceinline__ void prepare(const PrepareParams& params) {
  const PrepareCta block(params, dynamic_shared_memory<int32_t>());
  block.post();
  if (!block.is_alone()) return;
  RoutingAllGather few(block);
  CountExchange many(block);
  const bool mine_fit = block.fits_all_gather();
  if (mine_fit)
    few.tell_routes();
  else if (!many.count_and_publish())
    return;
  if (!block.enter()) return;
  if (block.all_fit_all_gather()) {
    const bool ok = few.count();
    trigger_successor(); // no thread waits for a peer any more
    if (ok) few.finish();
    return;
  }
  if (mine_fit && !many.count_and_publish()) return; // for those who have more
  if (many.find_bases()) many.finish();
}

__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ PrepareParams params) {
  pdl_wait(params);
  prepare(params);
  leave(params.group);
}

} // namespace

const void* prepare_kernel_address() {
  return reinterpret_cast<const void*>(&prepare_kernel);
}
int prepare_threads() {
  return kThreads;
}
size_t prepare_shared_bytes(int num_experts) {
  return PrepareCta::shared_bytes(num_experts);
}
size_t prepare_scratch_words(int num_experts, int blocks) {
  return static_cast<size_t>(blocks) * (2 * static_cast<size_t>(num_experts) + 2); // block_counts and routes_before
}

cudaError_t launch_prepare(const DeviceGroup& group, LaunchPlan& plan, const PrepareCall& call, cudaStream_t stream) {
  CallDescriptor descriptor{};
  descriptor.operation = EPX_OP_PREPARE;
  descriptor.top_k = call.top_k;
  descriptor.alignment = call.alignment;
  descriptor.num_tokens = call.num_tokens;
  descriptor.rows_allocation = -1;
  const PrepareParams params{group, call, make_handle_layout(group.context.shape, call.top_k), descriptor};
  const Grid grid = plan.next_prepare(call.num_tokens * call.top_k, stream);
  return launch_cooperative(&prepare_kernel, grid, stream, params);
}

} // namespace epx::cuda
