/* One MoE layer on epx: mpirun -n 4 moe_layer. The mean of its output is the same for every number of ranks. */
#include <epx/epx_moe.h>
#include <epx/epx_mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { ALL = 96, H = 64, F = 128, E = 8, K = 2 }; /* tokens of all ranks, hidden and inner size, experts, experts a token */
#define ARGS(type, ...) (&(type){.struct_size = sizeof(type), __VA_ARGS__})
#define LAYER .layer = layer, .handle_mem = plan, .handle_mem_bytes = bytes

static void check(epx_status status) {
  if (status != EPX_SUCCESS) fprintf(stderr, "moe_layer: %s\n", epx_last_error()), MPI_Abort(MPI_COMM_WORLD, 1);
}
static epx_tensor rows(uint32_t first, int32_t count, int32_t width) { /* of a table of numbers in [-0.25, 0.25) */
  float* data = malloc((count * width + 1) * sizeof(float));
  for (int32_t i = 0; i < count * width; ++i)
    data[i] = (float)((first * width + i) * 2654435769u >> 8) * 0x1p-25f - 0.25f;
  return epx_tensor_2d(data, EPX_FLOAT32, count, width);
}
int main(int argc, char** argv) {
  MPI_Init(&argc, &argv); /* 1. the ranks form a group */
  epx_bootstrap bootstrap;
  epx_group_config config;
  epx_group group;
  check(epx_bootstrap_mpi(MPI_COMM_WORLD, 30000, &bootstrap));
  check(epx_group_config_init(&config));
  config.num_experts = E, config.max_tokens_per_rank = ALL, config.hidden_dim = H, config.max_top_k = K;
  config.max_token_dtype = EPX_FLOAT32, config.combine_precision = EPX_COMBINE_EXACT, config.transport = EPX_TRANSPORT_HOST;
  check(epx_group_create(&bootstrap, &config, &group));
  epx_group_info me = {.struct_size = sizeof(me)};
  check(epx_group_query(group, &me));
  const int32_t first = ALL * me.rank / me.num_ranks, T = ALL * (me.rank + 1) / me.num_ranks - first; /* tokens here */
  const int32_t L = me.num_local_experts, e0 = me.first_local_expert;                                 /* experts here */

  int32_t idx[ALL * K], counts[E], offsets[E + 1]; /* 2. which experts, with which weights; a gate computes the logits */
  epx_tensor logits = rows(first, T, E), indices = epx_tensor_2d(idx, EPX_INT32, T, K), weights = rows(0, T, K);
  epx_moe_router_config router;
  check(epx_moe_router_config_init(&router, sizeof(router)));
  router.num_experts = E, router.top_k = K;
  check(epx_moe_router(&router,
                       ARGS(epx_moe_router_args, .logits = &logits, .topk_idx = &indices, .topk_weights = &weights)));

  const epx_layer layer = {.top_k = K}; /* 3. the plan: how many rows each expert here gets, and where they begin */
  size_t bytes;
  check(epx_handle_mem_size(group, &layer, &bytes));
  void* plan = aligned_alloc(16, (bytes + 15) / 16 * 16);
  epx_tensor zones = epx_tensor_1d(counts, EPX_INT32, L), begins = epx_tensor_1d(offsets, EPX_INT32, L + 1);
  check(epx_prepare(group, ARGS(epx_prepare_args, LAYER, .topk_idx = &indices, .counts = &zones, .offsets = &begins)));

  const int32_t N = offsets[L]; /* 4. tokens and weights travel to the experts */
  epx_tensor tokens = rows(first, T, H), recv = rows(0, N, H), w = epx_tensor_1d(rows(0, N, 1).data, EPX_FLOAT32, N);
  check(epx_dispatch(group, ARGS(epx_dispatch_args, LAYER, .tokens = &tokens, .topk_weights = &weights,
                                 .recv_tokens = &recv, .recv_weights = &w)));

  /* 5. each expert computes its rows */
  epx_moe_ffn_config ffn = {.struct_size = sizeof(ffn), .num_local_experts = L, .hidden_dim = H, .ffn_dim = F};
  epx_tensor gate_up = epx_tensor_3d(rows(e0 * 2 * F, L * 2 * F, H).data, EPX_FLOAT32, L, 2 * F, H);
  epx_tensor down = epx_tensor_3d(rows(e0 * H, L * H, F).data, EPX_FLOAT32, L, H, F), results = rows(0, N, H);
  epx_moe_ffn_params params = {.struct_size = sizeof(params), .gate_up_weight = &gate_up, .down_weight = &down};
  check(epx_moe_ffn(&ffn, ARGS(epx_moe_ffn_args, .params = &params, .recv_tokens = &recv, .counts = &zones,
                               .offsets = &begins, .expert_out = &results)));

  epx_tensor out = rows(0, T, H); /* 6. the results travel home, and are summed with their weights */
  check(epx_combine(group, ARGS(epx_combine_args, LAYER, .expert_out = &results, .recv_weights = &w, .out = &out)));

  double sum = 0, total = 0;
  for (int32_t i = 0; i < T * H; ++i)
    sum += ((float*)out.data)[i];
  MPI_Reduce(&sum, &total, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  if (me.rank == 0) printf("%d ranks, %d experts: the mean output is %.9f\n", me.num_ranks, E, total / (ALL * H));
  epx_group_destroy(group);
  epx_bootstrap_free(&bootstrap);
  MPI_Finalize();
}
