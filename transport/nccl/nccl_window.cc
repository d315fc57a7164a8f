// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/nccl_window.h"

#include <utility>

#include "base/cuda.h"
#include "base/error.h"
#include "transport/nccl/lsa_pointers.h"

namespace epx {

NcclMemory allocate_nccl_memory(int64_t bytes) {
  void* memory = nullptr;
  const ncclResult_t result = nccl().MemAlloc(&memory, static_cast<size_t>(bytes));
  NcclMemory owner(static_cast<std::byte*>(memory));
  if (result != ncclSuccess) {
    size_t free_bytes = 0, total_bytes = 0;
    cudaMemGetInfo(&free_bytes, &total_bytes);
    cudaGetLastError();
    fail(EPX_ERROR_OUT_OF_MEMORY, "ncclMemAlloc of {} bytes: {} ({} bytes of {} are free on the GPU)", bytes,
         nccl().GetErrorString(result), free_bytes, total_bytes);
  }
  check_cuda(cudaMemset(memory, 0, static_cast<size_t>(bytes)), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return owner;
}

NcclWindow::NcclWindow(std::shared_ptr<Communicator> communicator, int rank, int num_ranks, std::byte* memory,
                       int64_t bytes, NcclMemory owner)
    : communicator_(std::move(communicator)), rank_(rank), num_ranks_(num_ranks), memory_(memory), bytes_(bytes),
      owner_(std::move(owner)) {
  if (reinterpret_cast<uintptr_t>(memory) % NCCL_WIN_REQUIRED_ALIGNMENT != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "the memory at {} is not aligned to {} bytes, as NCCL needs it",
         static_cast<void*>(memory), NCCL_WIN_REQUIRED_ALIGNMENT);
}

NcclWindow::~NcclWindow() {
  if (window_ != nullptr && communicator_->get() != nullptr) nccl().CommWindowDeregister(communicator_->get(), window_);
}

void NcclWindow::register_everywhere() {
  if (num_ranks_ == 1) { // NCCL has no symmetric memory for one rank, and none is needed
    bases_ = {memory_};
    return;
  }
  communicator_->wait(nccl().CommWindowRegister(communicator_->get(), memory_, static_cast<size_t>(bytes_), &window_,
                                                NCCL_WIN_COLL_SYMMETRIC),
                      "ncclCommWindowRegister");
  if (window_ == nullptr)
    fail(EPX_ERROR_UNSUPPORTED,
         "NCCL has no symmetric window over the {} bytes at {} (ncclCommWindowRegister returned none): peer access over "
         "NVLink, CUDA's virtual memory management (NCCL_CUMEM_ENABLE) and memory from ncclMemAlloc are needed",
         bytes_, static_cast<void*>(memory_));
  bases_.resize(static_cast<size_t>(num_ranks_));
  find_lsa_pointers(communicator_->version(), window_, bases_);
  bases_[static_cast<size_t>(window_index(rank_))] = memory_; // the user knows this address
}

} // namespace epx
