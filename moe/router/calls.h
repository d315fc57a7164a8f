// SPDX-License-Identifier: Apache-2.0
// The calls of the router, in two steps: the constructor checks all arguments but the data, and throws; run() computes.
// So a block checks all that it is going to call before it calls the group.
#pragma once

#include <optional>

#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"
#include "moe/tensors.h"

namespace epx::moe {

// The config has been checked. It and what the args point to must live until run() has returned.
class CheckedRouter {
public:
  CheckedRouter(const epx_moe_router_config& config, const epx_moe_router_args* args);
  void run() const;

private:
  const epx_moe_router_config& config_;
  epx_moe_router_args args_;
  std::optional<CudaCall> cuda_; // on the host: none
};

class CheckedRouterBwd {
public:
  CheckedRouterBwd(const epx_moe_router_config& config, const epx_moe_router_bwd_args* args);
  void run() const; // on the host: throws for bad data

private:
  const epx_moe_router_config& config_;
  epx_moe_router_bwd_args args_;
  std::optional<CudaCall> cuda_;
};

} // namespace epx::moe
