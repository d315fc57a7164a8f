// SPDX-License-Identifier: Apache-2.0
// Where the calls under test compute: on the host, or on CUDA when the program was started with --device cuda. Tensors are
// memory of the host, so that the same tests read and write them; on CUDA each has a copy on the device, which calls are given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epx/epx_moe.h"

namespace epx::test {

// Makes calls of the whole program compute on CUDA. Returns false where there is no GPU.
bool use_cuda();

// How many random cases a test tries: what --cases says, or `otherwise`.
uint64_t num_cases(uint64_t otherwise);

// Whether a call of this thread that asks now computes on CUDA.
bool on_cuda();

// While it lives, calls of this thread compute on the host: in float64, for instance, which CUDA has not.
class OnHost {
public:
  OnHost();
  ~OnHost();
  OnHost(const OnHost&) = delete;
  OnHost& operator=(const OnHost&) = delete;

private:
  bool before_;
};

// What `cuda` of a call's args is: NULL on the host. The workspace has just so many bytes and is scribbled over. Valid until
// the next use.
const epx_moe_cuda* place_of_call(size_t workspace_bytes = 0);

// The same with the bytes that epx_moe_..._workspace(arguments...) returns.
template <typename Workspace, typename First, typename... Rest>
const epx_moe_cuda* place_of_call(const Workspace& workspace, First first, Rest... rest) {
  size_t bytes = 0;
  if (workspace(first, rest..., &bytes) != EPX_SUCCESS) bytes = 0; // the call is bad, and is to say so itself
  return place_of_call(bytes);
}

inline constexpr epx_moe_cuda kBadCuda = {3, nullptr, nullptr, 0, nullptr, 0, 0}; // a wrong struct_size

// Waits for the call, copies what the device has back, and throws when the call has reported an error.
void finish_call();

// What calls have reported since the last look. Copies back, as finish_call() does.
struct Report {
  int64_t num_errors;
  epx_moe_errors_report first;
};
Report take_report();

// Memory between guard zones, which its copy on the device has too. free_guarded() counts zones that something has written to.
void* allocate_guarded(size_t bytes);
void free_guarded(void* memory) noexcept;
int64_t broken_guards();

// What a call that is made now is to be given for memory from allocate_guarded(), or for an address in it: on CUDA its copy,
// which has the host's values from here on.
void* address_for_call(void* memory);
// Gives all copies the host's values, as place_of_call() does. For what runs again without a call: a CUDA graph.
void copy_to_device();

template <typename T>
struct GuardedAllocator {
  using value_type = T;
  GuardedAllocator() = default;
  template <typename U>
  explicit GuardedAllocator(const GuardedAllocator<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(allocate_guarded(count * sizeof(T))); }
  void deallocate(T* memory, size_t) noexcept { free_guarded(memory); }
  friend bool operator==(const GuardedAllocator&, const GuardedAllocator&) { return true; }
};

} // namespace epx::test
