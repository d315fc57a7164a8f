// SPDX-License-Identifier: Apache-2.0
// Weights of experts in FP8, as an operator of PyTorch. It is local.
#include <tuple>

#include <torch/csrc/stable/ops.h>

#include <epx/epx_moe.h>

#include "failure.h"
#include "on_device.h"
#include "registry.h"
#include "row_major.h"
#include "tensors.h"

namespace epx_torch {
namespace {

constexpr auto kWeightsDtypes = {ScalarType::Float, ScalarType::BFloat16};
constexpr int64_t kBlock = 128; // rows and columns that have one scale

// The codes and the scales of weights, or those of their transposes.
std::tuple<Tensor, Tensor> quantise_weights(const Tensor& weights, bool transposed) {
  const Place place = {weights.is_cuda(), weights.is_cuda() ? weights.get_device_index() : -1};
  const OnDevice on_device(place);
  const epx_tensor weights_view = view("weights", weights, place, {kAnySize, kAnySize, kAnySize}, kWeightsDtypes);
  const int64_t local = weights_view.sizes[0], rows = weights_view.sizes[transposed ? 2 : 1],
                columns = weights_view.sizes[transposed ? 1 : 2];
  const Tensor codes = new_tensor(place, {local, rows, columns}, ScalarType::Float8_e4m3fn),
               scales = new_tensor(place, {local, rows / kBlock, columns / kBlock}, ScalarType::Float);
  const epx_tensor codes_view = view_of_new(codes), scales_view = view_of_new(scales);
  epx_row_format format = {};
  throw_if_failed(epx_row_format_init(&format, EPX_SCALING_BLOCK128));
  epx_moe_quantise_weights_args args = {};
  args.struct_size = sizeof(args);
  const epx_moe_cuda cuda = make_cuda(place);
  if (place.is_cuda) args.cuda = &cuda;
  args.format = &format;
  args.weights = &weights_view;
  (transposed ? args.transposed_codes : args.codes) = &codes_view;
  (transposed ? args.transposed_scales : args.scales) = &scales_view;
  throw_if_failed(epx_moe_quantise_weights(&args));
  return {codes, scales};
}

} // namespace
} // namespace epx_torch

STABLE_TORCH_LIBRARY_FRAGMENT(epx, library) {
  library.def("quantise_weights(Tensor weights, bool transposed) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(epx, CompositeExplicitAutograd, library) {
  library.impl("quantise_weights", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::quantise_weights>::call));
}
