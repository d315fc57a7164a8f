// SPDX-License-Identifier: Apache-2.0
// Launches of the kernels of the operations, which are asynchronous on the stream. Each operation is one kernel, but
// prepare_dispatch of many tokens may be two.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/stages/cuda/launch_plan.h"
#include "runtime/stages/cuda/protocol/device_group.h"
#include "runtime/stages/stages.h"

namespace epx {
class Allocations; // runtime/allocations.h, whose headers nvcc would have to read in each file of kernels
}

namespace epx::cuda {

// What a launch needs besides the arguments of its call.
struct Launcher {
  const DeviceGroup& group;
  LaunchPlan& plan;
  const Allocations& allocations;
  cudaStream_t stream;

  // Returns where a call's receive rows lie in memory that peers reach, and store into in place.
  AllocationPlace place_of(const MovementCall& call, const std::byte* rows) const;
  AllocationPlace place_of_output(const RaggedAllToAllCall& call) const;
};

// Call has format_tensors. may_send_own: the call's kernel stores the rows that stay on their rank where it sends.
template <typename Call>
SenderWork sender_work_of(const Call& call, bool may_send_own) {
  if (!call.format.is_quantised() || call.format_tensors.come_quantised()) return SenderWork::copies;
  return may_send_own && call.format_tensors.quantise_for_all() ? SenderWork::quantises_all : SenderWork::quantises;
}

// launch_dispatch and so on, one for each stage.
#define EPX_STAGE(NUMBER, name, first_bytes, Call, stage)                                                                  \
  cudaError_t launch_##stage(const Launcher& launcher, const Call& call);
EPX_STAGES(EPX_STAGE)
#undef EPX_STAGE

// The two halves of a prepare_dispatch of many tokens, one kernel each; the descriptor is that of the whole call.
cudaError_t launch_first_half(const Launcher& launcher, const PrepareCall& call, const CallDescriptor& descriptor);
cudaError_t launch_second_half(const Launcher& launcher, const PrepareDispatchCall& call);

// The kernels behind EPX_CHECK_HANDLE_MEM. launch_seal stores in the handle header the checksum of what prepare,
// prepare_dispatch or dispatch_rank_major has written; launch_check verifies it before a movement, which finds the result in
// DeviceState::checked_header.
cudaError_t launch_seal(const DeviceGroup& group, int top_k, std::byte* handle_mem, cudaStream_t stream);
cudaError_t launch_check(const DeviceGroup& group, const MovementCall& call, cudaStream_t stream);

// Stores an abort record in the window of every rank, where there is none yet.
cudaError_t launch_abort(const DeviceGroup& group, const AbortRecord& abort_record, cudaStream_t stream);

} // namespace epx::cuda
