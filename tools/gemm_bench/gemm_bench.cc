// SPDX-License-Identifier: Apache-2.0
// Times the grouped GEMMs of the FFN in BFLOAT16, or in FLOAT8_E4M3, on one GPU, each beside one dense GEMM of cuBLAS with as many
// multiplications:
// back to back, where power limits the clocks, and after pauses, where it does not. The two take turns, so that both find the
// same clocks, and the ratio is that of neighbours.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "moe/gemm/gemm_workspace.h"
#include "moe/gemm/grouped_gemm.h"
#include "tools/gemm_bench/counts.h"
#include "tools/gemm_bench/dense_fp8.h"

namespace {

using namespace epx;
using namespace epx::moe;
using namespace epx::moe::cuda;

struct Options {
  int groups = 32;
  int64_t rows = 32768;
  std::string routing = "binomial";
  int64_t hidden = 4096;
  int64_t ffn = 1536;
  int num_sms = 0;
  int hot = 200;
  int paused = 7;
  bool accumulate = false;
  bool is_fp8 = false;
};

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(fmt::format("{}: {}", what, cudaGetErrorString(error)));
}
void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) throw std::runtime_error(fmt::format("{}: {}", what, cublasGetStatusString(status)));
}

struct Free {
  void operator()(void* memory) const { cudaFree(memory); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(int64_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, std::max<int64_t>(bytes, 1)), "cudaMalloc");
  return Memory(memory);
}

// Normally distributed elements of BFLOAT16: power, and so the clocks, depend on the bits.
Memory allocate_random(int64_t elements, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> pattern(1 << 20);
  for (uint16_t& bits : pattern) {
    const float value = normal(random);
    uint32_t word = 0;
    std::memcpy(&word, &value, sizeof(word));
    bits = static_cast<uint16_t>(word >> 16);
  }
  Memory memory = allocate(elements * 2);
  for (int64_t at = 0; at < elements; at += static_cast<int64_t>(pattern.size()))
    check(cudaMemcpy(static_cast<uint16_t*>(memory.get()) + at, pattern.data(),
                     2 * std::min<int64_t>(elements - at, static_cast<int64_t>(pattern.size())), cudaMemcpyHostToDevice),
          "cudaMemcpy");
  return memory;
}

// Random codes of E4M3, none of which is NaN.
Memory allocate_codes(int64_t elements, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> pattern(1 << 20);
  for (uint8_t& code : pattern) {
    code = static_cast<uint8_t>(random() >> 40);
    if ((code & 0x7f) == 0x7f) code = 0;
  }
  Memory memory = allocate(elements);
  for (int64_t at = 0; at < elements; at += static_cast<int64_t>(pattern.size()))
    check(cudaMemcpy(static_cast<uint8_t*>(memory.get()) + at, pattern.data(),
                     std::min<int64_t>(elements - at, static_cast<int64_t>(pattern.size())), cudaMemcpyHostToDevice),
          "cudaMemcpy");
  return memory;
}
Memory allocate_scales(int64_t count) {
  const std::vector<float> ones(count, 1.0F);
  Memory memory = allocate(count * 4);
  check(cudaMemcpy(memory.get(), ones.data(), count * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  return memory;
}

struct Timed {
  std::vector<double> grouped_us, dense_us;
};
using Work = std::function<void()>;

// Runs both in turn, `repeats` times, and waits `pause_s` before each. Before the first event a memset gives the host time to
// enqueue what is timed.
Timed time_both(const Work& grouped, const Work& dense, int repeats, double pause_s, cudaStream_t stream, void* scratch,
                size_t scratch_bytes) {
  std::vector<cudaEvent_t> events(static_cast<size_t>(repeats) * 4);
  for (cudaEvent_t& event : events)
    check(cudaEventCreate(&event), "cudaEventCreate");
  for (size_t i = 0; i < events.size(); i += 2) {
    if (pause_s > 0) {
      check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      std::this_thread::sleep_for(std::chrono::duration<double>(pause_s));
    }
    if (pause_s > 0 || i == 0) check(cudaMemsetAsync(scratch, 0, scratch_bytes, stream), "cudaMemsetAsync");
    check(cudaEventRecord(events[i], stream), "cudaEventRecord");
    i % 4 == 0 ? grouped() : dense();
    check(cudaEventRecord(events[i + 1], stream), "cudaEventRecord");
  }
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  Timed timed;
  for (size_t i = 0; i < events.size(); i += 2) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, events[i], events[i + 1]), "cudaEventElapsedTime");
    (i % 4 == 0 ? timed.grouped_us : timed.dense_us).push_back(ms * 1e3);
  }
  for (cudaEvent_t event : events)
    cudaEventDestroy(event);
  return timed;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void print_line(const std::string& name, const char* pacing, double flop, const Timed& timed) {
  const std::vector<double>&grouped = timed.grouped_us, &dense = timed.dense_us;
  std::vector<double> ratios(grouped.size());
  for (size_t i = 0; i < ratios.size(); ++i)
    ratios[i] = dense[i] / grouped[i];
  const auto [fastest, slowest] = std::minmax_element(grouped.begin(), grouped.end());
  const auto [lowest, highest] = std::minmax_element(ratios.begin(), ratios.end());
  fmt::print("{:<24} {:<6} {:9.1f} {:9.1f} {:9.1f} {:8.1f} {:9.1f} {:8.1f} {:6.3f} {:6.3f} {:6.3f}\n", name, pacing,
             median(grouped), *fastest, *slowest, flop / median(grouped) * 1e-6, median(dense), flop / median(dense) * 1e-6,
             median(ratios), *lowest, *highest);
}

void run(const Options& options) {
  if (options.is_fp8 && (options.hidden % kQuantiseBlock != 0 || options.ffn % kQuantiseBlock != 0))
    throw std::runtime_error("with --fp8 --hidden and --ffn must be multiples of 128");
  if (!options.is_fp8 && !fits_tensor_cores(EPX_BFLOAT16, options.hidden, options.ffn, options.rows))
    throw std::runtime_error("--hidden and --ffn must be multiples of 8");
  const std::vector<int32_t> counts = bench::draw_counts(options.routing, options.rows, options.groups);
  std::vector<int32_t> offsets(counts.size() + 1);
  // TMA reads columns of E4M3 from the first row of a zone on.
  constexpr int32_t kZoneAlignment = 16;
  for (size_t g = 0; g < counts.size(); ++g)
    offsets[g + 1] =
        offsets[g] + (options.is_fp8 ? (counts[g] + kZoneAlignment - 1) / kZoneAlignment * kZoneAlignment : counts[g]);
  const int64_t rows = offsets.back();
  const int64_t multiplied_rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const int64_t wide = 2 * options.ffn;
  const int64_t longest = std::max(options.hidden, wide);
  const int64_t weight = wide * options.hidden;
  const auto allocate_elements = options.is_fp8 ? allocate_codes : allocate_random;
  const Memory a = allocate_elements(rows * longest, 1), b = allocate_elements(rows * longest, 2);
  const Memory weights = allocate_elements(options.groups * weight, 3);
  const Memory scales = allocate_scales(options.is_fp8 ? (rows / kQuantiseBlock + options.groups) * longest : 0);
  const Memory d = allocate(std::max(rows * longest * 2, options.groups * weight * 4));
  const Memory dense_d = allocate(std::max(rows * longest * 2, weight * 4));
  const Memory device_counts = allocate(options.groups * 4), device_offsets = allocate((options.groups + 1) * 4);
  const Memory workspace = allocate(static_cast<int64_t>(tensor_core_workspace_bytes(options.groups)));
  constexpr size_t kScratchBytes = size_t{512} << 20;
  const Memory scratch = allocate(kScratchBytes);
  check(cudaMemcpy(device_counts.get(), counts.data(), counts.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaMemcpy(device_offsets.get(), offsets.data(), offsets.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  cublasHandle_t cublas = nullptr;
  check(cublasCreate(&cublas), "cublasCreate");
  check(cublasSetStream(cublas, stream), "cublasSetStream");
  LaunchTarget target{stream, options.num_sms};
  if (target.num_sms == 0)
    check(cudaDeviceGetAttribute(&target.num_sms, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");

  const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
  fmt::print("{} groups, {} rows ({} to {} of a group, {}), H = {}, F = {}, {} SMs{}\n", options.groups, rows, *least,
             *most, options.routing, options.hidden, options.ffn, target.num_sms,
             options.accumulate ? ", accumulating" : "");
  fmt::print("{:<24} {:<6} {:>9} {:>9} {:>9} {:>8} {:>9} {:>8} {:>6} {:>6} {:>6}\n", "product", "pacing", "us", "min us",
             "max us", "TFLOP/s", "cuBLAS us", "TFLOP/s", "ratio", "min", "max");

  struct Shape {
    const char* name;
    Product product;
    int64_t m, n, k;
    epx_dtype out;
  };
  const int64_t h = options.hidden, f = options.ffn;
  for (const Shape& s : {Shape{"forward gate_up", Product::kRowsByWeight, 0, wide, h, EPX_BFLOAT16},
                         Shape{"forward down", Product::kRowsByWeight, 0, h, f, EPX_BFLOAT16},
                         Shape{"dgrad down", Product::kRowsByTransposedWeight, 0, f, h, EPX_BFLOAT16},
                         Shape{"dgrad gate_up", Product::kRowsByTransposedWeight, 0, h, wide, EPX_BFLOAT16},
                         Shape{"wgrad gate_up fp32", Product::kWeightGradient, wide, h, 0, EPX_FLOAT32},
                         Shape{"wgrad down fp32", Product::kWeightGradient, h, f, 0, EPX_FLOAT32},
                         Shape{"wgrad gate_up bf16", Product::kWeightGradient, wide, h, 0, EPX_BFLOAT16},
                         Shape{"wgrad down bf16", Product::kWeightGradient, h, f, 0, EPX_BFLOAT16}}) {
    const bool is_gradient = s.product == Product::kWeightGradient;
    // Products in E4M3 have both operands by the inner index: dgrad takes transposed weights, and wgrad columns.
    const bool is_dgrad = s.product == Product::kRowsByTransposedWeight;
    GroupedGemm gemm{.product = options.is_fp8 && is_dgrad ? Product::kRowsByWeight : s.product,
                     .zones = {},
                     .in_dtype = options.is_fp8 ? EPX_FLOAT8_E4M3 : EPX_BFLOAT16,
                     .out_dtype = s.out};
    gemm.zones = {Integers(static_cast<int32_t*>(device_counts.get())),
                  Integers(static_cast<int32_t*>(device_offsets.get())), options.groups, rows};
    gemm.m = s.m;
    gemm.n = s.n;
    gemm.k = s.k;
    gemm.a = a.get();
    gemm.b = is_gradient ? b.get() : weights.get();
    gemm.d = d.get();
    gemm.a_scales = gemm.b_scales = options.is_fp8 ? static_cast<const float*>(scales.get()) : nullptr;
    gemm.a_stride = !is_gradient ? s.k : options.is_fp8 ? rows : s.m;
    gemm.b_stride = !is_gradient ? s.n * s.k : options.is_fp8 ? rows : s.n;
    gemm.d_stride = is_gradient ? s.m * s.n : s.n;
    gemm.accumulate = options.accumulate && is_gradient && s.out == EPX_FLOAT32;
    gemm.tensor_core_workspace = workspace.get();
    const Work grouped = [&] { check(launch_grouped_gemm(gemm, target), "launch_grouped_gemm"); };
    // The matrices of cuBLAS have columns where these have rows, so it computes the transpose: n x m.
    const auto m = static_cast<int>(is_gradient ? s.m : rows), n = static_cast<int>(s.n);
    const auto k = static_cast<int>(is_gradient ? rows : s.k);
    const bool b_by_k = s.product == Product::kRowsByWeight; // its rows have neighbours in k
    const float one = 1, beta = gemm.accumulate ? 1 : 0;
    std::unique_ptr<bench::DenseFp8> dense_fp8;
    if (options.is_fp8)
      dense_fp8 = std::make_unique<bench::DenseFp8>(bench::DenseFp8Operands{
          m, n, k, gemm.a, gemm.b, gemm.a_scales, gemm.b_scales, !is_gradient, dense_d.get(), s.out == EPX_FLOAT32});
    const Work dense = [&] {
      if (dense_fp8 != nullptr) return dense_fp8->enqueue(stream);
      check(cublasGemmEx(cublas, b_by_k ? CUBLAS_OP_T : CUBLAS_OP_N, is_gradient ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one,
                         gemm.b, CUDA_R_16BF, b_by_k ? k : n, gemm.a, CUDA_R_16BF, is_gradient ? m : k, &beta,
                         dense_d.get(), s.out == EPX_FLOAT32 ? CUDA_R_32F : CUDA_R_16BF, n, CUBLAS_COMPUTE_32F,
                         CUBLAS_GEMM_DEFAULT),
            "cublasGemmEx");
    };
    // Pads between zones, which the dense product multiplies, too, are not counted.
    const double flop = 2.0 * static_cast<double>(is_gradient ? m : multiplied_rows) * n *
                        static_cast<double>(is_gradient ? multiplied_rows : k);
    time_both(grouped, dense, 3, 0, stream, scratch.get(), kScratchBytes); // loads the kernels
    print_line(s.name, "hot", flop, time_both(grouped, dense, options.hot, 0, stream, scratch.get(), kScratchBytes));
    print_line(s.name, "paused", flop,
               time_both(grouped, dense, options.paused, 0.3, stream, scratch.get(), kScratchBytes));
  }
  check(cublasDestroy(cublas), "cublasDestroy");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

} // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Times the grouped GEMMs of the FFN beside dense ones of cuBLAS");
  app.add_option("--groups", options.groups, "experts of this GPU")->check(CLI::Range(1, 4096))->capture_default_str();
  app.add_option("--rows", options.rows, "rows of all groups, about")->check(CLI::Range(1, 1 << 22))->capture_default_str();
  app.add_option("--routing", options.routing, "uniform, binomial (top-8 of 256 experts), or zipf:EXPONENT")
      ->capture_default_str();
  app.add_option("--hidden", options.hidden, "H")->check(CLI::Range(8, 65536))->capture_default_str();
  app.add_option("--ffn", options.ffn, "F")->check(CLI::Range(8, 65536))->capture_default_str();
  app.add_option("--num-sms", options.num_sms, "SMs for the grouped GEMMs; 0: all")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--hot", options.hot, "repetitions back to back")->check(CLI::Range(1, 10000))->capture_default_str();
  app.add_option("--paused", options.paused, "repetitions after pauses of 0.3 s")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_flag("--accumulate", options.accumulate, "add to the weight gradients in FLOAT32");
  app.add_flag("--fp8", options.is_fp8, "FLOAT8_E4M3 with scales of blocks, beside cuBLASLt's");
  CLI11_PARSE(app, argc, argv);
  try {
    run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "gemm_bench: {}\n", error.what());
    return 1;
  }
}
