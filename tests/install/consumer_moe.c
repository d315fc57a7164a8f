/* SPDX-License-Identifier: Apache-2.0 */
/* This C11 program uses an installed libepx_moe: a block with two experts that compute relu(w x)^2, on one rank. */
#include <epx/epx_moe.h>
#include <stdio.h>

static int fail(const char* what) {
  fprintf(stderr, "consumer_moe: %s: %s\n", what, epx_last_error());
  return 1;
}

int main(void) {
  epx_moe_router_config router;
  if (epx_moe_router_config_init(&router, sizeof(router)) != EPX_SUCCESS) return fail("epx_moe_router_config_init");
  router.num_experts = 2;
  router.top_k = 1;
  epx_moe_ffn_config ffn;
  if (epx_moe_ffn_config_init(&ffn, sizeof(ffn)) != EPX_SUCCESS) return fail("epx_moe_ffn_config_init");
  ffn.hidden_dim = 1;
  ffn.ffn_dim = 1;
  ffn.activation = EPX_MOE_RELU2;
  epx_moe_block_config config;
  if (epx_moe_block_config_init(&config, sizeof(config)) != EPX_SUCCESS) return fail("epx_moe_block_config_init");
  config.router = &router;
  config.ffn = &ffn;
  config.max_tokens_per_rank = 3;
  epx_moe_block block = NULL;
  if (epx_moe_block_create(NULL, &config, &block) != EPX_SUCCESS) return fail("epx_moe_block_create");

  float token_data[3] = {1, 2, 3}, logit_data[6] = {1, 0, 0, 1, 1, 0}, up_data[2] = {1, -1}, down_data[2] = {2, 4};
  float out_data[3] = {-1, -1, -1};
  const float expected[3] = {2 * 1, 0, 2 * 9}; /* tokens 0 and 2 go to expert 0, token 1 to expert 1, whose relu is 0 */
  const epx_tensor tokens = epx_tensor_2d(token_data, EPX_FLOAT32, 3, 1);
  const epx_tensor logits = epx_tensor_2d(logit_data, EPX_FLOAT32, 3, 2);
  const epx_tensor out = epx_tensor_2d(out_data, EPX_FLOAT32, 3, 1);
  const epx_tensor up = epx_tensor_3d(up_data, EPX_FLOAT32, 2, 1, 1);
  const epx_tensor down = epx_tensor_3d(down_data, EPX_FLOAT32, 2, 1, 1);
  const epx_moe_ffn_params params = {.struct_size = sizeof(params), .up_weight = &up, .down_weight = &down};
  const epx_moe_block_fwd_args args = {
      .struct_size = sizeof(args), .tokens = &tokens, .logits = &logits, .params = &params, .out = &out};
  if (epx_moe_block_fwd(block, &args) != EPX_SUCCESS) return fail("epx_moe_block_fwd");
  for (int t = 0; t < 3; ++t) {
    if (out_data[t] == expected[t]) continue;
    fprintf(stderr, "consumer_moe: out[%d] is %g, expected %g\n", t, (double)out_data[t], (double)expected[t]);
    return 1;
  }
  if (epx_moe_block_destroy(block) != EPX_SUCCESS) return fail("epx_moe_block_destroy");
  return 0;
}
