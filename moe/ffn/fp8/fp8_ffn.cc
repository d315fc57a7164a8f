// SPDX-License-Identifier: Apache-2.0
#include "moe/ffn/fp8/fp8_ffn.h"

#include "moe/ffn/workspace.h"
#include "moe/quantise/block.h"

namespace epx::moe {
namespace {

// Of rows between the products, and of all gradients: blocks of any magnitude keep their bits.
constexpr WireFormat kInnerFormat = kBlock128WithoutFloor;

// Hands out the scratch memory of a call, whose products come first: fp8_products_workspace().
class Scratch {
public:
  Scratch(const FfnShape& shape, epx_dtype wide, int64_t num_rows, std::byte* memory)
      : shape_(shape), wide_(wide), num_rows_(num_rows), memory_(memory) {
    memory_.take_for_products(shape, EPX_FLOAT8_E4M3, num_rows);
  }

  Fp8Rows rows(int64_t columns) {
    return {static_cast<uint8_t*>(memory_.take(num_rows_, columns, EPX_FLOAT8_E4M3)),
            floats(num_rows_, columns / kQuantiseBlock), columns};
  }
  Fp8Columns columns(int64_t columns) {
    return {static_cast<uint8_t*>(memory_.take(columns, num_rows_, EPX_FLOAT8_E4M3)),
            floats(num_zone_blocks(num_rows_, shape_.num_experts), columns), columns};
  }
  WideRows wide(int64_t columns) { return {memory_.take(num_rows_, columns, wide_), columns}; }
  float* floats(int64_t rows, int64_t columns) { return static_cast<float*>(memory_.take(rows, columns, EPX_FLOAT32)); }

  size_t bytes() const { return memory_.bytes(); }

private:
  const FfnShape& shape_;
  epx_dtype wide_;
  int64_t num_rows_;
  Workspace memory_;
};

struct Fp8ForwardBuffers {
  Fp8ForwardBuffers(const FfnShape& shape, bool has_pre_act, Scratch& scratch)
      : h(scratch.rows(shape.inner)), pre_act(has_pre_act ? WideRows{} : scratch.wide(shape.pre_act())) {}

  Fp8Rows h;
  WideRows pre_act; // without memory where the caller has it
};

// `outer` is of the tokens, and then of the gradients of expert_out.
struct Fp8BackwardBuffers {
  Fp8BackwardBuffers(const FfnShape& shape, int64_t num_rows, epx_moe_recipe recipe, Scratch& scratch)
      : grad_h(scratch.wide(shape.inner)), grad_pre_act(scratch.rows(shape.pre_act())) {
    if (recipe == EPX_MOE_RECIPE_FP8) {
      grad_pre_act_columns = scratch.columns(shape.pre_act());
      h_columns = scratch.columns(shape.inner);
      outer_columns = scratch.columns(shape.hidden);
      tile_sums = scratch.floats(shape.inner / kQuantiseBlock, num_rows);
    } else {
      wide_grad_pre_act = scratch.wide(shape.pre_act());
      wide_h = scratch.wide(shape.inner);
      wide_outer = scratch.wide(shape.hidden);
    }
  }

  WideRows grad_h;
  Fp8Rows grad_pre_act;
  // Of EPX_MOE_RECIPE_FP8.
  Fp8Columns grad_pre_act_columns{}, h_columns{}, outer_columns{};
  float* tile_sums = nullptr;
  // Of EPX_MOE_RECIPE_FP8_ACTIVATIONS.
  WideRows wide_grad_pre_act{}, wide_h{}, wide_outer{};
};

// A matrix that a quantiser writes.
QuantisedMatrix matrix_of(const RowZones& zones, int64_t columns) {
  QuantisedMatrix matrix{};
  matrix.row_format = kInnerFormat;
  matrix.num_rows = zones.num_rows;
  matrix.num_columns = columns;
  return matrix;
}

ScaleLayout layout_of(const RowZones& zones, int64_t columns) {
  return {EPX_SCALES_ROWS, sizeof(float), columns / kQuantiseBlock, zones.num_rows};
}

void set_rows(QuantisedMatrix& matrix, const RowZones& zones, const Fp8Rows& rows) {
  matrix.row_codes = rows.codes;
  matrix.row_scales = reinterpret_cast<std::byte*>(rows.scales);
  matrix.row_scale_layout = layout_of(zones, rows.columns);
}

void set_columns(QuantisedMatrix& matrix, const Fp8Columns& columns) {
  matrix.column_codes = columns.codes;
  matrix.column_scales = columns.scales;
}

// Quantises the columns of rows in FP8, a second rounding.
void transpose(const Fp8Ops& ops, const Fp8Rows& rows, const Fp8Columns& columns) {
  QuantiseRows call{};
  call.zones = ops.zones();
  call.dtype = EPX_FLOAT8_E4M3;
  call.rows = rows.codes;
  call.scales = rows.scales;
  call.scale_layout = layout_of(call.zones, rows.columns);
  call.matrix = matrix_of(call.zones, rows.columns);
  set_columns(call.matrix, columns);
  ops.quantise(call);
}

// The gradient of pre_act, and the operands of the weights' gradients.
void activate_bwd(const Fp8Backward& call, const Fp8BackwardBuffers& buffers, const Fp8Ops& ops) {
  const RowZones& zones = ops.zones();
  if (call.recipe == EPX_MOE_RECIPE_FP8) {
    QuantiseSwigluBwd activate{};
    activate.zones = zones;
    activate.dtype = ops.wide();
    activate.pre_act = call.pre_act;
    activate.grad_h = buffers.grad_h.data;
    activate.recv_weights = call.recv_weights;
    activate.grads = matrix_of(zones, buffers.grad_pre_act.columns);
    set_rows(activate.grads, zones, buffers.grad_pre_act);
    if (call.grad_gate_up) set_columns(activate.grads, buffers.grad_pre_act_columns);
    activate.h = matrix_of(zones, buffers.h_columns.columns);
    if (call.grad_down) set_columns(activate.h, buffers.h_columns);
    activate.grad_recv_weights = call.grad_recv_weights;
    if (call.grad_recv_weights != nullptr) activate.tile_sums = buffers.tile_sums;
    ops.quantise(activate);
    return;
  }
  ops.activate_bwd({call.pre_act, buffers.grad_h.data, call.recv_weights, buffers.wide_grad_pre_act, buffers.wide_h,
                    call.grad_recv_weights});
  QuantiseRows quantise{};
  quantise.zones = zones;
  quantise.dtype = ops.wide();
  quantise.rows = buffers.wide_grad_pre_act.data;
  quantise.matrix = matrix_of(zones, buffers.grad_pre_act.columns);
  set_rows(quantise.matrix, zones, buffers.grad_pre_act);
  ops.quantise(quantise);
}

void weight_gradients(const Fp8Backward& call, const Fp8BackwardBuffers& buffers, const Fp8Ops& ops) {
  if (call.recipe == EPX_MOE_RECIPE_FP8) {
    if (call.grad_gate_up) {
      transpose(ops, call.tokens, buffers.outer_columns);
      ops.weight_gradient(buffers.grad_pre_act_columns, buffers.outer_columns, call.grad_gate_up, call.accumulate);
    }
    if (call.grad_down) {
      transpose(ops, call.grad_expert_out, buffers.outer_columns);
      ops.weight_gradient(buffers.outer_columns, buffers.h_columns, call.grad_down, call.accumulate);
    }
    return;
  }
  if (call.grad_gate_up) {
    ops.dequantise(call.tokens, buffers.wide_outer);
    ops.weight_gradient(buffers.wide_grad_pre_act, buffers.wide_outer, call.grad_gate_up, call.accumulate);
  }
  if (call.grad_down) {
    ops.dequantise(call.grad_expert_out, buffers.wide_outer);
    ops.weight_gradient(buffers.wide_outer, buffers.wide_h, call.grad_down, call.accumulate);
  }
}

} // namespace

size_t fp8_fwd_bytes(const FfnShape& shape, epx_dtype wide, int64_t num_rows, bool has_pre_act) {
  Scratch scratch(shape, wide, num_rows, nullptr);
  const Fp8ForwardBuffers buffers(shape, has_pre_act, scratch);
  return scratch.bytes();
}

size_t fp8_bwd_bytes(const FfnShape& shape, epx_dtype wide, int64_t num_rows, epx_moe_recipe recipe) {
  Scratch scratch(shape, wide, num_rows, nullptr);
  const Fp8BackwardBuffers buffers(shape, num_rows, recipe, scratch);
  return scratch.bytes();
}

void* fp8_products_workspace(const FfnShape& shape, int64_t num_rows, std::byte* scratch) {
  return Workspace(scratch).take_for_products(shape, EPX_FLOAT8_E4M3, num_rows);
}

void run(const FfnShape& shape, const Fp8Forward& call, const Fp8Ops& ops, std::byte* memory) {
  const RowZones& zones = ops.zones();
  Scratch scratch(shape, ops.wide(), zones.num_rows, memory);
  const Fp8ForwardBuffers buffers(shape, call.pre_act != nullptr, scratch);
  void* const pre_act = call.pre_act != nullptr ? call.pre_act : buffers.pre_act.data;
  ops.multiply(call.tokens, call.gate_up, {pre_act, shape.pre_act()});
  if (call.expert_out == nullptr) return;
  QuantiseSwiglu activate{};
  activate.zones = zones;
  activate.dtype = ops.wide();
  activate.pre_act = pre_act;
  activate.recv_weights = call.recv_weights;
  activate.h = matrix_of(zones, shape.inner);
  set_rows(activate.h, zones, buffers.h);
  ops.quantise(activate);
  ops.multiply(buffers.h, call.down, {call.expert_out, shape.hidden});
}

void run(const FfnShape& shape, const Fp8Backward& call, const Fp8Ops& ops, std::byte* memory) {
  const int64_t num_rows = ops.zones().num_rows;
  Scratch scratch(shape, ops.wide(), num_rows, memory);
  const Fp8BackwardBuffers buffers(shape, num_rows, call.recipe, scratch);
  ops.multiply(call.grad_expert_out, call.down_transposed, buffers.grad_h);
  activate_bwd(call, buffers, ops);
  ops.multiply(buffers.grad_pre_act, call.gate_up_transposed, {call.grad_recv, shape.hidden});
  weight_gradients(call, buffers, ops);
}

} // namespace epx::moe
