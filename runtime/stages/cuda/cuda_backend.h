// SPDX-License-Identifier: Apache-2.0
// The backend for GPUs of one NVLink domain.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include <cuda_runtime_api.h>

#include "runtime/backend.h"
#include "runtime/group_context.h"
#include "runtime/stages/cuda/device_reports.h"
#include "runtime/stages/cuda/protocol/device_group.h"
#include "runtime/status_board.h"
#include "transport/exchange.h"
#include "transport/transport.h"

namespace epx::cuda {

// The backend of a group of one node, and of this rank's node in a group of several, which makes its legs by make_call().
class LegBackend : public Backend {
public:
  // Makes a call of the node, a leg for instance: `launch` launches its kernel on the stream.
  using Launch = std::function<cudaError_t(const DeviceGroup& group, cudaStream_t stream)>;
  virtual void make_call(epx_operation operation, epx_stream stream, const Launch& launch) = 0;

  // The node as kernels that are no calls see it.
  virtual const DeviceGroup& device_group() const = 0;

  // Reports from now on have these names; it is called before the first call.
  virtual void set_names(const NodeNames& names) = 0;

  // Any thread may call these.
  virtual std::optional<Failure> failure() = 0; // which a kernel or a host of the node has reported, if there is one
  // Ends the kernels of this rank that wait, and with them those of the node. Before the backend is destroyed, its owner waits
  // for the device then.
  virtual void end() noexcept = 0;
};

// This is collective over `exchange`: all ranks succeed or all throw. The context must outlive the backend. Kernels must be
// able to access the transport's windows.
std::unique_ptr<LegBackend> make_backend(const GroupContext& context, int num_comm_sms,
                                         std::unique_ptr<Transport> transport, Exchange& exchange);

} // namespace epx::cuda
