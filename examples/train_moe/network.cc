#include "examples/train_moe/network.h"

#include <algorithm>
#include <cmath>

#include <Eigen/Core>

namespace train {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using In = Eigen::Map<const Matrix>;
using Out = Eigen::Map<Matrix>;
using InRow = Eigen::Map<const Eigen::RowVectorXf>;

constexpr float kEpsilon = 1e-6f;

float inverse_rms(const float* row, int64_t width) {
  float squares = 0;
  for (int64_t i = 0; i < width; ++i)
    squares += row[i] * row[i];
  return 1 / std::sqrt(squares / static_cast<float>(width) + kEpsilon);
}

} // namespace

void linear(const float* x, const float* weight, const float* bias, int64_t rows, int64_t in, int64_t out, float* y) {
  Out result(y, rows, out);
  if (bias != nullptr)
    result = InRow(bias, out).replicate(rows, 1);
  else
    result.setZero();
  result.noalias() += In(x, rows, in) * In(weight, out, in).transpose();
}

void linear_bwd(const float* x, const float* weight, const float* grad_y, int64_t rows, int64_t in, int64_t out,
                const LinearGrads& grads) {
  const In grad(grad_y, rows, out);
  Out(grads.grad_weight, out, in).noalias() = grad.transpose() * In(x, rows, in);
  if (grads.grad_bias != nullptr) Eigen::Map<Eigen::RowVectorXf>(grads.grad_bias, out) = grad.colwise().sum();
  Out grad_x(grads.grad_x, rows, in);
  if (!grads.add_to_grad_x) grad_x.setZero();
  grad_x.noalias() += grad * In(weight, out, in);
}

void rms_norm(const float* x, int64_t rows, int64_t width, float* y) {
  for (int64_t r = 0; r < rows; ++r) {
    const float inverse = inverse_rms(x + r * width, width);
    for (int64_t i = 0; i < width; ++i)
      y[r * width + i] = x[r * width + i] * inverse;
  }
}

void rms_norm_bwd(const float* x, const float* grad_y, int64_t rows, int64_t width, float* grad_x) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* const row = x + r * width;
    const float* const grad = grad_y + r * width;
    const float inverse = inverse_rms(row, width);
    float dot = 0;
    for (int64_t i = 0; i < width; ++i)
      dot += grad[i] * row[i];
    const float shrink = dot * inverse * inverse * inverse / static_cast<float>(width);
    for (int64_t i = 0; i < width; ++i)
      grad_x[r * width + i] += grad[i] * inverse - row[i] * shrink;
  }
}

double cross_entropy(float* logits, const unsigned char* targets, int64_t rows, int64_t classes, float scale) {
  double loss = 0;
  for (int64_t r = 0; r < rows; ++r) {
    float* const row = logits + r * classes;
    const float top = *std::max_element(row, row + classes);
    const float target = row[targets[r]];
    double sum = 0;
    for (int64_t i = 0; i < classes; ++i)
      sum += row[i] = std::exp(row[i] - top);
    loss += std::log(sum) + static_cast<double>(top) - static_cast<double>(target);
    const float share = scale / static_cast<float>(sum);
    for (int64_t i = 0; i < classes; ++i)
      row[i] *= share;
    row[targets[r]] -= scale;
  }
  return loss;
}

} // namespace train
