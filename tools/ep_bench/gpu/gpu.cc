// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/gpu/gpu.h"

#include <cmath>
#include <cstdlib>
#include <utility>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"

namespace epx::bench {
namespace {

int choose_device(int rank) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0)
    throw RuntimeError(fmt::format("--transport is 'nccl', but this machine has no GPU that CUDA can use ({})",
                                   cudaGetErrorString(error)));
  const char* const local_rank = std::getenv("OMPI_COMM_WORLD_LOCAL_RANK");
  if (local_rank == nullptr) return rank % count;
  const int device = std::atoi(local_rank);
  // Ranks that NCCL takes for ranks of other machines may share a GPU.
  if (std::getenv("NCCL_HOSTID") != nullptr) return device % count;
  if (device >= count)
    throw RuntimeError(fmt::format("--transport is 'nccl' and rank {} is number {} of its machine, which has {} GPUs; each "
                                   "rank needs one of its own",
                                   rank, device, count));
  return device;
}

class GpuSideStream final : public SideStream {
public:
  explicit GpuSideStream(cudaStream_t main) : main_(main) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    for (cudaEvent_t* event : {&begin_, &end_})
      check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  ~GpuSideStream() override {
    for (cudaEvent_t event : {begin_, end_})
      cudaEventDestroy(event);
    cudaStreamDestroy(stream_);
  }
  GpuSideStream(const GpuSideStream&) = delete;
  GpuSideStream& operator=(const GpuSideStream&) = delete;

  epx_stream stream() const override { return stream_; }
  void begin() override { order(main_, begin_, stream_); }
  void end() override { order(stream_, end_, main_); }

private:
  static void order(cudaStream_t first, cudaEvent_t event, cudaStream_t second) {
    check_cuda(cudaEventRecord(event, first), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(second, event, 0), "cudaStreamWaitEvent");
  }

  cudaStream_t main_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

} // namespace

void check_cuda(cudaError_t error, const char* call) {
  if (error != cudaSuccess)
    throw RuntimeError(fmt::format("{}: {} ({})", call, cudaGetErrorString(error), cudaGetErrorName(error)));
}

Gpu::Gpu(int rank) {
  const int device = choose_device(rank);
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  check_cuda(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
}

Gpu::~Gpu() {
  cudaStreamDestroy(stream_);
}

std::unique_ptr<SideStream> Gpu::make_side_stream() {
  return std::make_unique<GpuSideStream>(stream_);
}

std::byte* Gpu::allocate(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes);
  if (error != cudaSuccess) throw RuntimeError(fmt::format("cudaMalloc of {} bytes: {}", bytes, cudaGetErrorString(error)));
  check_cuda(cudaMemsetAsync(memory, 0, bytes, stream_), "cudaMemsetAsync");
  finish();
  return static_cast<std::byte*>(memory);
}

void Gpu::free(std::byte* memory) noexcept {
  cudaFree(memory);
}

void Gpu::write(std::byte* to, std::span<const std::byte> from) {
  check_cuda(cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
  finish();
}

void Gpu::read(std::span<std::byte> to, const std::byte* from) {
  check_cuda(cudaMemcpyAsync(to.data(), from, to.size(), cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
  finish();
}

void Gpu::fill(std::span<std::byte> bytes, std::byte value) {
  check_cuda(cudaMemsetAsync(bytes.data(), static_cast<int>(value), bytes.size(), stream_), "cudaMemsetAsync");
  finish();
}

void Gpu::finish() {
  check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

Stopwatch::Stopwatch() {
  check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
}

Stopwatch::~Stopwatch() {
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
}

Stopwatch::Stopwatch(Stopwatch&& other) noexcept
    : begin_(std::exchange(other.begin_, nullptr)), end_(std::exchange(other.end_, nullptr)) {}

int64_t Stopwatch::elapsed_ns() const {
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
  return std::llround(double{milliseconds} * 1e6);
}

void Graph::begin_capture(cudaStream_t stream) {
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
}

void Graph::abandon_capture(cudaStream_t stream) noexcept {
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(stream, &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
}

Graph Graph::end_capture(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  cudaGraphExec_t exec = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&exec, graph, 0);
  cudaGraphDestroy(graph);
  check_cuda(error, "cudaGraphInstantiate");
  Graph result;
  result.exec_.reset(exec);
  check_cuda(cudaGraphUpload(exec, stream), "cudaGraphUpload"); // so that the first replay uploads nothing
  return result;
}

} // namespace epx::bench
