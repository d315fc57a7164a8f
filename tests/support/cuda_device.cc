// SPDX-License-Identifier: Apache-2.0
// A GPU as a Device of the tests has memory from cudaMalloc and a stream of its own.
#include <algorithm>
#include <cstdlib>

#include <cuda_runtime_api.h>

#include "tests/support/check.h"
#include "tests/support/device.h"

namespace epx::test {
namespace {

void check_cuda(cudaError_t error, const char* call) {
  check(error == cudaSuccess, "{}: {}", call, cudaGetErrorString(error));
}

// Ranks of several nodes may share a GPU: only those of one node need one each.
int ranks_with_a_gpu_each(int num_ranks) {
  const char* const ranks_per_node = std::getenv("EPX_TEST_RANKS_PER_NODE");
  return ranks_per_node == nullptr ? num_ranks : std::min(num_ranks, std::atoi(ranks_per_node));
}

class CudaDevice final : public Device {
public:
  CudaDevice(int rank, int num_ranks) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
    const int needed = ranks_with_a_gpu_each(num_ranks);
    if (count < needed) throw Skipped(fmt::format("{} ranks need a GPU each; this machine has {}", needed, count));
    device_ = rank % (count < num_ranks ? needed : num_ranks);
    check_cuda(cudaSetDevice(device_), "cudaSetDevice"); // of the calling thread
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  ~CudaDevice() override { cudaStreamDestroy(stream_); }

  epx_transport transport() const override { return EPX_TRANSPORT_NCCL; }
  epx_stream stream() const override { return stream_; }
  std::byte* allocate(size_t bytes) override {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
    return static_cast<std::byte*>(memory);
  }
  void free(std::byte* memory) noexcept override { cudaFree(memory); }
  void write(void* to, const void* host, size_t bytes) override { copy(to, host, bytes, cudaMemcpyHostToDevice); }
  void read(void* host, const void* from, size_t bytes) override { copy(host, from, bytes, cudaMemcpyDeviceToHost); }
  void finish() override { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  int num_sms() const override {
    int device = 0, count = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    return count;
  }
  int64_t bytes_in_use() const override {
    size_t free_bytes = 0, total_bytes = 0;
    check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    return static_cast<int64_t>(total_bytes - free_bytes);
  }

private:
  void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (bytes == 0) return;
    check_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream_), "cudaMemcpyAsync");
    finish();
  }

  int device_ = 0;
  cudaStream_t stream_ = nullptr;
};

} // namespace

std::unique_ptr<Device> make_cuda_device(int rank, int num_ranks) {
  return std::make_unique<CudaDevice>(rank, num_ranks);
}

} // namespace epx::test
