// SPDX-License-Identifier: Apache-2.0
// Two kinds of kernels: one thread for each element, and one warp for each row.
#include "apps/train_moe/cuda/kernels.h"

#include <cuda_bf16.h>

#include "apps/train_moe/cuda/launch.h"

namespace train::cuda {
namespace {

constexpr int kThreads = 256; // of a block
constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = kThreads / kWarp;
constexpr int kByteValues = 256;
constexpr float kNormEpsilon = 1e-6f; // as network.cc has it

__device__ inline int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}
__device__ inline int64_t warp_index() {
  return thread_index() / kWarp;
}
__device__ inline int lane() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

// Every lane gets the sum of all lanes' values, by one fixed tree.
template <typename T>
__device__ inline T sum_of_lanes(T value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(~0u, value, distance);
  return value;
}
__device__ inline float max_of_lanes(float value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}

// Every lane gets the sum of of(i) over 0 <= i < width; T is the type in which it is summed.
template <typename T, typename Of>
__device__ inline T sum_of_row(int64_t width, const Of& of) {
  T sum = 0;
  for (int64_t i = lane(); i < width; i += kWarp)
    sum += of(i);
  return sum_of_lanes(sum);
}

__device__ inline float inverse_rms(const float* row, int64_t width) {
  const auto squares = sum_of_row<float>(width, [&](int64_t i) { return row[i] * row[i]; });
  return 1 / sqrtf(squares / static_cast<float>(width) + kNormEpsilon);
}

__global__ void embed_kernel(const float* table, const unsigned char* bytes, int64_t count, int64_t width, float* out) {
  const int64_t i = thread_index();
  if (i < count * width) out[i] = table[bytes[i / width] * width + i % width];
}

// A thread has one element of the table, and adds to it in the order of the bytes.
__global__ void embed_bwd_kernel(const float* grad_out, const unsigned char* bytes, int64_t count, int64_t width,
                                 float* grad_table) {
  const int64_t element = thread_index();
  if (element >= kByteValues * width) return;
  const int64_t value = element / width;
  float sum = grad_table[element];
  for (int64_t i = 0; i < count; ++i)
    if (bytes[i] == value) sum += grad_out[i * width + element % width];
  grad_table[element] = sum;
}

__global__ void add_kernel(const float* a, const float* b, int64_t size, float* out) {
  const int64_t i = thread_index();
  if (i < size) out[i] = a[i] + b[i];
}

__global__ void repeat_row_kernel(const float* row, int64_t rows, int64_t width, float* out) {
  const int64_t i = thread_index();
  if (i < rows * width) out[i] = row[i % width];
}

__global__ void sum_rows_kernel(const float* x, int64_t rows, int64_t width, float* sum) {
  const int64_t column = thread_index();
  if (column >= width) return;
  float total = 0;
  for (int64_t r = 0; r < rows; ++r)
    total += x[r * width + column];
  sum[column] = total;
}

__global__ void rms_norm_kernel(const float* x, int64_t rows, int64_t width, float* y) {
  const int64_t r = warp_index();
  if (r >= rows) return;
  const float inverse = inverse_rms(x + r * width, width);
  for (int64_t i = lane(); i < width; i += kWarp)
    y[r * width + i] = x[r * width + i] * inverse;
}

__global__ void rms_norm_bwd_kernel(const float* x, const float* grad_y, int64_t rows, int64_t width, float* grad_x) {
  const int64_t r = warp_index();
  if (r >= rows) return;
  const float* const row = x + r * width;
  const float* const grad = grad_y + r * width;
  const float inverse = inverse_rms(row, width);
  const auto dot = sum_of_row<float>(width, [&](int64_t i) { return grad[i] * row[i]; });
  const float shrink = dot * inverse * inverse * inverse / static_cast<float>(width);
  for (int64_t i = lane(); i < width; i += kWarp)
    grad_x[r * width + i] += grad[i] * inverse - row[i] * shrink;
}

__global__ void cross_entropy_kernel(float* logits, const unsigned char* targets, int64_t rows, int64_t classes,
                                     float scale, double* losses) {
  const int64_t r = warp_index();
  if (r >= rows) return;
  float* const row = logits + r * classes;
  float top = row[0];
  for (int64_t i = lane(); i < classes; i += kWarp)
    top = fmaxf(top, row[i]);
  top = max_of_lanes(top);
  const auto sum = sum_of_row<double>(classes, [&](int64_t i) { return expf(row[i] - top); });
  if (lane() == 0) losses[r] = log(sum) + static_cast<double>(top) - static_cast<double>(row[targets[r]]);
  __syncwarp(); // the loss has read its logit
  const float share = scale / static_cast<float>(sum);
  for (int64_t i = lane(); i < classes; i += kWarp)
    row[i] = expf(row[i] - top) * share - (i == targets[r] ? scale : 0);
}

__global__ void adamw_kernel(AdamWStep step, int64_t size, AdamWVectors vectors) {
  const int64_t i = thread_index();
  if (i < size) adamw_update(step, vectors, i);
}

__global__ void round_kernel(const float* from, int64_t size, __nv_bfloat16* to) {
  const int64_t i = thread_index();
  if (i < size) to[i] = __float2bfloat16_rn(from[i]);
}

__global__ void widen_kernel(const __nv_bfloat16* from, int64_t size, float* to) {
  const int64_t i = thread_index();
  if (i < size) to[i] = __bfloat162float(from[i]);
}

// Launches one thread for each element.
template <typename... Params, typename... Args>
cudaError_t for_each_element(void (*kernel)(Params...), int64_t elements, cudaStream_t stream, const Args&... args) {
  if (elements == 0) return cudaSuccess;
  return launch(kernel, (elements + kThreads - 1) / kThreads, kThreads, stream, args...);
}
// Launches one warp for each row.
template <typename... Params, typename... Args>
cudaError_t for_each_row(void (*kernel)(Params...), int64_t rows, cudaStream_t stream, const Args&... args) {
  if (rows == 0) return cudaSuccess;
  return launch(kernel, (rows + kWarpsPerBlock - 1) / kWarpsPerBlock, kThreads, stream, args...);
}

} // namespace

cudaError_t embed(const float* table, const unsigned char* bytes, int64_t count, int64_t width, float* out,
                  cudaStream_t stream) {
  return for_each_element(embed_kernel, count * width, stream, table, bytes, count, width, out);
}
cudaError_t embed_bwd(const float* grad_out, const unsigned char* bytes, int64_t count, int64_t width, float* grad_table,
                      cudaStream_t stream) {
  return for_each_element(embed_bwd_kernel, kByteValues * width, stream, grad_out, bytes, count, width, grad_table);
}
cudaError_t add(const float* a, const float* b, int64_t size, float* out, cudaStream_t stream) {
  return for_each_element(add_kernel, size, stream, a, b, size, out);
}
cudaError_t repeat_row(const float* row, int64_t rows, int64_t width, float* out, cudaStream_t stream) {
  return for_each_element(repeat_row_kernel, rows * width, stream, row, rows, width, out);
}
cudaError_t sum_rows(const float* x, int64_t rows, int64_t width, float* sum, cudaStream_t stream) {
  return for_each_element(sum_rows_kernel, width, stream, x, rows, width, sum);
}
cudaError_t rms_norm(const float* x, int64_t rows, int64_t width, float* y, cudaStream_t stream) {
  return for_each_row(rms_norm_kernel, rows, stream, x, rows, width, y);
}
cudaError_t rms_norm_bwd(const float* x, const float* grad_y, int64_t rows, int64_t width, float* grad_x,
                         cudaStream_t stream) {
  return for_each_row(rms_norm_bwd_kernel, rows, stream, x, grad_y, rows, width, grad_x);
}
cudaError_t cross_entropy(float* logits, const unsigned char* targets, int64_t rows, int64_t classes, float scale,
                          double* losses, cudaStream_t stream) {
  return for_each_row(cross_entropy_kernel, rows, stream, logits, targets, rows, classes, scale, losses);
}
cudaError_t adamw(const AdamWStep& step, int64_t size, const AdamWVectors& vectors, cudaStream_t stream) {
  return for_each_element(adamw_kernel, size, stream, step, size, vectors);
}
cudaError_t round(const float* from, int64_t size, uint16_t* to, cudaStream_t stream) {
  return for_each_element(round_kernel, size, stream, from, size, reinterpret_cast<__nv_bfloat16*>(to));
}
cudaError_t widen(const uint16_t* from, int64_t size, float* to, cudaStream_t stream) {
  return for_each_element(widen_kernel, size, stream, reinterpret_cast<const __nv_bfloat16*>(from), size, to);
}

} // namespace train::cuda
