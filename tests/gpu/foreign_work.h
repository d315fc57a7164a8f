// SPDX-License-Identifier: Apache-2.0
// A training job runs such work on the same GPUs beside epx: streams, NCCL communicators, matrix products.
#pragma once

#include <cstddef>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "tests/gpu/graph.h"
#include "tests/gpu/matrix_kernel.h"
#include "tests/support/check.h"
#include "tests/support/group_run.h"

namespace epx::test {

class Stream {
public:
  Stream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }

  cudaStream_t get() const { return stream_; }
  bool is_done() const {
    const cudaError_t state = cudaStreamQuery(stream_);
    if (state != cudaErrorNotReady) check_cuda(state, "cudaStreamQuery");
    return state == cudaSuccess;
  }

private:
  cudaStream_t stream_ = nullptr;
};

// Wraps another Device, with a stream of its own.
class DeviceOnStream final : public Device {
public:
  explicit DeviceOnStream(Device& device) : device_(device) {}

  const Stream& own_stream() const { return stream_; }
  epx_transport transport() const override { return device_.transport(); }
  int num_sms() const override { return device_.num_sms(); }
  int64_t bytes_in_use() const override { return device_.bytes_in_use(); }
  epx_stream stream() const override { return stream_.get(); }
  std::byte* allocate(size_t bytes) override { return device_.allocate(bytes); }
  void free(std::byte* memory) noexcept override { device_.free(memory); }
  void write(void* to, const void* host, size_t bytes) override { device_.write(to, host, bytes); }
  void read(void* host, const void* from, size_t bytes) override {
    finish();
    device_.read(host, from, bytes);
  }
  void finish() override { check_cuda(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize"); }

private:
  Device& device_;
  Stream stream_;
};

inline void check_nccl(ncclResult_t result, const char* call) {
  check(result == ncclSuccess, "{}: {}", call, ncclGetErrorString(result));
}

// Owns an NCCL communicator of all ranks, a buffer, and a stream that reduces it.
class Communicator {
public:
  // Collective. max_ctas limits each of its kernels; 0: NCCL's default.
  Communicator(const RankContext& context, int max_ctas) : device_(*context.device) {
    ncclUniqueId own{};
    std::vector<ncclUniqueId> ids(static_cast<size_t>(context.num_ranks));
    if (context.rank == 0) check_nccl(ncclGetUniqueId(&own), "ncclGetUniqueId");
    const epx_bootstrap& bootstrap = *context.bootstrap;
    check_ok(bootstrap.all_gather(bootstrap.context, &own, ids.data(), sizeof(own), kBootstrapTimeoutMs, nullptr, 0),
             "all_gather");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (max_ctas > 0) config.maxCTAs = max_ctas;
    check_nccl(ncclCommInitRankConfig(&comm_, context.num_ranks, ids.front(), context.rank, &config),
               "ncclCommInitRankConfig");
    buffer_ = device_.allocate(kElements * sizeof(float));
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator() {
    ncclCommAbort(comm_);
    device_.free(buffer_);
  }

  const Stream& stream() const { return stream_; }
  void enqueue() const {
    check_nccl(ncclAllReduce(buffer_, buffer_, kElements, ncclFloat, ncclSum, comm_, stream_.get()), "ncclAllReduce");
  }

private:
  static constexpr size_t kElements = size_t{1} << 22;
  static constexpr int64_t kBootstrapTimeoutMs = 60'000;

  Device& device_;
  ncclComm_t comm_ = nullptr;
  std::byte* buffer_ = nullptr;
  Stream stream_;
};

// Runs matrix products on a stream of their own.
class MatrixProducts {
public:
  explicit MatrixProducts(Device& device) : device_(device), matrices_(device.allocate(3 * kBytes)) {
    check_cuda(cudaMemset(matrices_, 0, 3 * kBytes), "cudaMemset");
  }
  MatrixProducts(const MatrixProducts&) = delete;
  MatrixProducts& operator=(const MatrixProducts&) = delete;
  ~MatrixProducts() { device_.free(matrices_); }

  const Stream& stream() const { return stream_; }
  void enqueue() const {
    auto* const left = reinterpret_cast<float*>(matrices_);
    constexpr size_t kElements = kBytes / sizeof(float);
    check_cuda(multiply_matrices(left, left + kElements, left + 2 * kElements, stream_.get()), "multiply_matrices");
  }

private:
  static constexpr size_t kBytes = size_t{kMatrixSize} * kMatrixSize * sizeof(float);

  Device& device_;
  std::byte* matrices_;
  Stream stream_;
};

} // namespace epx::test
