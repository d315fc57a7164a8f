// SPDX-License-Identifier: Apache-2.0
// Creates a group over the NCCL library that is loaded, sends a layer through its windows and through memory from
// epx_mem_alloc, and prints which library that was. Run it once for each release that epx supports, with LD_LIBRARY_PATH.
#include <cstdio>
#include <string>

#include <dlfcn.h>

#include "tests/gpu/resident_layer.h"
#include "tests/gpu/small_cases.h"
#include "tests/gpu/suite.h"

namespace epx::test {
namespace {

// Describes the NCCL that libepx has loaded for its group; the emulated suite has none.
std::string describe_nccl() {
  void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return "no NCCL";
  const auto get_version = reinterpret_cast<int (*)(int*)>(dlsym(library, "ncclGetVersion"));
  if (get_version == nullptr) return "no NCCL";
  int code = 0;
  get_version(&code);
  Dl_info info{};
  dladdr(reinterpret_cast<const void*>(get_version), &info);
  return "NCCL " + std::to_string(code / 10'000) + "." + std::to_string(code / 100 % 100) + "." +
         std::to_string(code % 100) + " from " + (info.dli_fname != nullptr ? info.dli_fname : "?");
}

void test_version(const RankContext& context) {
  const GroupCase shape = small_group(context, EPX_COMBINE_WIRE);
  GroupRun group(context, shape);
  if (context.rank == 0) std::printf("%s\n", describe_nccl().c_str());
  const LayerCase layer_case = small_layer(3, 16, RoutingStyle::uniform);
  for (const bool in_place : {false, true}) {
    ResidentLayer layer(group, layer_case, in_place);
    const Workload work = make_workload(shape, layer_case, 1);
    layer.write(work);
    layer.forward();
    layer.backward();
    context.device->finish();
    layer.check_results(work);
  }
}

} // namespace
} // namespace epx::test

int main() {
  return epx::test::run_suite({epx::test::test_version});
}
