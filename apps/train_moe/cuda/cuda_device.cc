// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include "apps/train_moe/cuda/kernels.h"
#include "apps/train_moe/cuda/products.h"
#include "apps/train_moe/device.h"
#include "apps/train_moe/errors.h"

namespace train {
namespace {

void require(cudaError_t error, const char* function) {
  if (error != cudaSuccess) fail(kExitFailure, "{}: {}", function, cudaGetErrorString(error));
}

class Stream {
public:
  Stream() { require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }

private:
  cudaStream_t stream_ = nullptr;
};

class Event {
public:
  Event() { require(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // Has `later` wait for what `earlier` has been given.
  void order(const Stream& earlier, const Stream& later) const {
    require(cudaEventRecord(event_, earlier.get()), "cudaEventRecord");
    require(cudaStreamWaitEvent(later.get(), event_, 0), "cudaStreamWaitEvent");
  }

private:
  cudaEvent_t event_ = nullptr;
};

class CudaDevice final : public Device {
public:
  CudaDevice() : products_(stream_.get()) {}

  bool is_host() const override { return false; }
  epx_stream stream() const override { return stream_.get(); }
  epx_stream side_stream() const override { return side_stream_.get(); }
  double available_memory() const override {
    size_t available = 0, all = 0;
    require(cudaMemGetInfo(&available, &all), "cudaMemGetInfo");
    return static_cast<double>(available);
  }
  double peak_memory() const override { // arrays and groups keep what they have taken
    size_t available = 0, all = 0;
    require(cudaMemGetInfo(&available, &all), "cudaMemGetInfo");
    return static_cast<double>(all - available);
  }
  void* allocate(size_t bytes) override {
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, bytes);
    if (error != cudaSuccess) fail(kExitFailure, "cudaMalloc of {} bytes: {}", bytes, cudaGetErrorString(error));
    return memory;
  }
  void free(void* memory) noexcept override { cudaFree(memory); }
  void clear(void* to, size_t bytes) override {
    if (bytes > 0) require(cudaMemsetAsync(to, 0, bytes, stream_.get()), "cudaMemsetAsync");
  }
  void copy_in(void* to, const void* from_host, size_t bytes) override {
    copy_and_wait(to, from_host, bytes, cudaMemcpyHostToDevice);
  }
  void copy_out(void* to_host, const void* from, size_t bytes) override {
    copy_and_wait(to_host, from, bytes, cudaMemcpyDeviceToHost);
  }
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes > 0) require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_.get()), "cudaMemcpyAsync");
  }
  void synchronize() override { require(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize"); }
  void fork() override { event_.order(stream_, side_stream_); }
  void join() override { event_.order(side_stream_, stream_); }
  std::unique_ptr<epx::CopyEngineGather> make_copy_engine_gather(int rank, int num_ranks,
                                                                 const epx::ShareBytes& share) override {
    return epx::make_copy_engine_gather(rank, num_ranks, share);
  }

  void embed(const float* table, const unsigned char* bytes, int64_t count, int64_t width, float* out) override {
    require(cuda::embed(table, bytes, count, width, out, stream_.get()), "embed");
  }
  void embed_bwd(const float* grad_out, const unsigned char* bytes, int64_t count, int64_t width,
                 float* grad_table) override {
    require(cuda::embed_bwd(grad_out, bytes, count, width, grad_table, stream_.get()), "embed_bwd");
  }
  void add(const float* a, const float* b, int64_t size, float* out) override {
    require(cuda::add(a, b, size, out, stream_.get()), "add");
  }
  void linear(const float* x, const float* weight, const float* bias, int64_t rows, int64_t in, int64_t out,
              float* y) override {
    if (bias != nullptr) require(cuda::repeat_row(bias, rows, out, y, stream_.get()), "repeat_row");
    products_.multiply({x, false}, {weight, true}, rows, out, in, y, bias != nullptr);
  }
  void linear_bwd(const float* x, const float* weight, const float* grad_y, int64_t rows, int64_t in, int64_t out,
                  const LinearGrads<float>& grads) override {
    products_.multiply({grad_y, true}, {x, false}, out, in, rows, grads.grad_weight, false);
    if (grads.grad_bias != nullptr) require(cuda::sum_rows(grad_y, rows, out, grads.grad_bias, stream_.get()), "sum_rows");
    products_.multiply({grad_y, false}, {weight, false}, rows, in, out, grads.grad_x, grads.add_to_grad_x);
  }
  void rms_norm(const float* x, int64_t rows, int64_t width, float* y) override {
    require(cuda::rms_norm(x, rows, width, y, stream_.get()), "rms_norm");
  }
  void rms_norm_bwd(const float* x, const float* grad_y, int64_t rows, int64_t width, float* grad_x) override {
    require(cuda::rms_norm_bwd(x, grad_y, rows, width, grad_x, stream_.get()), "rms_norm_bwd");
  }
  void cross_entropy(float* logits, const unsigned char* targets, int64_t rows, int64_t classes, float scale,
                     double* losses) override {
    require(cuda::cross_entropy(logits, targets, rows, classes, scale, losses, stream_.get()), "cross_entropy");
  }
  void adamw(const AdamWStep& step, int64_t size, const AdamWVectors& vectors) override {
    require(cuda::adamw(step, size, vectors, stream_.get()), "adamw");
  }
  void round(const float* from, int64_t size, Bfloat16* to) override {
    require(cuda::round(from, size, to, stream_.get()), "round");
  }
  void widen(const Bfloat16* from, int64_t size, float* to) override {
    require(cuda::widen(from, size, to, stream_.get()), "widen");
  }

private:
  // Waits, so that the host's memory may be used again at once.
  void copy_and_wait(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (bytes > 0) require(cudaMemcpyAsync(to, from, bytes, kind, stream_.get()), "cudaMemcpyAsync");
    synchronize();
  }

  Stream stream_, side_stream_;
  Event event_; // a wait is for the last record before it
  cuda::Products products_;
};

} // namespace

std::unique_ptr<Device> make_cuda_device(int local_rank) {
  int num_gpus = 0;
  const cudaError_t error = cudaGetDeviceCount(&num_gpus);
  if (error != cudaSuccess || num_gpus == 0)
    fail(kExitFailure, "--device cuda: there is no GPU that CUDA can use: {}", cudaGetErrorString(error));
  // A launcher that gives each rank one GPU lets it see no other; whether ranks share one, epx looks.
  require(cudaSetDevice(local_rank % num_gpus), "cudaSetDevice");
  return std::make_unique<CudaDevice>();
}

} // namespace train
