// SPDX-License-Identifier: Apache-2.0
// Launches of the kernels of the operations, which are asynchronous on the stream. Each operation is one kernel, but
// prepare_dispatch of many tokens may be two.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/stages/cuda/launch_plan.h"
#include "runtime/stages/cuda/protocol/device_group.h"
#include "runtime/stages/stages.h"

namespace epx::cuda {

using RegisteredRange = AllocationPlace; // of the receive rows

cudaError_t launch_prepare(const DeviceGroup& group, LaunchPlan& plan, const PrepareCall& call, cudaStream_t stream);
cudaError_t launch_dispatch(const DeviceGroup& group, LaunchPlan& plan, const DispatchCall& call,
                            const RegisteredRange& range, cudaStream_t stream);
cudaError_t launch_prepare_dispatch(const DeviceGroup& group, LaunchPlan& plan, const PrepareDispatchCall& call,
                                    const RegisteredRange& range, cudaStream_t stream);
// The two halves of a prepare_dispatch of many tokens, one kernel each; the descriptor is that of the whole call.
cudaError_t launch_first_half(const DeviceGroup& group, LaunchPlan& plan, const PrepareCall& call,
                              const CallDescriptor& descriptor, cudaStream_t stream);
cudaError_t launch_second_half(const DeviceGroup& group, LaunchPlan& plan, const DispatchCall& call,
                               const RegisteredRange& range, cudaStream_t stream);
cudaError_t launch_dispatch_rank_major(const DeviceGroup& group, LaunchPlan& plan, const DispatchRankMajorCall& call,
                                       const RegisteredRange& range, cudaStream_t stream);
// combine_bwd of the rank-major layout is this one on another plan.
cudaError_t launch_combine_bwd(const DeviceGroup& group, LaunchPlan& plan, const CombineBwdCall& call,
                               const RegisteredRange& range, cudaStream_t stream);
cudaError_t launch_combine(const DeviceGroup& group, LaunchPlan& plan, const CombineCall& call, cudaStream_t stream);
cudaError_t launch_dispatch_bwd(const DeviceGroup& group, LaunchPlan& plan, const DispatchBwdCall& call,
                                cudaStream_t stream);

// The kernels behind EPX_CHECK_HANDLE_MEM. launch_seal stores in the handle header the checksum of what prepare,
// prepare_dispatch or dispatch_rank_major has written; launch_check verifies it before a movement, which finds the result in
// DeviceState::checked_header.
cudaError_t launch_seal(const DeviceGroup& group, int top_k, std::byte* handle_mem, cudaStream_t stream);
cudaError_t launch_check(const DeviceGroup& group, const MovementCall& call, cudaStream_t stream);

// Stores an abort record in the window of every rank, where there is none yet.
cudaError_t launch_abort(const DeviceGroup& group, const AbortRecord& abort_record, cudaStream_t stream);

} // namespace epx::cuda
