// SPDX-License-Identifier: Apache-2.0
#include "moe/router/arguments.h"

namespace epx::moe {

void require_config(const epx_moe_router_config* config) {
  require_struct(config, "config");
  validate(*config);
}

int64_t require_logits(const epx_tensor* logits, const epx_moe_router_config& config, Place place) {
  require_tensor(logits, "logits", place == Place::cuda ? kCudaLogits : kReal,
                 {{"T", kAnySize}, {"E", config.num_experts}});
  return logits->sizes[0];
}

epx_dtype real_of(const epx_tensor& logits, Place place) {
  return place == Place::cuda ? EPX_FLOAT32 : logits.dtype;
}

void require_selection_shape(const epx_tensor* topk_idx, const epx_moe_router_config& config, int64_t num_tokens) {
  require_tensor(topk_idx, "topk_idx", kInteger, {{"T", num_tokens}, {"K", config.top_k}});
}

void require_selection(const epx_tensor& topk_idx, const epx_moe_router_config& config) {
  const Integers indices(&topk_idx);
  for (int64_t t = 0; t < topk_idx.sizes[0]; ++t) {
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

ExpertLoad load_of(const epx_tensor& global_counts, int32_t num_experts) {
  const Integers counts(&global_counts);
  for (int64_t i = 0; i < global_counts.sizes[0] * num_experts; ++i)
    if (counts[i] < 0)
      fail(EPX_ERROR_INVALID_ARGUMENT, "global_counts[{}, {}] is {}; counts are not negative", i / num_experts,
           i % num_experts, counts[i]);
  return {counts, global_counts.sizes[0], num_experts};
}

} // namespace epx::moe
