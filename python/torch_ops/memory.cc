// SPDX-License-Identifier: Apache-2.0
// Tensors in memory from epx_mem_alloc, which peers reach. The memory is the group's: while a tensor of it lives, the group is
// not freed.
#include <algorithm>
#include <memory>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "failure.h"
#include "registry.h"
#include "tensors.h"

namespace epx_torch {
namespace {

Tensor wrap(int64_t id, int64_t address, const std::vector<int64_t>& sizes, ScalarType dtype) {
  const GroupUse group(id);
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  const torch::stable::Device device =
      group->place.is_cuda
          ? torch::stable::Device(torch::headeronly::DeviceType::CUDA, static_cast<int8_t>(group->place.device_index))
          : torch::stable::Device(torch::headeronly::DeviceType::CPU);
  // The deleter ends the use of the group, which the tensor and its views share.
  auto use = std::make_shared<GroupUse>(id);
  return torch::stable::from_blob(reinterpret_cast<void*>(address), {sizes.data(), sizes.size()},
                                  {strides.data(), strides.size()}, device, dtype, [use](void*) mutable { use.reset(); });
}

} // namespace
} // namespace epx_torch

STABLE_TORCH_LIBRARY_FRAGMENT(epx, library) {
  library.def("wrap(int group, int address, int[] sizes, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(epx, CompositeExplicitAutograd, library) {
  library.impl("wrap", TORCH_BOX(&epx_torch::wrap));
}
