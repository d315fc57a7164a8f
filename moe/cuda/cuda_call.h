// SPDX-License-Identifier: Apache-2.0
// What a call on a GPU needs, checked on the host. Nothing here includes a header of CUDA, so that a build without it compiles
// the same callers; what only a build with CUDA has is used behind kWithCuda.
#pragma once

#include <cstddef>
#include <initializer_list>

#include "base/error.h"
#include "epx/epx_moe.h"
#include "moe/cuda/error_record.h"
#include "moe/cuda/launch_target.h"

namespace epx::moe {

#if defined(EPX_WITH_CUDA)
inline constexpr bool kWithCuda = true;
#else
inline constexpr bool kWithCuda = false;
#endif

[[noreturn]] inline void refuse_cuda() {
  fail(EPX_ERROR_UNSUPPORTED, "this build of the library has no CUDA; it computes on the host only");
}

// Calls enqueue(0), or throws in a build without CUDA, where `enqueue` is not even instantiated: it calls what is not there.
template <typename Enqueue>
void enqueue_on_cuda([[maybe_unused]] const Enqueue& enqueue) {
  if constexpr (kWithCuda)
    enqueue(0);
  else
    refuse_cuda();
}

// What the epx_moe_..._workspace functions do with the bytes that they have found.
inline void write_workspace(size_t* bytes, size_t value) {
  if (bytes == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "bytes is NULL");
  *bytes = value;
}

struct NamedTensor {
  const epx_tensor* tensor; // or NULL
  const char* name;
};

// Throws when there is no GPU.
int current_device();

class CudaCall {
public:
  // Throws unless the thread's current device is there, the tensors, whose shapes have been checked, are its memory, and so
  // is a workspace of so many bytes.
  CudaCall(const epx_moe_cuda& cuda, epx_moe_op op, size_t workspace_bytes, std::initializer_list<NamedTensor> tensors);

  const LaunchTarget& target() const { return target_; }
  const ErrorSink& errors() const { return errors_; }
  void* workspace() const { return workspace_; }

  // Throws unless a tensor, whose shape has been checked, is memory of the device. It may be NULL.
  void require_memory(const epx_tensor* tensor, const char* name) const;
  // Throws when a tensor, whose shape has been checked, has elements and is not aligned to so many bytes. It may be NULL.
  void require_aligned(const epx_tensor* tensor, const char* name, size_t alignment) const;
  // Throws when CUDA has refused a launch; `error` is a cudaError_t.
  void require_launched(int error) const;

private:
  int device_;
  LaunchTarget target_;
  ErrorSink errors_;
  void* workspace_;
};

ErrorRecord* make_error_record();
void free_error_record(ErrorRecord* record) noexcept;

// Reads a record as epx_moe_errors_read does.
void read_errors(ErrorRecord& record, epx_moe_errors_report* report);

} // namespace epx::moe

struct epx_moe_errors_s {
  epx::moe::ErrorRecord* record;
};
