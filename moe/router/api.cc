// SPDX-License-Identifier: Apache-2.0
// The router's part of the C API.
#include <limits>

#include "base/c_boundary.h"
#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"
#include "moe/router/arguments.h"
#include "moe/router/calls.h"
#include "moe/router/cuda/enqueue.h"
#include "moe/router/cuda/kernels.h"
#include "moe/tensors.h"

using namespace epx;
using namespace epx::moe;

epx_status epx_moe_router_config_init(epx_moe_router_config* config, size_t struct_size) {
  return at_c_boundary(__func__, [&] {
    init_struct(config, struct_size, "config");
    config->num_groups = 1;
    config->topk_groups = 1;
    config->scaling_factor = 1;
  });
}

epx_status epx_moe_router(const epx_moe_router_config* config, const epx_moe_router_args* args) {
  return at_c_boundary(__func__, [&] {
    require_config(config);
    CheckedRouter(*config, args).run();
  });
}

epx_status epx_moe_router_bwd(const epx_moe_router_config* config, const epx_moe_router_bwd_args* args) {
  return at_c_boundary(__func__, [&] {
    require_config(config);
    CheckedRouterBwd(*config, args).run();
  });
}

epx_status epx_moe_router_bwd_workspace(const epx_moe_router_config* config, const epx_moe_router_bwd_args* args,
                                        size_t* bytes) {
  return at_c_boundary(__func__, [&] {
    require_config(config);
    require_struct(args, "args");
    write_workspace(bytes, moe::cuda::route_bwd_bytes(*config));
  });
}

epx_status epx_moe_aux_loss(const epx_moe_router_config* config, const epx_moe_aux_loss_args* args) {
  return at_c_boundary(__func__, [&] {
    require_config(config);
    const Place place = require_args(args);
    const int64_t tokens = require_logits(args->logits, *config, place);
    require_selection_shape(args->topk_idx, *config, tokens);
    require_counts(args->global_counts, config->num_experts);
    require_tensor(args->loss, "loss", {EPX_FLOAT64}, {{"1", 1}});
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { moe::cuda::enqueue(*config, *args); });
    require_selection(*args->topk_idx, *config);
    const ExpertLoad load = load_of(*args->global_counts, config->num_experts);
    *data_of<double>(args->loss) =
        with_real(args->logits->dtype, [&]<typename T>(T) { return aux_loss<T>(*config, *args, load); });
  });
}

epx_status epx_moe_aux_loss_workspace(const epx_moe_router_config* config, const epx_moe_aux_loss_args* args,
                                      size_t* bytes) {
  return at_c_boundary(__func__, [&] {
    require_config(config);
    require_struct(args, "args");
    require_sizes(args->logits, "logits", {{"T", kAnySize}, {"E", config->num_experts}});
    write_workspace(bytes, moe::cuda::aux_loss_bytes(args->logits->sizes[0], config->num_experts));
  });
}

epx_status epx_moe_bias_update(const epx_moe_bias_update_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    require_tensor(args->global_counts, "global_counts", kInteger, {{"P", kAnySize}, {"E", kAnySize}});
    const int64_t columns = args->global_counts->sizes[1];
    if (columns < 1 || columns > std::numeric_limits<int32_t>::max())
      fail(EPX_ERROR_INVALID_ARGUMENT, "global_counts has {} columns; it must have one for each expert", columns);
    const auto experts = static_cast<int32_t>(columns);
    require_tensor(args->selection_bias, "selection_bias", place == Place::cuda ? kCudaReal : kReal, {{"E", experts}});
    const epx_dtype real = args->selection_bias->dtype;
    with_real(real, [&]<typename T>(T) { require_finite<T>(args->rate, "rate"); });
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { moe::cuda::enqueue(*args); });
    const ExpertLoad load = load_of(*args->global_counts, experts);
    with_real(real, [&]<typename T>(T) { update_bias<T>(load, args->rate, experts, data_of<T>(args->selection_bias)); });
  });
}
