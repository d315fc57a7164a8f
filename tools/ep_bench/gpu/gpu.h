// SPDX-License-Identifier: Apache-2.0
// Gpu is a rank's GPU with its memory and the stream that everything runs on; besides, this header owns the CUDA objects of the
// timed loops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include <cuda_runtime_api.h>

#include "tools/ep_bench/memory.h"

namespace epx::bench {

// Throws RuntimeError with the call's name and CUDA's message.
void check_cuda(cudaError_t error, const char* call);

class Gpu final : public Memory {
public:
  // Takes the device with the number that the rank has on its machine, which Open MPI provides; without it, rank modulo the
  // number of devices. With NCCL_HOSTID, ranks that NCCL takes for ranks of other machines share devices where there are too
  // few. It becomes the calling thread's device. Throws RuntimeError.
  explicit Gpu(int rank);
  ~Gpu() override;
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  cudaStream_t cuda_stream() const { return stream_; }
  int num_sms() const { return num_sms_; }

  bool is_host() const override { return false; }
  epx_stream stream() const override { return stream_; }
  std::unique_ptr<SideStream> make_side_stream() override;
  std::unique_ptr<CopyEngineGather> make_copy_engine_gather(int rank, int num_ranks, const ShareBytes& share) override {
    return epx::make_copy_engine_gather(rank, num_ranks, share);
  }
  std::byte* allocate(size_t bytes) override;
  void free(std::byte* memory) noexcept override;
  void write(std::byte* to, std::span<const std::byte> from) override;
  void read(std::span<std::byte> to, const std::byte* from) override;
  void fill(std::span<std::byte> bytes, std::byte value) override;
  void finish() override;

private:
  cudaStream_t stream_ = nullptr;
  int num_sms_ = 0;
};

// A Stopwatch records an event before and one after work on a stream.
class Stopwatch {
public:
  Stopwatch();
  ~Stopwatch();
  Stopwatch(Stopwatch&& other) noexcept;
  Stopwatch& operator=(Stopwatch&&) = delete;

  void start(cudaStream_t stream) { check_cuda(cudaEventRecord(begin_, stream), "cudaEventRecord"); }
  void stop(cudaStream_t stream) { check_cuda(cudaEventRecord(end_, stream), "cudaEventRecord"); }
  int64_t elapsed_ns() const; // to be called once the stream has passed both

private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// A Graph is ready to be replayed.
class Graph {
public:
  // Captures what `enqueue` puts on the stream.
  template <typename Enqueue>
  static Graph capture(cudaStream_t stream, Enqueue&& enqueue) {
    begin_capture(stream);
    try {
      enqueue();
    } catch (...) {
      abandon_capture(stream);
      throw;
    }
    return end_capture(stream);
  }

  void replay(cudaStream_t stream) const { check_cuda(cudaGraphLaunch(exec_.get(), stream), "cudaGraphLaunch"); }

private:
  struct Destroy {
    using pointer = cudaGraphExec_t;
    void operator()(cudaGraphExec_t exec) const { cudaGraphExecDestroy(exec); }
  };

  static void begin_capture(cudaStream_t stream);
  static void abandon_capture(cudaStream_t stream) noexcept;
  static Graph end_capture(cudaStream_t stream);

  std::unique_ptr<CUgraphExec_st, Destroy> exec_;
};

} // namespace epx::bench
