// SPDX-License-Identifier: Apache-2.0
// The backend for GPUs of one NVLink domain.
#pragma once

#include <memory>

#include "runtime/backend.h"
#include "runtime/group_context.h"
#include "transport/exchange.h"
#include "transport/transport.h"

namespace epx::cuda {

// This is collective over `exchange`: all ranks succeed or all throw. The context must outlive the backend. Kernels must be
// able to access the transport's windows.
std::unique_ptr<Backend> make_backend(const GroupContext& context, int num_comm_sms, std::unique_ptr<Transport> transport,
                                      Exchange& exchange);

} // namespace epx::cuda
