// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/gpu/stream_blocker.h"

#include <atomic>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/machines.h"

namespace epx::bench {

StreamBlocker::StreamBlocker(Gpu& gpu, const Peers& peers, int64_t timeout_ms)
    : gpu_(gpu), timeout_ns_(static_cast<uint64_t>(timeout_ms) * 1'000'000), timeout_ms_(timeout_ms) {
  const bool is_one_machine = Machines(peers).is_one();
  peers.together([&] {
    if (is_one_machine && peers.num_ranks() > kMaxRanksOnGpus)
      throw RuntimeError(fmt::format("there are {} ranks on one machine; ep_bench measures at most {} on its GPUs",
                                     peers.num_ranks(), kMaxRanksOnGpus));
    check_cuda(load_start_kernels(), "cudaFuncGetAttributes");
    void* ticket = nullptr;
    check_cuda(cudaHostAlloc(&ticket, sizeof(uint64_t), cudaHostAllocMapped), "cudaHostAlloc");
    ticket_.reset(new (ticket) uint64_t{0});
  });
  if (!is_one_machine) {
    communicator_ = make_communicator(peers, gpu);
    peers.together([&] { // NCCL connects the ranks in their first collective
      communicator_->barrier(gpu_.cuda_stream());
      gpu_.finish();
    });
    return;
  }
  boards_.emplace(sizeof(BarrierBoard), peers);
  barrier_.rank = peers.rank();
  barrier_.num_ranks = peers.num_ranks();
  barrier_.timeout_ns = timeout_ns_;
  for (int rank = 0; rank < peers.num_ranks(); ++rank)
    barrier_.boards[rank] = reinterpret_cast<BarrierBoard*>(boards_->of(rank));
}

void StreamBlocker::block() {
  check_cuda(launch_gate(ticket_.get(), ++num_blocks_, timeout_ns_, gpu_.cuda_stream()), "launch of the gate");
}

void StreamBlocker::unblock() noexcept {
  std::atomic_ref(*ticket_).store(num_blocks_, std::memory_order_release);
}

void StreamBlocker::rank_barrier() {
  if (communicator_) return communicator_->barrier(gpu_.cuda_stream());
  ++barrier_.round;
  check_cuda(launch_barrier(barrier_, gpu_.cuda_stream()), "launch of the barrier");
}

void StreamBlocker::check() {
  if (communicator_) return;
  uint64_t missing = 0;
  gpu_.read(std::as_writable_bytes(std::span(&missing, 1)),
            reinterpret_cast<const std::byte*>(&barrier_.boards[barrier_.rank]->missing));
  if (missing == 0) return;
  std::vector<int> ranks;
  for (int rank = 0; rank < barrier_.num_ranks; ++rank)
    if ((missing >> rank & 1) != 0) ranks.push_back(rank);
  throw RuntimeError(fmt::format("the GPU of rank {} did not come to the start of a call within {} ms",
                                 fmt::join(ranks, ", "), timeout_ms_));
}

} // namespace epx::bench
