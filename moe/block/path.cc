// SPDX-License-Identifier: Apache-2.0
#include "moe/block/path.h"

#include <algorithm>

#include "moe/router/cuda/kernels.h"

namespace epx::moe {

Footprint footprint_of(const BlockPath& path, int64_t num_rows) {
  const BlockPlan& plan = path.plan();
  CallMemory memory;
  memory.shared_local.take_bytes(workspace_of(path, num_rows));
  const RoutingTensors routing(plan, plan.max_tokens, plan.real, memory);
  const Footprint of_path = path.footprint(num_rows);
  memory.flight_window.take_bytes(of_path.flight_window);
  memory.flight_local.take_bytes(of_path.flight_local);
  memory.shared_window.take_bytes(of_path.shared_window);
  memory.shared_local.take_bytes(of_path.shared_local);
  return memory.footprint();
}

int64_t workspace_of(const BlockPath& path, int64_t num_rows) {
  const int64_t of_router = path.plan().is_on_gpu() ? static_cast<int64_t>(cuda::route_bwd_bytes(path.plan().router)) : 0;
  return std::max(of_router, path.workspace_bytes(num_rows));
}

} // namespace epx::moe
