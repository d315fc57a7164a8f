// SPDX-License-Identifier: Apache-2.0
// Tokens travel to their experts and back on GPUs, a GPU for each rank: mpirun -n 4 gpu_exchange
#include <cstdio>
#include <vector>

#include <cuda_runtime_api.h>

#include <epx/epx_mpi.hpp>

constexpr int T = 64, H = 512, K = 2; // tokens of a rank, elements of a token, experts of a token

template <typename U> // n elements in the GPU's memory, which goes with the process
std::span<U> on_gpu(size_t n, const std::vector<U>& from = {}) {
  void* data = nullptr;
  if (cudaMalloc(&data, n * sizeof(U)) != cudaSuccess) throw std::bad_alloc();
  cudaMemcpy(data, from.data(), from.size() * sizeof(U), cudaMemcpyHostToDevice);
  return {static_cast<U*>(data), n};
}

void exchange(int rank, int num_ranks) {
  cudaSetDevice(rank);
  epx::GroupConfig config; // 1. the ranks form a group
  config.num_experts = 4 * num_ranks, config.max_tokens_per_rank = T, config.hidden_dim = H, config.max_top_k = K;
  config.max_token_dtype = EPX_FLOAT32, config.transport = EPX_TRANSPORT_NCCL;
  epx::Group group(epx::bootstrap_mpi(MPI_COMM_WORLD, std::chrono::seconds(60)), config);
  const size_t E = config.num_experts, L = group.query().num_local_experts, R = group.query().max_recv_tokens_per_rank;

  std::vector<int32_t> idx(T * K); // 2. a router's choice; the same weight for each
  for (size_t i = 0; i < idx.size(); ++i)
    idx[i] = static_cast<int32_t>((7 * i + rank) % E);
  const auto topk_idx = on_gpu(T * K, idx);
  const auto weights = on_gpu(T * K, std::vector(T * K, 1.0f / K)), tokens = on_gpu(T * H, std::vector(T * H, rank + 1.0f));

  const epx::Layer layer{.top_k =
                             K}; // 3. prepare, dispatch, combine: one stream, no synchronisation, ready for a CUDA graph
  const auto plan = on_gpu<std::byte>(group.handle_mem_size(layer));
  const auto counts = on_gpu<int32_t>(L), offsets = on_gpu<int32_t>(L + 1);
  const epx::Memory rows = group.mem_alloc(R * H * sizeof(float)); // peers store into it
  const auto recv_weights = on_gpu<float>(R), out = on_gpu<float>(T * H);
  const epx::Tensor recv{rows.as<float>(), {R, H}};
  cudaStream_t stream = nullptr;
  cudaStreamCreate(&stream);
  group.prepare({layer, plan, stream, {topk_idx, {T, K}}, counts, offsets});
  group.dispatch({layer, plan, stream, {tokens, {T, H}}, {weights, {T, K}}, recv, recv_weights});
  // Here the experts compute: expert e has rows [offsets[e], offsets[e] + counts[e]) of recv. These return what they get.
  group.combine({layer, plan, stream, recv, recv_weights, {out, {T, H}}});

  std::vector<float> home(T * H); // 4. each token is its own weighted mean
  cudaMemcpyAsync(home.data(), out.data(), out.size_bytes(), cudaMemcpyDeviceToHost, stream);
  cudaStreamSynchronize(stream);
  const epx_group_report report = group.status();
  if (report.message[0] != '\0') throw epx::Error(report.status, report.message);
  const bool right = home == std::vector(T * H, rank + 1.0f);
  std::printf("rank %d of %d: %d tokens came home %s\n", rank, num_ranks, T, right ? "right" : "WRONG");
  if (!right) throw epx::Error(EPX_ERROR_INTERNAL, "the sum of a token's halves is not the token");
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, num_ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &num_ranks);
  try {
    exchange(rank, num_ranks);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_exchange: rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
