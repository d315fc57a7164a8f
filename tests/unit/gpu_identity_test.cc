// SPDX-License-Identifier: Apache-2.0
// These tests check why ranks cannot use transport nccl with the GPUs that they have.
#include <doctest/doctest.h>

#include <vector>

#include "transport/nccl/gpu_identity.h"

namespace epx {
namespace {

GpuIdentity gpu(int device, char first_of_uuid, int compute_capability = 90) {
  GpuIdentity identity;
  identity.device = device;
  identity.compute_capability = compute_capability;
  identity.uuid[0] = first_of_uuid;
  return identity;
}

TEST_CASE("each rank needs a GPU of its own") {
  CHECK(why_not_a_gpu_each(std::vector{gpu(0, 'a'), gpu(1, 'b')}) == "");
  CHECK(why_not_a_gpu_each(std::vector{gpu(0, 'a'), GpuIdentity{}}) == "rank 1 has no GPU (no driver, or no device)");
  CHECK(why_not_a_gpu_each(std::vector{gpu(0, 'a'), gpu(1, 'b'), gpu(0, 'b')}) ==
        "ranks 1 and 2 share a GPU (device 0 of rank 2)");
}

TEST_CASE("ranks with another NCCL_HOSTID may share a GPU") {
  std::vector gpus{gpu(0, 'a'), gpu(0, 'a')};
  gpus[0].host_id_hash = 1;
  CHECK(why_not_a_gpu_each(gpus) == "");
  gpus[1].host_id_hash = 1;
  CHECK(why_not_a_gpu_each(gpus) == "ranks 0 and 1 share a GPU (device 0 of rank 1)");
}

TEST_CASE("the kernels need Hopper or a later GPU") {
  CHECK(why_not_new_enough(std::vector{gpu(0, 'a', 90), gpu(1, 'b', 100), gpu(2, 'c', 103)}) == "");
  CHECK(why_not_new_enough(std::vector{gpu(0, 'a', 90), gpu(1, 'b', 86)}) ==
        "the GPU of rank 1 (its device 1) has compute capability 8.6; the kernels need 9.0 or later");
}

} // namespace
} // namespace epx
