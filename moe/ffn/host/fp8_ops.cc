// SPDX-License-Identifier: Apache-2.0
#include "moe/ffn/host/fp8_ops.h"

#include <algorithm>
#include <memory>

#include "moe/ffn/activation.h"
#include "moe/ffn/host/gemm/gemm.h"
#include "moe/ffn/host/tiles.h"
#include "moe/quantise/dequantise.h"
#include "moe/quantise/host/row_blocks.h"

namespace epx::moe {
namespace {

// Rows of float32 that a product reads. Pages of pads are never touched.
class FloatRows {
public:
  FloatRows(int64_t rows, int64_t columns)
      : values_(std::make_unique_for_overwrite<float[]>(static_cast<size_t>(rows * columns))), columns_(columns) {}

  float* data() const { return values_.get(); }
  WideRows wide() const { return {values_.get(), columns_}; }

private:
  std::unique_ptr<float[]> values_;
  int64_t columns_;
};

Zones zones_of(const RowZones& zones) {
  return {zones.counts, zones.offsets};
}

// One zone of all rows.
RowZones all_rows(int64_t num_rows) {
  return {num_rows, false, 1, Integers(), Integers()};
}

// Dequantises one expert's weight, [n, k]. A scale is of 128 rows.
void dequantise_weight(const Fp8Weights& weight, int expert, int64_t n, int64_t k, float* values) {
  const int64_t row_blocks = n / kQuantiseBlock, blocks = k / kQuantiseBlock;
  const uint8_t* const codes = weight.codes + expert * n * k;
  const float* const scales = weight.scales + expert * row_blocks * blocks;
  std::vector<float> row_scales(static_cast<size_t>(kQuantiseBlock * blocks));
  for (int64_t block = 0; block < row_blocks; ++block) {
    for (int64_t row = 0; row < kQuantiseBlock; ++row)
      std::copy_n(scales + block * blocks, blocks, row_scales.begin() + row * blocks);
    const int64_t first = block * kQuantiseBlock * k;
    dequantise(DequantiseRows{all_rows(kQuantiseBlock), k, codes + first, row_scales.data(), EPX_FLOAT32, values + first});
  }
}

// Dequantises columns, to rows. An element of a column block is that of a row with its scale.
void dequantise_columns(const Fp8Columns& columns, const RowZones& zones, float* rows) {
  for_each_block(zones, [&](const RowBlock& block) {
    float values[kQuantiseBlock];
    uint8_t codes[kQuantiseBlock] = {};
    for (int64_t column = 0; column < columns.columns; ++column) {
      std::copy_n(columns.codes + column * zones.num_rows + block.first_row, block.num_rows, codes);
      const float scale = columns.scales[block.index * columns.columns + column];
      dequantise(DequantiseRows{all_rows(1), kQuantiseBlock, codes, &scale, EPX_FLOAT32, values});
      for (int64_t i = 0; i < block.num_rows; ++i)
        rows[(block.first_row + i) * columns.columns + column] = values[i];
    }
  });
}

} // namespace

void HostFp8Ops::multiply(const Fp8Rows& a, const Fp8Weights& b, const WideRows& d) const {
  const int64_t n = d.columns, k = a.columns;
  const FloatRows rows(zones_.num_rows, k);
  dequantise(a, rows.wide());
  const FloatRows weight(n, k);
  TileBuffer<float> x(k), y(n);
  const Zones zones = zones_of(zones_);
  TileScheduler scheduler(zones, zones_.num_zones);
  int expert = -1;
  for (Tile tile; scheduler.next(tile);) {
    if (tile.expert != expert) dequantise_weight(b, expert = tile.expert, n, k, weight.data());
    y.clear();
    gemm<float>().add_a_bt(full_tile(tile, rows.data(), k, x), weight.data(), y.data(), n, k);
    y.store(tile, static_cast<float*>(d.data), n);
  }
}

void HostFp8Ops::weight_gradient(const Fp8Columns& a, const Fp8Columns& b, const ParamTensor& grad, bool accumulate) const {
  const FloatRows a_rows(zones_.num_rows, a.columns), b_rows(zones_.num_rows, b.columns);
  dequantise_columns(a, zones_, a_rows.data());
  dequantise_columns(b, zones_, b_rows.data());
  weight_gradient(a_rows.wide(), b_rows.wide(), grad, accumulate);
}

void HostFp8Ops::weight_gradient(const WideRows& a, const WideRows& b, const ParamTensor& grad, bool accumulate) const {
  for (int expert = 0; expert < zones_.num_zones && !accumulate; ++expert)
    std::fill_n(grad.of<float>(expert), a.columns * b.columns, 0.0f);
  TileBuffer<float> a_tile(a.columns), b_tile(b.columns);
  const Zones zones = zones_of(zones_);
  TileScheduler scheduler(zones, zones_.num_zones);
  for (Tile tile; scheduler.next(tile);)
    gemm<float>().add_at_b(full_tile(tile, static_cast<const float*>(a.data), a.columns, a_tile),
                           full_tile(tile, static_cast<const float*>(b.data), b.columns, b_tile),
                           grad.of<float>(tile.expert), a.columns, b.columns);
}

void HostFp8Ops::dequantise(const Fp8Rows& rows, const WideRows& wide) const {
  epx::moe::dequantise(DequantiseRows{zones_, rows.columns, rows.codes, rows.scales, EPX_FLOAT32, wide.data});
}

void HostFp8Ops::activate_bwd(const WideSwigluBwd& call) const {
  const int64_t inner = call.h.columns;
  for_each_block(zones_, [&](const RowBlock& block) {
    for (int64_t row = block.first_row; row < block.first_row + block.num_rows; ++row) {
      const auto* const gates = static_cast<const float*>(call.pre_act) + row * 2 * inner;
      const auto* const grad_h = static_cast<const float*>(call.grad_h) + row * inner;
      auto* const grad_gates = static_cast<float*>(call.grad_pre_act.data) + row * 2 * inner;
      auto* const weighted_h = static_cast<float*>(call.h.data) + row * inner;
      const float weight = call.recv_weights != nullptr ? call.recv_weights[row] : 1.0f;
      float grad_weight = 0;
      for (int64_t f = 0; f < inner; ++f) {
        const float h = swiglu(gates[f], gates[inner + f]);
        const GateUp<float> grad = swiglu_bwd(gates[f], gates[inner + f], weight * grad_h[f]);
        grad_gates[f] = grad.gate;
        grad_gates[inner + f] = grad.up;
        weighted_h[f] = weight * h;
        grad_weight += grad_h[f] * h;
      }
      if (call.grad_recv_weights != nullptr) call.grad_recv_weights[row] = grad_weight;
    }
  });
}

} // namespace epx::moe
