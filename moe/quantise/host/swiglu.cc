// SPDX-License-Identifier: Apache-2.0
#include "moe/quantise/swiglu.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <vector>

#include "moe/ffn/activation.h"
#include "moe/quantise/host/matrix_quantiser.h"
#include "runtime/stages/host/rows/float_environment.h"
#include "runtime/stages/host/rows/row_types_isa.h"

namespace epx::moe {
namespace {

float weight_of(const float* recv_weights, int64_t row) {
  return recv_weights != nullptr ? recv_weights[row] : 1.0f;
}

// [kQuantiseBlock, columns]
std::vector<float> values_of_block(int64_t columns) {
  return std::vector<float>(static_cast<size_t>(kQuantiseBlock * columns));
}

const std::byte* bytes_of(const std::vector<float>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

template <typename Element>
void quantise_forward(const QuantiseSwiglu& call) {
  const int64_t inner = call.h.num_columns;
  MatrixQuantiser quantiser(call.h);
  std::vector<float> h = values_of_block(inner);
  for_each_block(call.zones, [&](const RowBlock& block) {
    for (int64_t i = 0; i < block.num_rows; ++i) {
      const int64_t row = block.first_row + i;
      const auto* const gates = static_cast<const typename Element::Bits*>(call.pre_act) + row * 2 * inner;
      const float weight = weight_of(call.recv_weights, row);
      for (int64_t f = 0; f < inner; ++f)
        h[static_cast<size_t>(i * inner + f)] = weight * swiglu(Element::load(gates[f]), Element::load(gates[inner + f]));
    }
    quantiser.quantise(block, EPX_FLOAT32, bytes_of(h));
  });
}

// The sum of a * b over a row, in the order of the kernel: each lane's four elements of a tile, the lanes by a tree, the tiles.
template <typename Element, typename HiddenOf>
float dot_by_tiles(const typename Element::Bits* a, const HiddenOf& b, int64_t columns) {
  float sum = 0;
  for (int64_t tile = 0; tile < columns; tile += kQuantiseBlock) {
    std::array<float, 32> lanes{};
    constexpr int64_t kLaneColumns = kQuantiseBlock / 32;
    for (int64_t j = 0; j < kQuantiseBlock; ++j) {
      float& lane = lanes[static_cast<size_t>(j / kLaneColumns)];
      lane = std::fma(Element::load(a[tile + j]), b(tile + j), lane);
    }
    for (size_t distance = lanes.size() / 2; distance > 0; distance /= 2)
      for (size_t lane = 0; lane < distance; ++lane)
        lanes[lane] += lanes[lane + distance];
    sum += lanes[0];
  }
  return sum;
}

template <typename Element>
void quantise_backward(const QuantiseSwigluBwd& call) {
  const int64_t inner = call.h.num_columns;
  MatrixQuantiser grads_quantiser(call.grads), h_quantiser(call.h);
  std::vector<float> grads = values_of_block(2 * inner), h = values_of_block(inner);
  for_each_block(call.zones, [&](const RowBlock& block) {
    for (int64_t i = 0; i < block.num_rows; ++i) {
      const int64_t row = block.first_row + i;
      const auto* const gates = static_cast<const typename Element::Bits*>(call.pre_act) + row * 2 * inner;
      const auto* const grad_h = static_cast<const typename Element::Bits*>(call.grad_h) + row * inner;
      float* const grad_gates = &grads[static_cast<size_t>(i * 2 * inner)];
      const float weight = weight_of(call.recv_weights, row);
      const auto h_of = [&](int64_t f) { return swiglu(Element::load(gates[f]), Element::load(gates[inner + f])); };
      for (int64_t f = 0; f < inner; ++f) {
        const GateUp<float> grad =
            swiglu_bwd(Element::load(gates[f]), Element::load(gates[inner + f]), weight * Element::load(grad_h[f]));
        grad_gates[f] = grad.gate;
        grad_gates[inner + f] = grad.up;
        h[static_cast<size_t>(i * inner + f)] = weight * h_of(f);
      }
      if (call.grad_recv_weights != nullptr) call.grad_recv_weights[row] = dot_by_tiles<Element>(grad_h, h_of, inner);
    }
    grads_quantiser.quantise(block, EPX_FLOAT32, bytes_of(grads));
    h_quantiser.quantise(block, EPX_FLOAT32, bytes_of(h));
  });
}

} // namespace

void quantise(const QuantiseSwiglu& call) {
  const host::DefaultFloatEnvironment environment;
  if (call.dtype == EPX_BFLOAT16)
    quantise_forward<rows::BFloat16>(call);
  else
    quantise_forward<rows::Float32>(call);
}

void quantise(const QuantiseSwigluBwd& call) {
  const host::DefaultFloatEnvironment environment;
  if (call.dtype == EPX_BFLOAT16)
    quantise_backward<rows::BFloat16>(call);
  else
    quantise_backward<rows::Float32>(call);
}

} // namespace epx::moe
