// SPDX-License-Identifier: Apache-2.0
// The MoE block of epx_moe.h as operators of PyTorch. A forward whose backward is to follow takes a flight, which a tensor on
// the host names: [index, generation]. The flight is free again when that tensor dies, so autograd's saving it for the backward
// is what keeps it.
#include <array>
#include <memory>
#include <tuple>
#include <utility>

#include <torch/csrc/stable/ops.h>

#include <epx/epx_moe.h>

#include "failure.h"
#include "on_device.h"
#include "registry.h"
#include "row_major.h"
#include "tensors.h"

namespace epx_torch {
namespace {

using std::optional;
using std::tuple;

constexpr auto kLogitsDtypes = {ScalarType::Float, ScalarType::BFloat16};
constexpr auto kFloat = {ScalarType::Float};
constexpr int64_t kNumInfo = 3;
constexpr int64_t kTicketSize = 2;

ScalarType type_of(epx_dtype dtype) {
  if (dtype == EPX_BFLOAT16) return ScalarType::BFloat16;
  return dtype == EPX_FLOAT16 ? ScalarType::Half : ScalarType::Float;
}

// The ticket lies in the tensor's memory, and the deleter of that memory releases the flight.
Tensor make_flight_tensor(const std::shared_ptr<Block>& block, const Flights::Ticket& ticket) {
  static_assert(sizeof(Flights::Ticket) == kTicketSize * sizeof(int64_t));
  auto* const memory = new Flights::Ticket(ticket);
  block->num_in_flight.fetch_add(1);
  const std::array<int64_t, 1> sizes = {kTicketSize}, strides = {1};
  return torch::stable::from_blob(memory, {sizes.data(), 1}, {strides.data(), 1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Long,
                                  [block](void* data) {
                                    const std::unique_ptr<Flights::Ticket> owned(static_cast<Flights::Ticket*>(data));
                                    block->flights->release(*owned);
                                    block->num_in_flight.fetch_sub(1);
                                  });
}

// The parameters of a block or their gradients: gate and up stacked where the block has a gate.
struct Params {
  epx_tensor first, down, first_bias, down_bias;
  epx_moe_ffn_params c = {};

  void point(bool has_gate, bool has_first_bias, bool has_down_bias) {
    c.struct_size = sizeof(c);
    (has_gate ? c.gate_up_weight : c.up_weight) = &first;
    c.down_weight = &down;
    if (has_first_bias) (has_gate ? c.gate_up_bias : c.up_bias) = &first_bias;
    if (has_down_bias) c.down_bias = &down_bias;
  }
};

void view_params(Params& params, const Block& block, const Tensor& first, const Tensor& down,
                 const optional<Tensor>& first_bias, const optional<Tensor>& down_bias) {
  const Place& place = block.group->place;
  const auto dtypes = {type_of(block.dtype)};
  const int64_t local = block.group->info.num_local_experts;
  params.first = view("first_weight", first, place, {local, kAnySize, block.hidden_dim}, dtypes);
  params.down = view("down_weight", down, place, {local, block.hidden_dim, kAnySize}, dtypes);
  if (first_bias) params.first_bias = view("first_bias", *first_bias, place, {local, params.first.sizes[1]}, dtypes);
  if (down_bias) params.down_bias = view("down_bias", *down_bias, place, {local, block.hidden_dim}, dtypes);
  params.point(block.has_gate, first_bias.has_value(), down_bias.has_value());
}

// Weights of a block with a recipe in FP8, as far as a call looks at them. The library checks their sizes.
class Fp8Params {
public:
  explicit Fp8Params(const Place& place) : place_(place) { c.struct_size = sizeof(c); }
  Fp8Params(const Fp8Params&) = delete;
  Fp8Params& operator=(const Fp8Params&) = delete;

  // Views for members of `c`.
  const epx_tensor* codes(const char* name, const Tensor& tensor) { return add(name, tensor, ScalarType::Float8_e4m3fn); }
  const epx_tensor* scales(const char* name, const Tensor& tensor) { return add(name, tensor, ScalarType::Float); }

  epx_moe_fp8_params c = {};

private:
  const epx_tensor* add(const char* name, const Tensor& tensor, ScalarType dtype) {
    epx_tensor& added = views_[num_views_++];
    added = view(name, tensor, place_, {kAnySize, kAnySize, kAnySize}, {dtype});
    return &added;
  }

  Place place_;
  std::array<epx_tensor, 8> views_ = {};
  size_t num_views_ = 0;
};

using Outputs = tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// `set_params` gives the args their parameters.
template <typename SetParams>
Outputs run_forward(const std::shared_ptr<Block>& block, const Tensor& tokens, const Tensor& logits,
                    const optional<Tensor>& selection_bias, const optional<Tensor>& token_mask, bool keeps_flight,
                    const SetParams& set_params) {
  const GroupUse group(block->group);
  const Place& place = group->place;
  const epx_group_info& info = group->info;
  const OnDevice on_device(place);
  const epx_tensor tokens_view = view("tokens", tokens, place, {kAnySize, block->hidden_dim}, {type_of(block->dtype)});
  const int64_t num_tokens = tokens_view.sizes[0];
  const epx_tensor logits_view = view("logits", logits, place, {num_tokens, info.num_experts}, kLogitsDtypes);
  epx_moe_block_fwd_args args = {};
  args.struct_size = sizeof(args);
  const epx_moe_cuda cuda = make_cuda(place);
  if (place.is_cuda) args.cuda = &cuda;
  args.tokens = &tokens_view;
  args.logits = &logits_view;
  set_params(args);
  epx_tensor bias_view, mask_view;
  if (selection_bias) {
    bias_view = view("selection_bias", *selection_bias, place, {info.num_experts}, kFloat);
    args.selection_bias = &bias_view;
  }
  if (token_mask) {
    mask_view = view("token_mask", *token_mask, place, {num_tokens}, {ScalarType::Byte});
    args.token_mask = &mask_view;
  }
  const Tensor out = new_tensor(place, {num_tokens, block->hidden_dim}, type_of(block->dtype)),
               topk_idx = new_tensor(place, {num_tokens, block->router.top_k}, ScalarType::Int),
               topk_weights = new_tensor(place, {num_tokens, block->router.top_k}, ScalarType::Float),
               global_counts = new_tensor(place, {info.num_ranks, info.num_experts}, ScalarType::Long),
               call_info = new_tensor(place, {kNumInfo}, ScalarType::Long);
  const epx_tensor out_view = view_of_new(out), idx_view = view_of_new(topk_idx), weights_view = view_of_new(topk_weights),
                   counts_view = view_of_new(global_counts), info_view = view_of_new(call_info);
  args.out = &out_view;
  args.topk_idx = &idx_view;
  args.topk_weights = &weights_view;
  args.global_counts = &counts_view;
  args.info = &info_view;
  const Flights::Ticket ticket = block->flights->take();
  args.flight = static_cast<int32_t>(ticket.index);
  const epx_status status = epx_moe_block_fwd(block->block, &args);
  if (status != EPX_SUCCESS || !keeps_flight) block->flights->release(ticket);
  throw_if_failed(status);
  const Tensor flight = keeps_flight ? make_flight_tensor(block, ticket) : new_host_tensor({kTicketSize}, ScalarType::Long);
  return {out, topk_idx, topk_weights, global_counts, call_info, flight};
}

Outputs block_fwd(int64_t id, const Tensor& tokens, const Tensor& logits, const optional<Tensor>& selection_bias,
                  const optional<Tensor>& token_mask, const Tensor& first_weight, const Tensor& down_weight,
                  const optional<Tensor>& first_bias, const optional<Tensor>& down_bias, bool keeps_flight) {
  const std::shared_ptr<Block> block = find_block(id);
  Params params;
  return run_forward(block, tokens, logits, selection_bias, token_mask, keeps_flight, [&](epx_moe_block_fwd_args& args) {
    view_params(params, *block, first_weight, down_weight, first_bias, down_bias);
    args.params = &params.c;
  });
}

Outputs block_fwd_fp8(int64_t id, const Tensor& tokens, const Tensor& logits, const optional<Tensor>& selection_bias,
                      const optional<Tensor>& token_mask, const Tensor& gate_up_codes, const Tensor& gate_up_scales,
                      const Tensor& down_codes, const Tensor& down_scales, bool keeps_flight) {
  const std::shared_ptr<Block> block = find_block(id);
  Fp8Params params(block->group->place);
  return run_forward(block, tokens, logits, selection_bias, token_mask, keeps_flight, [&](epx_moe_block_fwd_args& args) {
    params.c.gate_up_codes = params.codes("gate_up_codes", gate_up_codes);
    params.c.gate_up_scales = params.scales("gate_up_scales", gate_up_scales);
    params.c.down_codes = params.codes("down_codes", down_codes);
    params.c.down_scales = params.scales("down_scales", down_scales);
    args.fp8_params = &params.c;
  });
}

// A backward, which begins when the object is made.
class Backward {
public:
  Backward(std::shared_ptr<Block> block, const Tensor& flight, const Tensor& grad_out, const Tensor& logits)
      : block_(std::move(block)), group_(block_->group), on_device_(group_->place) {
    const epx_tensor flight_view = view("flight", flight, Place(), {kTicketSize}, {ScalarType::Long});
    const auto* const ticket = static_cast<const int64_t*>(flight_view.data);
    block_->flights->verify({ticket[0], ticket[1]});
    flight_ = static_cast<int32_t>(ticket[0]);
    grad_out_ = view("grad_out", grad_out, place(), {kAnySize, block_->hidden_dim}, {dtype()});
    grad_tokens = new_tensor(place(), {grad_out_.sizes[0], block_->hidden_dim}, dtype());
    grad_logits = new_tensor(place(), {grad_out_.sizes[0], group_->info.num_experts}, logits.scalar_type());
  }
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;

  const Place& place() const { return group_->place; }
  ScalarType dtype() const { return type_of(block_->dtype); }

  // `args` have the parameters and their gradients.
  void run(epx_moe_block_bwd_args& args, double aux_loss_grad) const {
    const epx_tensor grad_tokens_view = view_of_new(grad_tokens), grad_logits_view = view_of_new(grad_logits);
    args.struct_size = sizeof(args);
    const epx_moe_cuda cuda = make_cuda(place());
    if (place().is_cuda) args.cuda = &cuda;
    args.flight = flight_;
    args.grad_out = &grad_out_;
    args.aux_loss_grad = aux_loss_grad;
    args.grad_tokens = &grad_tokens_view;
    args.grad_logits = &grad_logits_view;
    throw_if_failed(epx_moe_block_bwd(block_->block, &args));
  }

  Tensor grad_tokens, grad_logits;

private:
  std::shared_ptr<Block> block_;
  GroupUse group_;
  OnDevice on_device_;
  int32_t flight_ = 0;
  epx_tensor grad_out_ = {};
};

Outputs block_bwd(int64_t id, const Tensor& flight, const Tensor& grad_out, const Tensor& logits,
                  const Tensor& first_weight, const Tensor& down_weight, const optional<Tensor>& first_bias,
                  const optional<Tensor>& down_bias, double aux_loss_grad) {
  const std::shared_ptr<Block> block = find_block(id);
  const Backward backward(block, flight, grad_out, logits);
  Params params, grads;
  view_params(params, *block, first_weight, down_weight, first_bias, down_bias);
  const Place& place = backward.place();
  const ScalarType dtype = backward.dtype();
  const auto new_like = [&](const epx_tensor& of) {
    return of.ndim == 3 ? new_tensor(place, {of.sizes[0], of.sizes[1], of.sizes[2]}, dtype)
                        : new_tensor(place, {of.sizes[0], of.sizes[1]}, dtype);
  };
  const auto nothing = [&] { return new_tensor(place, {0}, dtype); };
  const Tensor grad_first = new_like(params.first), grad_down = new_like(params.down),
               grad_first_bias = first_bias ? new_like(params.first_bias) : nothing(),
               grad_down_bias = down_bias ? new_like(params.down_bias) : nothing();
  grads.first = view_of_new(grad_first);
  grads.down = view_of_new(grad_down);
  if (first_bias) grads.first_bias = view_of_new(grad_first_bias);
  if (down_bias) grads.down_bias = view_of_new(grad_down_bias);
  grads.point(block->has_gate, first_bias.has_value(), down_bias.has_value());
  epx_moe_block_bwd_args args = {};
  args.params = &params.c;
  args.grads = &grads.c;
  backward.run(args, aux_loss_grad);
  return {backward.grad_tokens, backward.grad_logits, grad_first, grad_down, grad_first_bias, grad_down_bias};
}

// gate_up_codes and gate_up_scales are for a block that recomputes.
tuple<Tensor, Tensor, Tensor, Tensor> block_bwd_fp8(
    int64_t id, const Tensor& flight, const Tensor& grad_out, const Tensor& logits, const optional<Tensor>& gate_up_codes,
    const optional<Tensor>& gate_up_scales, const Tensor& gate_up_transposed_codes, const Tensor& gate_up_transposed_scales,
    const Tensor& down_transposed_codes, const Tensor& down_transposed_scales, bool float_grads, double aux_loss_grad) {
  const std::shared_ptr<Block> block = find_block(id);
  const Backward backward(block, flight, grad_out, logits);
  const Place& place = backward.place();
  Fp8Params params(place);
  if (gate_up_codes) params.c.gate_up_codes = params.codes("gate_up_codes", *gate_up_codes);
  if (gate_up_scales) params.c.gate_up_scales = params.scales("gate_up_scales", *gate_up_scales);
  params.c.gate_up_transposed_codes = params.codes("gate_up_transposed_codes", gate_up_transposed_codes);
  params.c.gate_up_transposed_scales = params.scales("gate_up_transposed_scales", gate_up_transposed_scales);
  params.c.down_transposed_codes = params.codes("down_transposed_codes", down_transposed_codes);
  params.c.down_transposed_scales = params.scales("down_transposed_scales", down_transposed_scales);
  const ScalarType dtype = float_grads ? ScalarType::Float : backward.dtype();
  const auto new_transposed = [&](const Tensor& of) { // of those of transposed weights
    return new_tensor(place, {of.size(0), of.size(2), of.size(1)}, dtype);
  };
  const Tensor grad_first = new_transposed(gate_up_transposed_codes), grad_down = new_transposed(down_transposed_codes);
  const epx_tensor first_view = view_of_new(grad_first), down_view = view_of_new(grad_down);
  epx_moe_ffn_params grads = {};
  grads.struct_size = sizeof(grads);
  grads.gate_up_weight = &first_view;
  grads.down_weight = &down_view;
  epx_moe_block_bwd_args args = {};
  args.fp8_params = &params.c;
  args.grads = &grads;
  backward.run(args, aux_loss_grad);
  return {backward.grad_tokens, backward.grad_logits, grad_first, grad_down};
}

} // namespace
} // namespace epx_torch

STABLE_TORCH_LIBRARY_FRAGMENT(epx, library) {
  library.def(
      "block_fwd(int block, Tensor tokens, Tensor logits, Tensor? selection_bias, Tensor? token_mask, Tensor first_weight, "
      "Tensor down_weight, Tensor? first_bias, Tensor? down_bias, bool keeps_flight) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "block_bwd(int block, Tensor flight, Tensor grad_out, Tensor logits, Tensor first_weight, Tensor down_weight, "
      "Tensor? first_bias, Tensor? down_bias, float aux_loss_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("block_fwd_fp8(int block, Tensor tokens, Tensor logits, Tensor? selection_bias, Tensor? token_mask, "
              "Tensor gate_up_codes, Tensor gate_up_scales, Tensor down_codes, Tensor down_scales, bool keeps_flight) "
              "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("block_bwd_fp8(int block, Tensor flight, Tensor grad_out, Tensor logits, Tensor? gate_up_codes, "
              "Tensor? gate_up_scales, Tensor gate_up_transposed_codes, Tensor gate_up_transposed_scales, "
              "Tensor down_transposed_codes, Tensor down_transposed_scales, bool float_grads, float aux_loss_grad) "
              "-> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(epx, CompositeExplicitAutograd, library) {
  library.impl("block_fwd", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::block_fwd>::call));
  library.impl("block_bwd", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::block_bwd>::call));
  library.impl("block_fwd_fp8", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::block_fwd_fp8>::call));
  library.impl("block_bwd_fp8", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::block_bwd_fp8>::call));
}
