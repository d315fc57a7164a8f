// SPDX-License-Identifier: Apache-2.0
// A library for LD_PRELOAD: it makes each call of the exchange take EPX_SLOWED_PERCENT longer, as a slower build would, without
// another libepx. tools/compare_check.py shows with it what ep_bench compare notices. On a stream two kernels of one thread stand
// around each call, with 0 percent too, so what is compared must have this library on both sides.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include <dlfcn.h>

#include "epx/epx.h"
#if defined(EPX_WITH_CUDA)
#include "tests/multiprocess/slow_kernel.h"
#endif

namespace {

double added_fraction() {
  const char* const text = std::getenv("EPX_SLOWED_PERCENT");
  return text != nullptr ? std::atof(text) / 100 : 0;
}

epx_status fail(const char* reason) {
  std::fprintf(stderr, "slowed_calls: %s\n", reason);
  return EPX_ERROR_INTERNAL;
}

#if defined(EPX_WITH_CUDA)
template <typename Call>
epx_status call_slowly_on_stream(const Call& call, double fraction, cudaStream_t stream) {
  if (const cudaError_t error = epx::test::launch_note_begin(stream); error != cudaSuccess)
    return fail(cudaGetErrorString(error));
  const epx_status status = call();
  if (status != EPX_SUCCESS) return status;
  const cudaError_t error = epx::test::launch_spin(fraction, stream);
  return error == cudaSuccess ? EPX_SUCCESS : fail(cudaGetErrorString(error));
}
#endif

// Calls the function of the library behind this one, and then spins for a fraction of the time that it took.
template <typename Args>
epx_status call_slowly(const char* name, epx_group group, const Args* args) {
  using Clock = std::chrono::steady_clock;
  using Function = epx_status (*)(epx_group, const Args*);
  static const double fraction = added_fraction();
  const auto function = reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
  if (function == nullptr) return fail(dlerror());
#if defined(EPX_WITH_CUDA)
  if (args->stream != nullptr)
    return call_slowly_on_stream([&] { return function(group, args); }, fraction, static_cast<cudaStream_t>(args->stream));
#endif
  const Clock::time_point begin = Clock::now();
  const epx_status status = function(group, args);
  const Clock::time_point end = Clock::now();
  const auto until = end + std::chrono::duration_cast<Clock::duration>((end - begin) * fraction);
  while (Clock::now() < until) {
  }
  return status;
}

} // namespace

#define SLOWED(name)                                                                                                       \
  epx_status name(epx_group group, const name##_args* args) {                                                              \
    return call_slowly(#name, group, args);                                                                                \
  }

extern "C" {
SLOWED(epx_prepare)
SLOWED(epx_dispatch)
SLOWED(epx_prepare_dispatch)
SLOWED(epx_combine)
SLOWED(epx_combine_bwd)
SLOWED(epx_dispatch_bwd)
SLOWED(epx_dispatch_rank_major)
SLOWED(epx_combine_rank_major)
SLOWED(epx_combine_rank_major_bwd)
SLOWED(epx_dispatch_rank_major_bwd)
SLOWED(epx_ragged_all_to_all)
}
