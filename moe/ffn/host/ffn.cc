// SPDX-License-Identifier: Apache-2.0
// Works on tiles of kTileRows rows of one expert; the last tile of a zone is filled up with zero rows in scratch memory. Each
// product so has the same shape whatever the number of rows, which is what makes a row's result independent of the others.
#include "moe/ffn/ffn.h"

#include <algorithm>

#include "moe/ffn/activation.h"
#include "moe/ffn/host/gemm/gemm.h"
#include "moe/ffn/host/tiles.h"

namespace epx::moe {
namespace {

template <typename T>
void activate(const FfnShape& shape, const Tile& tile, TileBuffer<T>& gate, TileBuffer<T>& up, TileBuffer<T>& inner) {
  inner.clear(); // rows beyond the tile's stay zero
  for (int64_t r = 0; r < tile.num_rows; ++r)
    for (int64_t i = 0; i < shape.inner; ++i)
      inner.row(r)[i] = shape.has_gate() ? swiglu(gate.row(r)[i], up.row(r)[i]) : ungated(shape.activation, up.row(r)[i]);
}

// grad_inner becomes the gradient of up, and grad_gate that of the gate.
template <typename T>
void activate_bwd(const FfnShape& shape, const Tile& tile, TileBuffer<T>& gate, TileBuffer<T>& up, TileBuffer<T>& grad_gate,
                  TileBuffer<T>& grad_inner) {
  if (shape.has_gate()) grad_gate.clear();
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    for (int64_t i = 0; i < shape.inner; ++i) {
      T& grad = grad_inner.row(r)[i];
      if (shape.has_gate()) {
        const GateUp<T> grads = swiglu_bwd(gate.row(r)[i], up.row(r)[i], grad);
        grad_gate.row(r)[i] = grads.gate;
        grad = grads.up;
      } else {
        grad = ungated_bwd(shape.activation, up.row(r)[i], grad);
      }
    }
  }
}

template <typename T>
T dot(const T* a, const T* b, int64_t size) {
  T sum = 0;
  for (int64_t i = 0; i < size; ++i)
    sum += a[i] * b[i];
  return sum;
}

template <typename T>
void clear_grads(const FfnShape& shape, const ParamTensors& grads) {
  const auto clear = [&](const ParamTensor& grad, int64_t size) {
    for (int e = 0; grad && e < shape.num_experts; ++e)
      std::fill_n(grad.of<T>(e), size, T{0});
  };
  clear(grads.gate, shape.inner * shape.hidden);
  clear(grads.up, shape.inner * shape.hidden);
  clear(grads.down, shape.hidden * shape.inner);
  clear(grads.gate_bias, shape.inner);
  clear(grads.up_bias, shape.inner);
  clear(grads.down_bias, shape.hidden);
}

} // namespace

template <typename T>
void ffn_fwd(const FfnShape& shape, const ParamTensors& params, const Zones& zones, const epx_moe_ffn_args& args) {
  const T* const recv_tokens = data_of<T>(args.recv_tokens);
  const T* const recv_weights = data_of<T>(args.recv_weights);
  T* const expert_out = data_of<T>(args.expert_out);
  T* const pre_act = data_of<T>(args.pre_act);
  const GemmKernels<T>& product = gemm<T>();
  TileBuffer<T> x(shape.hidden), gate(shape.has_gate() ? shape.inner : 0), up(shape.inner), inner(shape.inner),
      y(shape.hidden);
  TileScheduler scheduler(zones, shape.num_experts);
  for (Tile tile; scheduler.next(tile);) {
    const int e = tile.expert;
    const T* const tokens = full_tile(tile, recv_tokens, shape.hidden, x);
    if (shape.has_gate()) {
      gate.fill(params.gate_bias.of<T>(e));
      product.add_a_bt(tokens, params.gate.of<T>(e), gate.data(), shape.inner, shape.hidden);
    }
    up.fill(params.up_bias.of<T>(e));
    product.add_a_bt(tokens, params.up.of<T>(e), up.data(), shape.inner, shape.hidden);
    if (pre_act != nullptr) {
      if (shape.has_gate()) gate.store(tile, pre_act, shape.pre_act());
      up.store(tile, pre_act + shape.pre_act() - shape.inner, shape.pre_act());
    }
    if (expert_out == nullptr) continue;

    activate(shape, tile, gate, up, inner);
    y.fill(params.down_bias.of<T>(e));
    if (recv_weights != nullptr) {
      inner.scale_rows(tile, recv_weights);
      y.scale_rows(tile, recv_weights);
    }
    product.add_a_bt(inner.data(), params.down.of<T>(e), y.data(), shape.hidden, shape.inner);
    y.store(tile, expert_out, shape.hidden);
  }
}

template <typename T>
void ffn_bwd(const FfnShape& shape, const ParamTensors& params, const ParamTensors& grads, const Zones& zones,
             const epx_moe_ffn_bwd_args& args) {
  const T* const recv_tokens = data_of<T>(args.recv_tokens);
  const T* const recv_weights = data_of<T>(args.recv_weights);
  const T* const pre_act = data_of<T>(args.pre_act);
  T* const grad_recv_weights = data_of<T>(args.grad_recv_weights);
  const GemmKernels<T>& product = gemm<T>();
  const int64_t hidden = shape.hidden;
  const int64_t inner_size = shape.inner;
  const int64_t gate_size = shape.has_gate() ? inner_size : 0;
  TileBuffer<T> x(hidden), gate(gate_size), up(inner_size), inner(inner_size);
  TileBuffer<T> grad_y(hidden), grad_gate(gate_size), grad_inner(inner_size), grad_x(hidden);
  if (args.accumulate == 0) clear_grads<T>(shape, grads);

  TileScheduler scheduler(zones, shape.num_experts);
  for (Tile tile; scheduler.next(tile);) {
    const int e = tile.expert;
    const T* const tokens = full_tile(tile, recv_tokens, hidden, x);
    grad_y.load(tile, data_of<T>(args.grad_expert_out), hidden);
    if (shape.has_gate()) gate.load(tile, pre_act, shape.pre_act());
    up.load(tile, pre_act + gate_size, shape.pre_act());
    activate(shape, tile, gate, up, inner);

    // Through the down projection; its weight gradient sees the weighted activations, or the weighted gradient.
    grad_inner.clear();
    product.add_a_b(grad_y.data(), params.down.of<T>(e), grad_inner.data(), inner_size, hidden);
    if (grad_recv_weights != nullptr) {
      for (int64_t r = 0; r < tile.num_rows; ++r) {
        T& grad = grad_recv_weights[tile.first_row + r];
        grad = dot(grad_inner.row(r), inner.row(r), inner_size);
        if (params.down_bias) grad += dot(grad_y.row(r), params.down_bias.of<T>(e), hidden);
      }
    }
    if (recv_weights != nullptr) {
      grad_inner.scale_rows(tile, recv_weights);
      grad_y.scale_rows(tile, recv_weights);
    }
    if (grads.down) product.add_at_b(grad_y.data(), inner.data(), grads.down.of<T>(e), hidden, inner_size);
    if (grads.down_bias) grad_y.add_rows_to(tile, grads.down_bias.of<T>(e));

    // Through the activation, gate and up.
    activate_bwd(shape, tile, gate, up, grad_gate, grad_inner);
    grad_x.clear();
    if (shape.has_gate()) {
      product.add_a_b(grad_gate.data(), params.gate.of<T>(e), grad_x.data(), hidden, inner_size);
      if (grads.gate) product.add_at_b(grad_gate.data(), tokens, grads.gate.of<T>(e), inner_size, hidden);
      if (grads.gate_bias) grad_gate.add_rows_to(tile, grads.gate_bias.of<T>(e));
    }
    product.add_a_b(grad_inner.data(), params.up.of<T>(e), grad_x.data(), hidden, inner_size);
    if (grads.up) product.add_at_b(grad_inner.data(), tokens, grads.up.of<T>(e), inner_size, hidden);
    if (grads.up_bias) grad_inner.add_rows_to(tile, grads.up_bias.of<T>(e));
    grad_x.store(tile, data_of<T>(args.grad_recv), hidden);
  }
}

template void ffn_fwd<float>(const FfnShape&, const ParamTensors&, const Zones&, const epx_moe_ffn_args&);
template void ffn_fwd<double>(const FfnShape&, const ParamTensors&, const Zones&, const epx_moe_ffn_args&);
template void ffn_bwd<float>(const FfnShape&, const ParamTensors&, const ParamTensors&, const Zones&,
                             const epx_moe_ffn_bwd_args&);
template void ffn_bwd<double>(const FfnShape&, const ParamTensors&, const ParamTensors&, const Zones&,
                              const epx_moe_ffn_bwd_args&);

} // namespace epx::moe
