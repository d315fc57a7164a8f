// SPDX-License-Identifier: Apache-2.0
// A library for LD_PRELOAD: it makes each call of the exchange on the host transport take EPX_SLOWED_PERCENT longer, as a slower
// build would, without another libepx. tools/compare_check.py shows with it what ep_bench compare notices.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include <dlfcn.h>

#include "epx/epx.h"

namespace {

double added_fraction() {
  const char* const text = std::getenv("EPX_SLOWED_PERCENT");
  return text != nullptr ? std::atof(text) / 100 : 0;
}

// Calls the function of the library behind this one, and then spins for a fraction of the time that it took.
template <typename Args>
epx_status call_slowly(const char* name, epx_group group, const Args* args) {
  using Clock = std::chrono::steady_clock;
  using Function = epx_status (*)(epx_group, const Args*);
  static const double fraction = added_fraction();
  const auto function = reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
  if (function == nullptr) {
    std::fprintf(stderr, "slowed_calls: %s\n", dlerror());
    return EPX_ERROR_INTERNAL;
  }
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
}
