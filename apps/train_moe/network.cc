// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/network.h"

#include <algorithm>
#include <cmath>

#include <Eigen/Core>

namespace train {
namespace {

template <typename T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <typename T>
using In = Eigen::Map<const Matrix<T>>;
template <typename T>
using Out = Eigen::Map<Matrix<T>>;
template <typename T>
using Row = Eigen::Matrix<T, 1, Eigen::Dynamic>;

constexpr double kEpsilon = 1e-6;

template <typename T>
T inverse_rms(const T* row, int64_t width) {
  T squares = 0;
  for (int64_t i = 0; i < width; ++i)
    squares += row[i] * row[i];
  return 1 / std::sqrt(squares / static_cast<T>(width) + static_cast<T>(kEpsilon));
}

} // namespace

template <typename T>
void linear(const T* x, const T* weight, const T* bias, int64_t rows, int64_t in, int64_t out, T* y) {
  Out<T> result(y, rows, out);
  if (bias != nullptr)
    result = Eigen::Map<const Row<T>>(bias, out).replicate(rows, 1);
  else
    result.setZero();
  result.noalias() += In<T>(x, rows, in) * In<T>(weight, out, in).transpose();
}

template <typename T>
void linear_bwd(const T* x, const T* weight, const T* grad_y, int64_t rows, int64_t in, int64_t out,
                const LinearGrads<T>& grads) {
  const In<T> grad(grad_y, rows, out);
  Out<T>(grads.grad_weight, out, in).noalias() = grad.transpose() * In<T>(x, rows, in);
  if (grads.grad_bias != nullptr) { // Eigen's own sum would depend on where the memory begins
    std::fill_n(grads.grad_bias, out, T{0});
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < out; ++i)
        grads.grad_bias[i] += grad_y[r * out + i];
  }
  Out<T> grad_x(grads.grad_x, rows, in);
  if (!grads.add_to_grad_x) grad_x.setZero();
  grad_x.noalias() += grad * In<T>(weight, out, in);
}

template <typename T>
void rms_norm(const T* x, int64_t rows, int64_t width, T* y) {
  for (int64_t r = 0; r < rows; ++r) {
    const T inverse = inverse_rms(x + r * width, width);
    for (int64_t i = 0; i < width; ++i)
      y[r * width + i] = x[r * width + i] * inverse;
  }
}

template <typename T>
void rms_norm_bwd(const T* x, const T* grad_y, int64_t rows, int64_t width, T* grad_x) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* const row = x + r * width;
    const T* const grad = grad_y + r * width;
    const T inverse = inverse_rms(row, width);
    T dot = 0;
    for (int64_t i = 0; i < width; ++i)
      dot += grad[i] * row[i];
    const T shrink = dot * inverse * inverse * inverse / static_cast<T>(width);
    for (int64_t i = 0; i < width; ++i)
      grad_x[r * width + i] += grad[i] * inverse - row[i] * shrink;
  }
}

template <typename T>
void cross_entropy(T* logits, const unsigned char* targets, int64_t rows, int64_t classes, T scale, double* losses) {
  for (int64_t r = 0; r < rows; ++r) {
    T* const row = logits + r * classes;
    const T top = *std::max_element(row, row + classes);
    const T target = row[targets[r]];
    double sum = 0;
    for (int64_t i = 0; i < classes; ++i)
      sum += row[i] = std::exp(row[i] - top);
    losses[r] = std::log(sum) + static_cast<double>(top) - static_cast<double>(target);
    const T share = scale / static_cast<T>(sum);
    for (int64_t i = 0; i < classes; ++i)
      row[i] *= share;
    row[targets[r]] -= scale;
  }
}

#define TRAIN_INSTANTIATE(T)                                                                                               \
  template void linear(const T*, const T*, const T*, int64_t, int64_t, int64_t, T*);                                       \
  template void linear_bwd(const T*, const T*, const T*, int64_t, int64_t, int64_t, const LinearGrads<T>&);                \
  template void rms_norm(const T*, int64_t, int64_t, T*);                                                                  \
  template void rms_norm_bwd(const T*, const T*, int64_t, int64_t, T*);                                                    \
  template void cross_entropy(T*, const unsigned char*, int64_t, int64_t, T, double*);
TRAIN_INSTANTIATE(float)
TRAIN_INSTANTIATE(double)
#undef TRAIN_INSTANTIATE

} // namespace train
