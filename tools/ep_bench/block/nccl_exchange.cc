// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/nccl_exchange.h"

#include <algorithm>
#include <iterator>

#include <fmt/format.h>

#include "tools/ep_bench/gpu/communicator.h"

namespace epx::bench {
namespace {

std::string cuda_version(int number) {
  return fmt::format("{}.{}", number / 1000, number % 1000 / 10);
}

} // namespace

std::map<std::string, std::string> loaded_libraries() {
  int runtime = 0, driver = 0;
  check_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  return {{"CUDA runtime", cuda_version(runtime)}, {"CUDA driver", cuda_version(driver)}, {"NCCL", nccl_version()}};
}

NcclRowExchange::NcclRowExchange(const Peers& peers, Gpu& gpu, int32_t num_experts, int64_t max_rows)
    : gpu_(gpu), comm_(make_nccl_comm(peers)), counts_(static_cast<size_t>(peers.num_ranks()) * num_experts) {
  peers.together([&] {
    gathered_ = Buffer::plain(gpu, counts_.size() * sizeof(int32_t));
    pinned_ = allocate_pinned(std::ssize(counts_));
    staging_ = allocate_pinned(max_rows);
    gathered_event_ = make_copy_event();
  });
}

void NcclRowExchange::upload(std::span<const int32_t> staged, const Buffer& to) {
  check_cuda(cudaMemcpyAsync(to.data(), staged.data(), staged.size_bytes(), cudaMemcpyHostToDevice, gpu_.cuda_stream()),
             "cudaMemcpyAsync");
}

void NcclRowExchange::gather_counts(const Buffer& counts) {
  const cudaStream_t stream = gpu_.cuda_stream();
  check_nccl(
      ncclAllGather(counts.data(), gathered_.data(), counts.size() / sizeof(int32_t), ncclInt32, comm_.get(), stream),
      "ncclAllGather");
  check_cuda(cudaMemcpyAsync(pinned_.get(), gathered_.data(), gathered_.size(), cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync");
  check_cuda(cudaEventRecord(gathered_event_.get(), stream), "cudaEventRecord");
}

const std::vector<int32_t>& NcclRowExchange::wait_for_counts() {
  check_cuda(cudaEventSynchronize(gathered_event_.get()), "cudaEventSynchronize");
  std::copy_n(pinned_.get(), counts_.size(), counts_.begin());
  return counts_;
}

void NcclRowExchange::exchange(const std::byte* send, std::span<const int64_t> send_rows, std::byte* receive,
                               std::span<const int64_t> receive_rows, int64_t row_bytes) {
  check_nccl(ncclGroupStart(), "ncclGroupStart");
  for (int rank = 0; rank < static_cast<int>(send_rows.size()); ++rank) {
    const int64_t sent = send_rows[rank] * row_bytes, received = receive_rows[rank] * row_bytes;
    if (sent > 0)
      check_nccl(ncclSend(send, static_cast<size_t>(sent), ncclInt8, rank, comm_.get(), gpu_.cuda_stream()), "ncclSend");
    if (received > 0)
      check_nccl(ncclRecv(receive, static_cast<size_t>(received), ncclInt8, rank, comm_.get(), gpu_.cuda_stream()),
                 "ncclRecv");
    send += sent;
    receive += received;
  }
  check_nccl(ncclGroupEnd(), "ncclGroupEnd");
}

} // namespace epx::bench
