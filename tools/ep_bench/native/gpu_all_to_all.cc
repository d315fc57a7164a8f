// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/native/gpu_all_to_all.h"

#include <algorithm>
#include <iterator>

namespace epx::bench {

GpuAllToAll::GpuAllToAll(const Peers& peers, Gpu& gpu, int32_t num_experts, int64_t max_rows)
    : gpu_(gpu), communicator_(make_communicator(peers, gpu)),
      counts_(static_cast<size_t>(peers.num_ranks()) * static_cast<size_t>(num_experts)) {
  peers.together([&] {
    gathered_ = Buffer::plain(gpu, counts_.size() * sizeof(int32_t));
    pinned_ = allocate_pinned(std::ssize(counts_));
    staging_ = allocate_pinned(max_rows);
    gathered_event_ = make_copy_event();
  });
}

void GpuAllToAll::gather_counts(const Buffer& counts) {
  const cudaStream_t stream = gpu_.cuda_stream();
  communicator_->all_gather(counts.data(), gathered_.data(), static_cast<int64_t>(counts.size()), stream);
  check_cuda(cudaMemcpyAsync(pinned_.get(), gathered_.data(), gathered_.size(), cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync");
  check_cuda(cudaEventRecord(gathered_event_.get(), stream), "cudaEventRecord");
}

const std::vector<int32_t>& GpuAllToAll::wait_for_counts() {
  check_cuda(cudaEventSynchronize(gathered_event_.get()), "cudaEventSynchronize");
  std::copy_n(pinned_.get(), counts_.size(), counts_.begin());
  return counts_;
}

void GpuAllToAll::upload(std::span<const int32_t> staged, const Buffer& to) {
  check_cuda(cudaMemcpyAsync(to.data(), staged.data(), staged.size_bytes(), cudaMemcpyHostToDevice, gpu_.cuda_stream()),
             "cudaMemcpyAsync");
}

void GpuAllToAll::exchange(const Buffer& send, std::span<const int64_t> sent, const Buffer& receive,
                           std::span<const int64_t> received, int64_t row_bytes) {
  const std::byte* from = send.data();
  std::byte* to = receive.data();
  std::vector<Transfer> transfers;
  for (size_t peer = 0; peer < sent.size(); ++peer) {
    transfers.push_back({.peer = static_cast<int>(peer),
                         .send = from,
                         .send_bytes = sent[peer] * row_bytes,
                         .receive = to,
                         .receive_bytes = received[peer] * row_bytes});
    from += transfers.back().send_bytes;
    to += transfers.back().receive_bytes;
  }
  communicator_->exchange(transfers, gpu_.cuda_stream());
}

} // namespace epx::bench
