// SPDX-License-Identifier: Apache-2.0
// Registers memory of another owner in a group: the results have the same bits as in the group's own memory.
#include <memory>
#include <vector>

#include "tests/gpu/resident_layer.h"
#include "tests/gpu/small_cases.h"
#include "tests/gpu/suite.h"
#include "tests/support/check.h"

namespace epx::test {
namespace {

// NCCL has allocated the memory; whose it is does not matter: here it is another group's.
void test_registered(const RankContext& context) {
  const GroupCase shape = small_group(context, EPX_COMBINE_WIRE);
  GroupRun owner(context, shape), group(context, shape);
  const size_t bytes = size_t{1} << 20;
  void* memory = nullptr;
  check_ok(epx_mem_alloc(owner.handle(), bytes, &memory), "epx_mem_alloc");

  check_status(epx_mem_register(group.handle(), nullptr, bytes), EPX_ERROR_INVALID_ARGUMENT, "epx_mem_register(NULL)");
  check_status(epx_mem_register(group.handle(), memory, 0), EPX_ERROR_INVALID_ARGUMENT, "epx_mem_register of no bytes");
  check_status(epx_mem_free(group.handle(), memory), EPX_ERROR_INVALID_ARGUMENT, "epx_mem_free before it is registered");
  if (context.num_ranks > 1)
    check_status(epx_mem_register(group.handle(), memory, context.rank == 0 ? bytes : bytes / 2), EPX_ERROR_MISMATCH,
                 "epx_mem_register of different sizes");
  check_ok(epx_mem_register(group.handle(), memory, bytes), "epx_mem_register");
  check_status(epx_mem_register(group.handle(), memory, bytes), EPX_ERROR_INVALID_ARGUMENT, "epx_mem_register twice");

  const LayerCase layer_case = small_layer(3, 16, RoutingStyle::uniform);
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    ResidentLayer layer(group, layer_case, static_cast<std::byte*>(memory), bytes);
    const Workload work = make_workload(shape, layer_case, seed);
    layer.write(work);
    layer.forward();
    layer.backward();
    context.device->finish();
    layer.check_results(work);
  }
  check_ok(epx_mem_free(group.handle(), memory), "epx_mem_free of the registration");
  std::vector<std::byte> contents(bytes);
  context.device->read(contents.data(), memory, bytes); // the memory itself is still its owner's
  check_ok(epx_mem_free(owner.handle(), memory), "epx_mem_free by the owner");
}

} // namespace
} // namespace epx::test

int main() {
  return epx::test::run_suite({epx::test::test_registered});
}
