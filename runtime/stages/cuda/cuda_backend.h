// SPDX-License-Identifier: Apache-2.0
// The backend for GPUs of one NVLink domain.
#pragma once

#include <memory>

#include "runtime/backend.h"
#include "runtime/group_context.h"
#include "transport/exchange.h"

namespace epx::cuda {

// This is collective over `exchange`: all ranks succeed or all throw. The context must outlive the backend.
std::unique_ptr<Backend> make_backend(const GroupContext& context, int num_comm_sms, Exchange& exchange);

} // namespace epx::cuda
