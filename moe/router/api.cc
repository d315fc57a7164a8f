// SPDX-License-Identifier: Apache-2.0
// The router's part of the C API.
#include <limits>
#include <optional>

#include "base/c_boundary.h"
#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"
#include "moe/router/cuda/enqueue.h"
#include "moe/router/cuda/kernels.h"
#include "moe/router/router.h"
#include "moe/tensors.h"

using namespace epx;
using namespace epx::moe;

namespace {

void require_config(const epx_moe_router_config* config) {
  require_struct(config, "config");
  validate(*config);
}

// Checks logits[T, E] and returns T.
int64_t require_logits(const epx_tensor* logits, const epx_moe_router_config& config, Place place) {
  require_tensor(logits, "logits", place == Place::cuda ? kCudaLogits : kReal,
                 {{"T", kAnySize}, {"E", config.num_experts}});
  return logits->sizes[0];
}

// The type of the computation, and of what epx_moe.h calls real.
epx_dtype real_of(const epx_tensor& logits, Place place) {
  return place == Place::cuda ? EPX_FLOAT32 : logits.dtype;
}

// topk_idx that a caller gives back: what the router could have written. Kernels look at it themselves.
void require_selection(const epx_tensor* topk_idx, const epx_moe_router_config& config, int64_t num_tokens, Place place) {
  require_tensor(topk_idx, "topk_idx", kInteger, {{"T", num_tokens}, {"K", config.top_k}});
  if (place == Place::cuda) return;
  const Integers indices(topk_idx);
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int64_t first = t * config.top_k;
    const bool has_routes = indices[first] >= 0;
    for (int64_t k = 0; k < config.top_k; ++k) {
      const int64_t expert = indices[first + k];
      for (int64_t j = 0; has_routes && j < k; ++j)
        if (indices[first + j] == expert)
          fail(EPX_ERROR_INVALID_ARGUMENT, "topk_idx[{}, {}] and [{}, {}] are both {}; experts differ", t, j, t, k, expert);
      if (has_routes ? expert < 0 || expert >= config.num_experts : expert != -1)
        fail(EPX_ERROR_INVALID_ARGUMENT, "topk_idx[{}, {}] is {}; a row has experts, 0..{}, or is all -1", t, k, expert,
             config.num_experts - 1);
    }
  }
}

void require_counts(const epx_tensor* global_counts, int32_t num_experts) {
  require_tensor(global_counts, "global_counts", kInteger, {{"P", kAnySize}, {"E", num_experts}});
}

// Of counts whose shape has been checked.
ExpertLoad load_of(const epx_tensor* global_counts, int32_t num_experts) {
  const Integers counts(global_counts);
  for (int64_t i = 0; i < global_counts->sizes[0] * num_experts; ++i)
    if (counts[i] < 0)
      fail(EPX_ERROR_INVALID_ARGUMENT, "global_counts[{}, {}] is {}; counts are not negative", i / num_experts,
           i % num_experts, counts[i]);
  return {counts, global_counts->sizes[0], num_experts};
}

// Throws unless the config's numbers are finite in the type of the computation.
template <typename T>
void require_finite_config(const epx_moe_router_config& config) {
  require_finite<T>(config.scaling_factor, "scaling_factor");
  require_finite<T>(config.aux_loss_coeff, "aux_loss_coeff");
}
template <typename T>
void require_finite_bwd(const epx_moe_router_config& config, const epx_moe_router_bwd_args& args) {
  require_finite_config<T>(config);
  require_finite<T>(args.aux_loss_grad, "aux_loss_grad");
}

} // namespace

epx_status epx_moe_router_config_init(epx_moe_router_config* config) {
  return at_c_boundary(__func__, [&] {
    if (config == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "config is NULL");
    *config = {};
    config->struct_size = sizeof(*config);
    config->num_groups = 1;
    config->topk_groups = 1;
    config->scaling_factor = 1;
  });
}

epx_status epx_moe_router(const epx_moe_router_config* config, const epx_moe_router_args* args) {
  return at_c_boundary(__func__, [&] {
    require_config(config);
    const Place place = require_args(args);
    const int64_t tokens = require_logits(args->logits, *config, place);
    const epx_dtype real = real_of(*args->logits, place);
    allow_tensor(args->selection_bias, "selection_bias", {real}, {{"E", config->num_experts}});
    allow_tensor(args->token_mask, "token_mask", {EPX_UINT8}, {{"T", tokens}});
    require_tensor(args->topk_idx, "topk_idx", kInteger, {{"T", tokens}, {"K", config->top_k}});
    require_tensor(args->topk_weights, "topk_weights", {real}, {{"T", tokens}, {"K", config->top_k}});
    allow_tensor(args->info, "info", {EPX_INT64}, {{"3", 3}});
    with_real(real, [&]<typename T>(T) { require_finite_config<T>(*config); });
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { cuda::enqueue(*config, *args); });
    const RouterInfo info = with_real(real, [&]<typename T>(T) {
      const RouterInputs<T> inputs{tokens, data_of<T>(args->logits), data_of<T>(args->selection_bias),
                                   data_of<uint8_t>(args->token_mask)};
      return route<T>(*config, inputs, Integers(args->topk_idx), data_of<T>(args->topk_weights));
    });
    if (args->info != nullptr) write_info(info, *args->info);
  });
}

epx_status epx_moe_router_bwd(const epx_moe_router_config* config, const epx_moe_router_bwd_args* args) {
  return at_c_boundary(__func__, [&] {
    require_config(config);
    const Place place = require_args(args);
    const int64_t tokens = require_logits(args->logits, *config, place);
    const epx_dtype real = real_of(*args->logits, place);
    require_selection(args->topk_idx, *config, tokens, place);
    allow_tensor(args->grad_topk_weights, "grad_topk_weights", {real}, {{"T", tokens}, {"K", config->top_k}});
    require_tensor(args->grad_logits, "grad_logits", {args->logits->dtype}, {{"T", tokens}, {"E", config->num_experts}});
    if (config->aux_loss_coeff == 0 && args->global_counts != nullptr)
      fail(EPX_ERROR_INVALID_ARGUMENT, "global_counts is given, but aux_loss_coeff is 0: there is no loss that needs it");
    if (config->aux_loss_coeff != 0 && args->global_counts == nullptr)
      fail(EPX_ERROR_INVALID_ARGUMENT, "global_counts is NULL; aux_loss_coeff is {}, and that loss needs them",
           config->aux_loss_coeff);
    if (args->global_counts != nullptr) require_counts(args->global_counts, config->num_experts);
    with_real(real, [&]<typename T>(T) { require_finite_bwd<T>(*config, *args); });
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { cuda::enqueue(*config, *args); });
    std::optional<ExpertLoad> load;
    if (args->global_counts != nullptr) load = load_of(args->global_counts, config->num_experts);
    with_real(real, [&]<typename T>(T) {
      route_bwd<T>(*config, tokens, data_of<T>(args->logits), Integers(args->topk_idx), data_of<T>(args->grad_topk_weights),
                   load ? &*load : nullptr, args->aux_loss_grad, data_of<T>(args->grad_logits));
    });
  });
}

epx_status epx_moe_router_bwd_workspace(const epx_moe_router_config* config, const epx_moe_router_bwd_args* args,
                                        size_t* bytes) {
  return at_c_boundary(__func__, [&] {
    require_config(config);
    require_struct(args, "args");
    write_workspace(bytes, cuda::route_bwd_bytes(*config));
  });
}

epx_status epx_moe_aux_loss(const epx_moe_router_config* config, const epx_moe_aux_loss_args* args) {
  return at_c_boundary(__func__, [&] {
    require_config(config);
    const Place place = require_args(args);
    const int64_t tokens = require_logits(args->logits, *config, place);
    require_selection(args->topk_idx, *config, tokens, place);
    require_counts(args->global_counts, config->num_experts);
    require_tensor(args->loss, "loss", {EPX_FLOAT64}, {{"1", 1}});
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { cuda::enqueue(*config, *args); });
    const ExpertLoad load = load_of(args->global_counts, config->num_experts);
    *data_of<double>(args->loss) = with_real(args->logits->dtype, [&]<typename T>(T) {
      return aux_loss<T>(*config, tokens, data_of<T>(args->logits), Integers(args->topk_idx), load);
    });
  });
}

epx_status epx_moe_aux_loss_workspace(const epx_moe_router_config* config, const epx_moe_aux_loss_args* args,
                                      size_t* bytes) {
  return at_c_boundary(__func__, [&] {
    require_config(config);
    require_struct(args, "args");
    require_sizes(args->logits, "logits", {{"T", kAnySize}, {"E", config->num_experts}});
    write_workspace(bytes, cuda::aux_loss_bytes(args->logits->sizes[0], config->num_experts));
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
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { cuda::enqueue(*args); });
    const ExpertLoad load = load_of(args->global_counts, experts);
    with_real(real, [&]<typename T>(T) { update_bias<T>(load, args->rate, experts, data_of<T>(args->selection_bias)); });
  });
}
