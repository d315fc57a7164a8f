// SPDX-License-Identifier: Apache-2.0
// train_moe's pieces on a GPU are compared with those on the host. Without a GPU this is skipped (exit status 77).
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdio>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "apps/train_moe/array.h"
#include "apps/train_moe/device.h"
#include "tests/support/rng.h"

namespace train {
namespace {

constexpr int64_t kGuards = 37; // elements behind each array, which no piece may change
constexpr double kExact = 0;
constexpr double kRounding = 1e-5; // of the largest value

std::unique_ptr<Device> gpu;

Device& host() {
  static const std::unique_ptr<Device> device = make_host_device();
  return *device;
}

// Is an array on the host and one on the GPU, with the same content until a piece writes to them.
template <typename T>
struct Twin {
  Twin(int64_t size, epx::test::Rng& rng) : on_host(host()), on_gpu(*gpu) {
    std::vector<T> values(size + kGuards);
    for (T& value : values)
      value = random_value(rng);
    assign(values);
  }

  void assign(const std::vector<T>& values) {
    on_host.assign(values);
    on_gpu.assign(values);
  }

  // Compares all elements, relative to the host's largest one.
  void check(double tolerance, const char* what) const {
    INFO(what);
    std::vector<T> mirror(on_gpu.size());
    on_gpu.copy_out(0, mirror);
    double largest = 0, deviation = 0;
    for (int64_t i = 0; i < on_host.size(); ++i)
      largest = std::max(largest, std::abs(static_cast<double>(on_host.data()[i])));
    for (int64_t i = 0; i < on_host.size(); ++i) {
      const double difference = std::abs(static_cast<double>(mirror[i]) - static_cast<double>(on_host.data()[i]));
      deviation = std::isnan(difference) ? std::numeric_limits<double>::infinity() : std::max(deviation, difference);
    }
    CHECK(deviation <= tolerance * largest);
  }

  Array<T> on_host, on_gpu;

private:
  static T random_value(epx::test::Rng& rng) {
    if constexpr (std::floating_point<T>)
      return static_cast<T>(static_cast<double>(rng.next() >> 11) * 0x1p-52 - 1);
    else
      return static_cast<T>(rng.next());
  }
};
using Floats = Twin<float>;
using Bytes = Twin<unsigned char>;

// Calls the piece on both devices: piece(device, data), where data(twin) is the memory of a twin there.
template <typename Piece>
void on_both(const Piece& piece) {
  piece(host(), [](auto& twin) { return twin.on_host.data(); });
  piece(*gpu, [](auto& twin) { return twin.on_gpu.data(); });
}

// Calls test(rng, rows, width) for a few shapes.
template <typename Test>
void for_shapes(const Test& test) {
  epx::test::Rng rng(1);
  struct Shape {
    int64_t rows, width;
  };
  for (const Shape& shape : {Shape{0, 5}, {1, 1}, {3, 31}, {32, 64}, {9, 256}, {33, 100}, {8, 7}}) {
    CAPTURE(shape.rows);
    CAPTURE(shape.width);
    test(rng, shape.rows, shape.width);
  }
}

TEST_CASE("embed and its gradient") {
  for_shapes([](epx::test::Rng& rng, int64_t count, int64_t width) {
    Floats table(256 * width, rng), out(count * width, rng), grad_table(256 * width, rng);
    Bytes bytes(count, rng);
    on_both([&](Device& device, const auto& data) {
      device.embed(data(table), data(bytes), count, width, data(out));
      device.embed_bwd(data(out), data(bytes), count, width, data(grad_table));
    });
    out.check(kExact, "out");
    grad_table.check(kExact, "grad_table");
  });
}

TEST_CASE("the gradient of a byte that comes often is summed in order") {
  epx::test::Rng rng(2);
  constexpr int64_t kCount = 300, kWidth = 3;
  Floats grad(kCount * kWidth, rng), grad_table(256 * kWidth, rng);
  Bytes bytes(kCount, rng);
  bytes.assign(std::vector<unsigned char>(kCount, 255));
  on_both([&](Device& device, const auto& data) {
    device.embed_bwd(data(grad), data(bytes), kCount, kWidth, data(grad_table));
  });
  grad_table.check(kExact, "grad_table");
}

TEST_CASE("add") {
  for_shapes([](epx::test::Rng& rng, int64_t rows, int64_t width) {
    Floats a(rows * width, rng), b(rows * width, rng), sum(rows * width, rng);
    on_both([&](Device& device, const auto& data) { device.add(data(a), data(b), rows * width, data(sum)); });
    sum.check(kExact, "sum");
  });
}

TEST_CASE("linear and its gradients") {
  epx::test::Rng rng(3);
  struct Shape {
    int64_t rows, in, out;
  };
  for (const Shape& shape : {Shape{1, 1, 1}, {32, 128, 64}, {7, 64, 8}, {5, 3, 200}}) {
    for (const bool has_bias : {false, true}) {
      const int64_t rows = shape.rows, in = shape.in, out = shape.out;
      CAPTURE(rows);
      CAPTURE(in);
      CAPTURE(out);
      CAPTURE(has_bias);
      Floats x(rows * in, rng), weight(out * in, rng), bias(out, rng), y(rows * out, rng), grad_y(rows * out, rng);
      Floats grad_x(rows * in, rng), grad_weight(out * in, rng), grad_bias(out, rng);
      on_both([&](Device& device, const auto& data) {
        device.linear(data(x), data(weight), has_bias ? data(bias) : nullptr, rows, in, out, data(y));
        // Without a bias the gradient of x is added to what is there, as for a router.
        device.linear_bwd(data(x), data(weight), data(grad_y), rows, in, out,
                          {data(grad_x), data(grad_weight), has_bias ? data(grad_bias) : nullptr, !has_bias});
      });
      y.check(kRounding, "y");
      grad_x.check(kRounding, "grad_x");
      grad_weight.check(kRounding, "grad_weight");
      grad_bias.check(kExact, "grad_bias");
    }
  }
}

TEST_CASE("rms_norm and its gradient") {
  for_shapes([](epx::test::Rng& rng, int64_t rows, int64_t width) {
    Floats x(rows * width, rng), y(rows * width, rng), grad_y(rows * width, rng), grad_x(rows * width, rng);
    on_both([&](Device& device, const auto& data) {
      device.rms_norm(data(x), rows, width, data(y));
      device.rms_norm_bwd(data(x), data(grad_y), rows, width, data(grad_x));
    });
    y.check(kRounding, "y");
    grad_x.check(kRounding, "grad_x");
  });
}

TEST_CASE("cross_entropy") {
  for_shapes([](epx::test::Rng& rng, int64_t rows, int64_t classes) {
    Floats logits(rows * classes, rng);
    Bytes targets(rows, rng);
    std::vector<unsigned char> in_range(rows);
    for (unsigned char& target : in_range)
      target = static_cast<unsigned char>(rng.below(classes));
    targets.assign(in_range);
    Twin<double> losses(rows, rng);
    on_both([&](Device& device, const auto& data) {
      device.cross_entropy(data(logits), data(targets), rows, classes, 0.125f, data(losses));
    });
    logits.check(kRounding, "gradient");
    losses.check(kRounding, "losses");
  });
}

TEST_CASE("cross_entropy of logits whose exponentials no float holds") {
  epx::test::Rng rng(4);
  constexpr int64_t kClasses = 256;
  Floats logits(kClasses, rng);
  std::vector<float> large(kClasses, -300.0f);
  large[45] = 710.0f; // of another lane than the first
  logits.assign(large);
  Bytes targets(1, rng);
  targets.assign({9});
  Twin<double> losses(1, rng);
  on_both([&](Device& device, const auto& data) {
    device.cross_entropy(data(logits), data(targets), 1, kClasses, 1.0f, data(losses));
  });
  logits.check(kRounding, "gradient");
  losses.check(kRounding, "losses");
}

TEST_CASE("adamw") {
  epx::test::Rng rng(5);
  constexpr int64_t kSize = 1000;
  Floats values(kSize, rng), grads(kSize, rng), first(kSize, rng), second(kSize, rng);
  std::vector<float> squares(kSize + kGuards);
  for (float& square : squares)
    square = static_cast<float>(rng.below(1000)) * 1e-3f;
  second.assign(squares);
  on_both([&](Device& device, const auto& data) {
    for (int step = 1; step <= 3; ++step)
      device.adamw({4e-3, 1 - std::pow(kAdamBeta1, step), 1 - std::pow(kAdamBeta2, step), 4e-4f}, kSize,
                   {data(values), data(grads), data(first), data(second)});
  });
  values.check(kExact, "values");
  first.check(kExact, "first moments");
  second.check(kExact, "second moments");
}

TEST_CASE("bfloat16") {
  epx::test::Rng rng(6);
  constexpr int64_t kSize = 5000;
  std::vector<float> values = {0.0f,
                               -0.0f,
                               1.0f,
                               1.00390625f /* a tie */,
                               1.01171875f /* another */,
                               3.4e38f,
                               1e-45f,
                               -1e-40f,
                               std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN(),
                               std::bit_cast<float>(0x7f800001u)};
  while (std::ssize(values) < kSize)
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(rng.next())));
  Floats from(kSize, rng), back(kSize, rng);
  from.assign(values);
  Twin<Bfloat16> rounded(kSize, rng);
  on_both([&](Device& device, const auto& data) { device.round(data(from), kSize, data(rounded)); });
  rounded.check(kExact, "rounded");
  CHECK(rounded.on_host.data()[3] == 0x3f80);
  CHECK(rounded.on_host.data()[4] == 0x3f82);

  std::vector<Bfloat16> numbers(kSize);
  for (Bfloat16& number : numbers)
    number = static_cast<Bfloat16>(rng.below(0x7f80)); // finite
  rounded.assign(numbers);
  on_both([&](Device& device, const auto& data) { device.widen(data(rounded), kSize, data(back)); });
  back.check(kExact, "widened");
}

TEST_CASE("memory") {
  epx::test::Rng rng(7);
  Floats values(10, rng);
  values.on_host.clear();
  values.on_gpu.clear();
  values.check(kExact, "cleared");
  std::vector<float> mirror;
  for (const float value : values.on_gpu.on_host(mirror))
    CHECK(value == 0);
  CHECK(gpu->available_memory() > 0);
}

} // namespace
} // namespace train

int main(int argc, char** argv) {
  int num_gpus = 0;
  if (cudaGetDeviceCount(&num_gpus) != cudaSuccess || num_gpus == 0) {
    std::puts("skipped: there is no GPU");
    return 77;
  }
  train::gpu = train::make_cuda_device(0);
  const int status = doctest::Context(argc, argv).run();
  train::gpu.reset();
  return status;
}
