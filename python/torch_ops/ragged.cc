// SPDX-License-Identifier: Apache-2.0
// The ragged all-to-all as operators of PyTorch: one that is functional, and one that writes into a tensor of the caller's.
#include <torch/csrc/stable/ops.h>

#include "calls.h"
#include "row_major.h"

namespace epx_torch {
namespace {

void move(int64_t id, const Tensor& operand, const Tensor& output, const Tensor& input_offsets, const Tensor& send_sizes,
          const Tensor& output_offsets, const Tensor& recv_sizes, bool transposed) {
  const GroupUse group(id);
  const Place& place = group->place;
  const epx_tensor rows = view_as_bytes("operand", operand, place), received = view_as_bytes("output", output, place);
  const epx_tensor first_sent = view("input_offsets", input_offsets, place, {kAnySize}, kIndexDtypes);
  const auto like_first = [&](const char* name, const Tensor& tensor) {
    return view(name, tensor, place, {first_sent.sizes[0]}, {input_offsets.scalar_type()});
  };
  const epx_tensor sent = like_first("send_sizes", send_sizes);
  const epx_tensor first_received = like_first("output_offsets", output_offsets);
  const epx_tensor expected = like_first("recv_sizes", recv_sizes);
  epx_ragged_all_to_all_args args = {};
  args.struct_size = sizeof(args);
  args.stream = current_stream(place);
  args.operand = &rows;
  args.output = &received;
  args.input_offsets = &first_sent;
  args.send_sizes = &sent;
  args.output_offsets = &first_received;
  args.recv_sizes = &expected;
  args.direction = transposed ? EPX_SLICES_TRANSPOSED : EPX_SLICES_FORWARD;
  throw_if_failed(epx_ragged_all_to_all(group->group, &args));
}

Tensor ragged_all_to_all(int64_t id, const Tensor& operand, const Tensor& output, const Tensor& input_offsets,
                         const Tensor& send_sizes, const Tensor& output_offsets, const Tensor& recv_sizes,
                         bool transposed) {
  Tensor result = torch::stable::clone(output);
  move(id, operand, result, input_offsets, send_sizes, output_offsets, recv_sizes, transposed);
  return result;
}

} // namespace
} // namespace epx_torch

STABLE_TORCH_LIBRARY_FRAGMENT(epx, library) {
  library.def("ragged_all_to_all(int group, Tensor operand, Tensor output, Tensor input_offsets, Tensor send_sizes, "
              "Tensor output_offsets, Tensor recv_sizes, bool transposed) -> Tensor");
  library.def("ragged_all_to_all_into(int group, Tensor operand, Tensor(a!) output, Tensor input_offsets, Tensor "
              "send_sizes, Tensor output_offsets, Tensor recv_sizes, bool transposed) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(epx, CompositeExplicitAutograd, library) {
  library.impl("ragged_all_to_all", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::ragged_all_to_all>::call));
  library.impl("ragged_all_to_all_into", TORCH_BOX(&epx_torch::move));
}
