// SPDX-License-Identifier: Apache-2.0
// What balances the load of experts, as operators of PyTorch: the load-balance loss, and the update of the selection bias. Both
// are local.
#include <torch/csrc/stable/ops.h>

#include <epx/epx_moe.h>

#include "failure.h"
#include "on_device.h"
#include "registry.h"
#include "row_major.h"
#include "tensors.h"

namespace epx_torch {
namespace {

constexpr auto kLogitsDtypes = {ScalarType::Float, ScalarType::BFloat16};
constexpr auto kIntegers = {ScalarType::Int, ScalarType::Long};

Tensor aux_loss(int64_t id, const Tensor& logits, const Tensor& topk_idx, const Tensor& global_counts) {
  const std::shared_ptr<Block> block = find_block(id);
  const Place& place = block->group->place;
  const OnDevice on_device(place);
  const epx_tensor logits_view = view("logits", logits, place, {kAnySize, block->router.num_experts}, kLogitsDtypes),
                   idx_view = view("topk_idx", topk_idx, place, {logits_view.sizes[0], block->router.top_k}, kIntegers),
                   counts_view =
                       view("global_counts", global_counts, place, {kAnySize, block->router.num_experts}, kIntegers);
  Tensor loss = new_tensor(place, {1}, ScalarType::Double);
  const epx_tensor loss_view = view_of_new(loss);
  epx_moe_aux_loss_args args = {};
  args.struct_size = sizeof(args);
  args.logits = &logits_view;
  args.topk_idx = &idx_view;
  args.global_counts = &counts_view;
  args.loss = &loss_view;
  if (!place.is_cuda) {
    throw_if_failed(epx_moe_aux_loss(&block->router, &args));
    return loss;
  }
  epx_moe_cuda cuda = make_cuda(place);
  throw_if_failed(epx_moe_aux_loss_workspace(&block->router, &args, &cuda.workspace_bytes));
  const Tensor workspace = new_tensor(place, {static_cast<int64_t>(cuda.workspace_bytes)}, ScalarType::Byte);
  cuda.workspace = workspace.data_ptr();
  args.cuda = &cuda;
  throw_if_failed(epx_moe_aux_loss(&block->router, &args));
  return loss;
}

void update_selection_bias(int64_t id, const Tensor& global_counts, double rate, const Tensor& selection_bias) {
  const std::shared_ptr<Block> block = find_block(id);
  const Place& place = block->group->place;
  const OnDevice on_device(place);
  const int64_t num_experts = block->router.num_experts;
  const epx_tensor counts_view = view("global_counts", global_counts, place, {kAnySize, num_experts}, kIntegers),
                   bias_view = view("selection_bias", selection_bias, place, {num_experts}, {ScalarType::Float});
  epx_moe_bias_update_args args = {};
  args.struct_size = sizeof(args);
  const epx_moe_cuda cuda = make_cuda(place);
  if (place.is_cuda) args.cuda = &cuda;
  args.global_counts = &counts_view;
  args.rate = rate;
  args.selection_bias = &bias_view;
  throw_if_failed(epx_moe_bias_update(&args));
}

} // namespace
} // namespace epx_torch

STABLE_TORCH_LIBRARY_FRAGMENT(epx, library) {
  library.def("aux_loss(int block, Tensor logits, Tensor topk_idx, Tensor global_counts) -> Tensor");
  library.def("update_selection_bias(int block, Tensor global_counts, float rate, Tensor(a!) selection_bias) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(epx, CompositeExplicitAutograd, library) {
  library.impl("aux_loss", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::aux_loss>::call));
  library.impl("update_selection_bias", TORCH_BOX(&epx_torch::update_selection_bias));
}
