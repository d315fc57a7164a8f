// SPDX-License-Identifier: Apache-2.0
#include "moe/router/calls.h"

#include "moe/router/arguments.h"
#include "moe/router/cuda/enqueue.h"
#include "moe/router/router.h"

namespace epx::moe {
namespace {

// Throws unless the config's numbers are finite in the type of the computation.
template <typename T>
void require_finite_config(const epx_moe_router_config& config) {
  require_finite<T>(config.scaling_factor, "scaling_factor");
  require_finite<T>(config.aux_loss_coeff, "aux_loss_coeff");
}

} // namespace

CheckedRouter::CheckedRouter(const epx_moe_router_config& config, const epx_moe_router_args* args) : config_(config) {
  const Place place = require_args(args);
  args_ = *args;
  const int64_t tokens = require_logits(args_.logits, config, place);
  const epx_dtype real = real_of(*args_.logits, place);
  allow_tensor(args_.selection_bias, "selection_bias", {real}, {{"E", config.num_experts}});
  allow_tensor(args_.token_mask, "token_mask", {EPX_UINT8}, {{"T", tokens}});
  require_tensor(args_.topk_idx, "topk_idx", kInteger, {{"T", tokens}, {"K", config.top_k}});
  require_tensor(args_.topk_weights, "topk_weights", {real}, {{"T", tokens}, {"K", config.top_k}});
  allow_tensor(args_.info, "info", {EPX_INT64}, {{"3", 3}});
  with_real(real, [&]<typename T>(T) { require_finite_config<T>(config); });
  if (place == Place::cuda) enqueue_on_cuda([&](auto) { cuda_.emplace(cuda::make_call(config, args_)); });
}

void CheckedRouter::run() const {
  if (cuda_) return enqueue_on_cuda([&](auto) { cuda::enqueue(config_, args_, *cuda_); });
  with_real(args_.logits->dtype, [&]<typename T>(T) { route<T>(config_, args_); });
}

CheckedRouterBwd::CheckedRouterBwd(const epx_moe_router_config& config, const epx_moe_router_bwd_args* args)
    : config_(config) {
  const Place place = require_args(args);
  args_ = *args;
  const int64_t tokens = require_logits(args_.logits, config, place);
  const epx_dtype real = real_of(*args_.logits, place);
  require_selection_shape(args_.topk_idx, config, tokens);
  allow_tensor(args_.grad_topk_weights, "grad_topk_weights", {real}, {{"T", tokens}, {"K", config.top_k}});
  require_tensor(args_.grad_logits, "grad_logits", {args_.logits->dtype}, {{"T", tokens}, {"E", config.num_experts}});
  if (config.aux_loss_coeff == 0 && args_.global_counts != nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT, "global_counts is given, but aux_loss_coeff is 0: there is no loss that needs it");
  if (config.aux_loss_coeff != 0 && args_.global_counts == nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT, "global_counts is NULL; aux_loss_coeff is {}, and that loss needs them",
         config.aux_loss_coeff);
  if (args_.global_counts != nullptr) require_counts(args_.global_counts, config.num_experts);
  with_real(real, [&]<typename T>(T) {
    require_finite_config<T>(config);
    require_finite<T>(args_.aux_loss_grad, "aux_loss_grad");
  });
  if (place == Place::cuda) enqueue_on_cuda([&](auto) { cuda_.emplace(cuda::make_call(config, args_)); });
}

void CheckedRouterBwd::run() const {
  if (cuda_) return enqueue_on_cuda([&](auto) { cuda::enqueue(config_, args_, *cuda_); });
  require_selection(*args_.topk_idx, config_);
  std::optional<ExpertLoad> load;
  if (args_.global_counts != nullptr) load = load_of(*args_.global_counts, config_.num_experts);
  with_real(args_.logits->dtype, [&]<typename T>(T) { route_bwd<T>(config_, args_, load ? &*load : nullptr); });
}

} // namespace epx::moe
