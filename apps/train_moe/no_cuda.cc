// SPDX-License-Identifier: Apache-2.0
// Takes the place of cuda/ in a build without CUDA.
#include "apps/train_moe/device.h"
#include "apps/train_moe/errors.h"

namespace train {

std::unique_ptr<Device> make_cuda_device(int) {
  fail(kExitFailure, "--device cuda: this train_moe was built without CUDA");
}

} // namespace train
