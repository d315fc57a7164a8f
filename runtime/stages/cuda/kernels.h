// The five operations as kernels. Each launch is asynchronous on the stream, and one kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/stages/cuda/launch_plan.h"
#include "runtime/stages/cuda/protocol/device_group.h"
#include "runtime/stages/stages.h"

namespace epx::cuda {

// A tensor's place in an allocation of the group; allocation -1: none.
struct RegisteredRange {
  int64_t rows_allocation;
  int64_t rows_offset;
};
constexpr RegisteredRange kNotRegistered{-1, 0};

cudaError_t launch_prepare(const DeviceGroup& group, LaunchPlan& plan, const PrepareCall& call, cudaStream_t stream);
cudaError_t launch_dispatch(const DeviceGroup& group, LaunchPlan& plan, const DispatchCall& call,
                            const RegisteredRange& reach, cudaStream_t stream);
cudaError_t launch_combine_bwd(const DeviceGroup& group, LaunchPlan& plan, const CombineBwdCall& call,
                               const RegisteredRange& reach, cudaStream_t stream);
cudaError_t launch_combine(const DeviceGroup& group, LaunchPlan& plan, const CombineCall& call, cudaStream_t stream);
cudaError_t launch_dispatch_bwd(const DeviceGroup& group, LaunchPlan& plan, const DispatchBwdCall& call,
                                cudaStream_t stream);

// EPX_CHECK_HANDLE_MEM, a kernel of its own each: stores the checksum of what prepare has written into the header; and finds
// out, before a movement, whether it is right still. DeviceState::checked_header tells the movement.
cudaError_t launch_seal(const DeviceGroup& group, const PrepareCall& call, cudaStream_t stream);
cudaError_t launch_check(const DeviceGroup& group, const MovementCall& call, cudaStream_t stream);

// Stores a poison record into every rank's window that has none.
cudaError_t launch_abort(const DeviceGroup& group, const AbortRecord& abort_record, cudaStream_t stream);

} // namespace epx::cuda
