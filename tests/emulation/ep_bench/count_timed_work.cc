// SPDX-License-Identifier: Apache-2.0
// A library to preload before ep_bench_emulated: it counts what the host does between the two events of a measurement, and writes
// a line for each to the file COUNT_TIMED_WORK, "launches synchronisations copies".
//
// The events of a measurement are those that have a time (cudaEventCreate), recorded in turns: begin, end. The library's own have
// none (cudaEventCreateWithFlags).
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <set>
#include <utility>

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "tests/emulation/streams.h"

namespace {

struct Counts {
  std::mutex mutex;
  std::set<cudaEvent_t> timed_events;
  bool is_between = false;
  int launches = 0, synchronisations = 0, copies = 0;
};

Counts& counts() {
  static Counts all;
  return all;
}

void count(int Counts::*field) {
  const std::scoped_lock lock(counts().mutex);
  if (counts().is_between) ++(counts().*field);
}

template <typename Function>
Function* next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

void note_record(cudaEvent_t event) {
  const std::scoped_lock lock(counts().mutex);
  Counts& all = counts();
  if (!all.timed_events.contains(event)) return;
  if (all.is_between) {
    if (const char* name = std::getenv("COUNT_TIMED_WORK")) {
      std::FILE* const file = std::fopen(name, "a");
      std::fprintf(file, "%d %d %d\n", all.launches, all.synchronisations, all.copies);
      std::fclose(file);
    }
  }
  all.is_between = !all.is_between;
  all.launches = all.synchronisations = all.copies = 0;
}

} // namespace

// Each of these counts, and calls the emulation's.
#define COUNTED(field, name, parameters, ...)                                                                              \
  extern "C" cudaError_t name parameters {                                                                                 \
    static auto* const real = next(&name, #name);                                                                          \
    count(&Counts::field);                                                                                                 \
    return real(__VA_ARGS__);                                                                                              \
  }

COUNTED(launches, cudaGraphLaunch, (cudaGraphExec_t exec, cudaStream_t stream), exec, stream)
COUNTED(launches, cudaLaunchHostFunc, (cudaStream_t stream, cudaHostFn_t function, void* argument), stream, function,
        argument)
COUNTED(synchronisations, cudaStreamSynchronize, (cudaStream_t stream), stream)
COUNTED(synchronisations, cudaEventSynchronize, (cudaEvent_t event), event)
COUNTED(synchronisations, cudaDeviceSynchronize, ())
COUNTED(synchronisations, cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags), stream, event,
        flags)
COUNTED(copies, cudaMemcpyAsync, (void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream), to,
        from, bytes, kind, stream)
COUNTED(copies, cudaMemsetAsync, (void* memory, int value, size_t bytes, cudaStream_t stream), memory, value, bytes, stream)

extern "C" cudaError_t cudaEventCreate(cudaEvent_t* event) {
  static auto* const real = next(static_cast<cudaError_t (*)(cudaEvent_t*)>(nullptr), "cudaEventCreate");
  const cudaError_t error = real(event);
  const std::scoped_lock lock(counts().mutex);
  counts().timed_events.insert(*event);
  return error;
}

extern "C" cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  static auto* const real = next(&cudaEventCreateWithFlags, "cudaEventCreateWithFlags");
  const cudaError_t error = real(event, flags); // the emulation calls cudaEventCreate
  const std::scoped_lock lock(counts().mutex);
  counts().timed_events.erase(*event);
  return error;
}

extern "C" cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  static auto* const real = next(static_cast<cudaError_t (*)(cudaEvent_t, cudaStream_t)>(nullptr), "cudaEventRecord");
  note_record(event);
  return real(event, stream);
}

// A kernel's launch.
void epx::emulation::enqueue(cudaStream_t stream, std::function<void()> task) {
  static auto* const real = reinterpret_cast<void (*)(cudaStream_t, std::function<void()>)>(
      dlsym(RTLD_NEXT, "_ZN3epx9emulation7enqueueEP11CUstream_stSt8functionIFvvEE"));
  count(&Counts::launches);
  real(stream, std::move(task));
}
