// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <string>

#include <sys/resource.h>
#include <sys/sysinfo.h>

#include "apps/train_moe/device.h"
#include "apps/train_moe/errors.h"

namespace train {
namespace {

class HostDevice final : public Device {
public:
  bool is_host() const override { return true; }
  epx_stream stream() const override { return nullptr; }
  epx_stream side_stream() const override { return nullptr; }

  // Returns the machine's memory and swap, or less where the process is limited.
  double available_memory() const override {
    struct sysinfo machine {};
    double bytes = std::numeric_limits<double>::infinity();
    if (sysinfo(&machine) == 0)
      bytes = (static_cast<double>(machine.totalram) + static_cast<double>(machine.totalswap)) * machine.mem_unit;
    rlimit limit{};
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
      bytes = std::min(bytes, static_cast<double>(limit.rlim_cur));
    return bytes;
  }
  double peak_memory() const override {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;)
      if (word == "VmHWM:") {
        constexpr double kBytesPerKb = 1024;
        double kilobytes = 0;
        status >> kilobytes;
        return kilobytes * kBytesPerKb;
      }
    return 0;
  }
  void* allocate(size_t bytes) override {
    void* const memory = ::operator new(bytes, std::nothrow);
    if (memory == nullptr) fail(kExitFailure, "out of memory: {} bytes", bytes);
    return memory;
  }
  void free(void* memory) noexcept override { ::operator delete(memory); }
  void clear(void* to, size_t bytes) override {
    if (bytes > 0) std::memset(to, 0, bytes);
  }
  void copy_in(void* to, const void* from_host, size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from_host, bytes);
  }
  void copy_out(void* to_host, const void* from, size_t bytes) override { copy_in(to_host, from, bytes); }
  void copy(void* to, const void* from, size_t bytes) override { copy_in(to, from, bytes); }
  void synchronize() override {}
  void fork() override {}
  void join() override {}
  std::unique_ptr<epx::CopyEngineGather> make_copy_engine_gather(int, int, const epx::ShareBytes&) override {
    return nullptr;
  }

  void embed(const float* table, const unsigned char* bytes, int64_t count, int64_t width, float* out) override {
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(table + bytes[i] * width, width, out + i * width);
  }
  void embed_bwd(const float* grad_out, const unsigned char* bytes, int64_t count, int64_t width,
                 float* grad_table) override {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < width; ++j)
        grad_table[bytes[i] * width + j] += grad_out[i * width + j];
  }
  void add(const float* a, const float* b, int64_t size, float* out) override {
    for (int64_t i = 0; i < size; ++i)
      out[i] = a[i] + b[i];
  }
  void linear(const float* x, const float* weight, const float* bias, int64_t rows, int64_t in, int64_t out,
              float* y) override {
    train::linear(x, weight, bias, rows, in, out, y);
  }
  void linear_bwd(const float* x, const float* weight, const float* grad_y, int64_t rows, int64_t in, int64_t out,
                  const LinearGrads<float>& grads) override {
    train::linear_bwd(x, weight, grad_y, rows, in, out, grads);
  }
  void rms_norm(const float* x, int64_t rows, int64_t width, float* y) override { train::rms_norm(x, rows, width, y); }
  void rms_norm_bwd(const float* x, const float* grad_y, int64_t rows, int64_t width, float* grad_x) override {
    train::rms_norm_bwd(x, grad_y, rows, width, grad_x);
  }
  void cross_entropy(float* logits, const unsigned char* targets, int64_t rows, int64_t classes, float scale,
                     double* losses) override {
    train::cross_entropy(logits, targets, rows, classes, scale, losses);
  }
  void adamw(const AdamWStep& step, int64_t size, const AdamWVectors& vectors) override {
    for (int64_t i = 0; i < size; ++i)
      adamw_update(step, vectors, i);
  }
  void round(const float* from, int64_t size, Bfloat16* to) override {
    for (int64_t i = 0; i < size; ++i) {
      const auto bits = std::bit_cast<uint32_t>(from[i]);
      constexpr Bfloat16 kNan = 0x7fff; // the rounding could carry a NaN's bits over into infinity's
      to[i] = std::isnan(from[i]) ? kNan : static_cast<Bfloat16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
  }
  void widen(const Bfloat16* from, int64_t size, float* to) override {
    for (int64_t i = 0; i < size; ++i)
      to[i] = std::bit_cast<float>(uint32_t{from[i]} << 16);
  }
};

} // namespace

std::unique_ptr<Device> make_host_device() {
  return std::make_unique<HostDevice>();
}

} // namespace train
