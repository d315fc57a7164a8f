/* SPDX-License-Identifier: Apache-2.0 */
/* A small framework in C11 that knows only the installed epx.h. Its ranks join through files, create a group, and run a
 * layer forward and backward. Experts are the identity, so that every result has a closed form, exact in float32.
 *   consumer DIRECTORY RANK NUM_RANKS VERSION
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <epx/epx.h>

enum { EXPERTS = 3, HIDDEN = 7, TOP_K = 2, ALIGNMENT = 4, MAX_TOKENS = 8, MAX_RANKS = 4, TIMEOUT_MS = 30000 };
enum { MAX_ROWS = MAX_RANKS * MAX_TOKENS * TOP_K + EXPERTS * ALIGNMENT };

static int my_rank;

static void require(int ok, const char* what, const char* detail) {
  if (ok) return;
  fprintf(stderr, "rank %d: %s: %s\n", my_rank, what, detail);
  exit(1);
}

static void require_success(epx_status status, const char* call) {
  if (status == EPX_SUCCESS) return;
  fprintf(stderr, "rank %d: %s: %s: %s\n", my_rank, call, epx_status_string(status), epx_last_error());
  exit(1);
}

static void require_equal(double actual, double expected, const char* what) {
  if (actual == expected) return;
  fprintf(stderr, "rank %d: %s is %g, expected %g\n", my_rank, what, actual, expected);
  exit(1);
}

/* The closed forms. */
static float token_at(int rank, int t, int h) {
  return (float)(100 * rank + 10 * t + h);
}
static float grad_at(int rank, int t, int h) {
  return (float)(rank + t + h + 1);
}
static float weight_at(int k) {
  return k == 0 ? 0.5f : 2.0f;
}

static float dot_at(int rank, int t) {
  float sum = 0;
  for (int h = 0; h < HIDDEN; ++h)
    sum += token_at(rank, t, h) * grad_at(rank, t, h);
  return sum;
}

static int64_t topk_idx[MAX_TOKENS * TOP_K];
static float tokens[MAX_TOKENS * HIDDEN], weights[MAX_TOKENS * TOP_K], out[MAX_TOKENS * HIDDEN];
static float grad_out[MAX_TOKENS * HIDDEN], grad_tokens[MAX_TOKENS * HIDDEN], grad_weights[MAX_TOKENS * TOP_K];
static float recv_tokens[MAX_ROWS * HIDDEN], recv_weights[MAX_ROWS];
static float grad_expert_out[MAX_ROWS * HIDDEN], grad_recv_weights[MAX_ROWS];
static int32_t slot_origin[MAX_ROWS * 3];

static void fill_inputs(int num_tokens) {
  for (int t = 0; t < num_tokens; ++t) {
    for (int k = 0; k < TOP_K; ++k) {
      topk_idx[t * TOP_K + k] = (my_rank + t + k) % EXPERTS;
      weights[t * TOP_K + k] = weight_at(k);
    }
    for (int h = 0; h < HIDDEN; ++h) {
      tokens[t * HIDDEN + h] = token_at(my_rank, t, h);
      grad_out[t * HIDDEN + h] = grad_at(my_rank, t, h);
    }
  }
}

static epx_group create_group(const epx_bootstrap* bootstrap, int64_t* rows) {
  epx_group_config config;
  require_success(epx_group_config_init(&config), "epx_group_config_init");
  config.num_experts = EXPERTS;
  config.max_tokens_per_rank = MAX_TOKENS;
  config.hidden_dim = HIDDEN;
  config.max_top_k = TOP_K;
  config.max_alignment = ALIGNMENT;
  config.max_token_dtype = EPX_FLOAT32;
  config.transport = EPX_TRANSPORT_HOST; /* its tensors are in host memory */
  config.timeout_ms = TIMEOUT_MS;

  epx_memory_plan plan;
  plan.struct_size = sizeof(plan);
  require_success(epx_group_memory_plan(&config, bootstrap->num_ranks, &plan), "epx_group_memory_plan");
  *rows = plan.max_recv_tokens_per_rank;
  require(*rows <= MAX_ROWS, "R", "more rows than this program has");

  epx_group group = NULL;
  require_success(epx_group_create(bootstrap, &config, &group), "epx_group_create");
  return group;
}

/* Checks that each slot holds what its origin sent. */
static void check_received(int64_t rows_in_use) {
  for (int64_t s = 0; s < rows_in_use; ++s) {
    const int rank = slot_origin[3 * s], t = slot_origin[3 * s + 1], k = slot_origin[3 * s + 2];
    require_equal(recv_weights[s], rank < 0 ? 0 : weight_at(k), "recv_weights");
    require_equal(grad_recv_weights[s], rank < 0 ? 0 : dot_at(rank, t), "grad_recv_weights");
    for (int h = 0; h < HIDDEN; ++h) {
      require_equal(recv_tokens[s * HIDDEN + h], rank < 0 ? 0 : token_at(rank, t, h), "recv_tokens");
      require_equal(grad_expert_out[s * HIDDEN + h], rank < 0 ? 0 : weight_at(k) * grad_at(rank, t, h), "grad_expert_out");
    }
  }
}

static void check_returned(int num_tokens) {
  const float total = weight_at(0) + weight_at(1);
  for (int t = 0; t < num_tokens; ++t) {
    for (int h = 0; h < HIDDEN; ++h) {
      require_equal(out[t * HIDDEN + h], total * token_at(my_rank, t, h), "out");
      require_equal(grad_tokens[t * HIDDEN + h], total * grad_at(my_rank, t, h), "grad_tokens");
    }
    for (int k = 0; k < TOP_K; ++k)
      require_equal(grad_weights[t * TOP_K + k], dot_at(my_rank, t), "grad_topk_weights");
  }
}

static void run_layer(epx_group group, int num_tokens, int64_t rows) {
  epx_group_info group_info;
  group_info.struct_size = sizeof(group_info);
  require_success(epx_group_query(group, &group_info), "epx_group_query");
  const int num_local = group_info.num_local_experts;

  const epx_layer layer = {TOP_K, ALIGNMENT};
  size_t handle_bytes = 0;
  require_success(epx_handle_mem_size(group, &layer, &handle_bytes), "epx_handle_mem_size");
  void* handle = aligned_alloc(16, (handle_bytes + 15) / 16 * 16);
  require(handle != NULL, "aligned_alloc", "no memory for the handle");

  int32_t counts[EXPERTS], offsets[EXPERTS + 1];
  const epx_tensor topk_idx_t = epx_tensor_2d(topk_idx, EPX_INT64, num_tokens, TOP_K);
  const epx_tensor weights_t = epx_tensor_2d(weights, EPX_FLOAT32, num_tokens, TOP_K);
  const epx_tensor tokens_t = epx_tensor_2d(tokens, EPX_FLOAT32, num_tokens, HIDDEN);
  const epx_tensor out_t = epx_tensor_2d(out, EPX_FLOAT32, num_tokens, HIDDEN);
  const epx_tensor grad_out_t = epx_tensor_2d(grad_out, EPX_FLOAT32, num_tokens, HIDDEN);
  const epx_tensor grad_tokens_t = epx_tensor_2d(grad_tokens, EPX_FLOAT32, num_tokens, HIDDEN);
  const epx_tensor grad_weights_t = epx_tensor_2d(grad_weights, EPX_FLOAT32, num_tokens, TOP_K);
  const epx_tensor recv_tokens_t = epx_tensor_2d(recv_tokens, EPX_FLOAT32, rows, HIDDEN);
  const epx_tensor recv_weights_t = epx_tensor_1d(recv_weights, EPX_FLOAT32, rows);
  const epx_tensor grad_expert_out_t = epx_tensor_2d(grad_expert_out, EPX_FLOAT32, rows, HIDDEN);
  const epx_tensor grad_recv_weights_t = epx_tensor_1d(grad_recv_weights, EPX_FLOAT32, rows);
  const epx_tensor counts_t = epx_tensor_1d(counts, EPX_INT32, num_local);
  const epx_tensor offsets_t = epx_tensor_1d(offsets, EPX_INT32, num_local + 1);
  const epx_tensor slot_origin_t = epx_tensor_2d(slot_origin, EPX_INT32, rows, 3);

  epx_prepare_args prepare = {0};
  prepare.struct_size = sizeof(prepare);
  prepare.layer = layer;
  prepare.handle_mem = handle;
  prepare.handle_mem_bytes = handle_bytes;
  prepare.topk_idx = &topk_idx_t;
  prepare.counts = &counts_t;
  prepare.offsets = &offsets_t;
  prepare.slot_origin = &slot_origin_t;
  require_success(epx_prepare(group, &prepare), "epx_prepare");

  epx_dispatch_args dispatch = {0};
  dispatch.struct_size = sizeof(dispatch);
  dispatch.layer = layer;
  dispatch.handle_mem = handle;
  dispatch.handle_mem_bytes = handle_bytes;
  dispatch.tokens = &tokens_t;
  dispatch.topk_weights = &weights_t;
  dispatch.recv_tokens = &recv_tokens_t;
  dispatch.recv_weights = &recv_weights_t;
  require_success(epx_dispatch(group, &dispatch), "epx_dispatch");

  epx_combine_args combine = {0};
  combine.struct_size = sizeof(combine);
  combine.layer = layer;
  combine.handle_mem = handle;
  combine.handle_mem_bytes = handle_bytes;
  combine.expert_out = &recv_tokens_t;
  combine.recv_weights = &recv_weights_t;
  combine.out = &out_t;
  require_success(epx_combine(group, &combine), "epx_combine");

  epx_combine_bwd_args combine_bwd = {0};
  combine_bwd.struct_size = sizeof(combine_bwd);
  combine_bwd.layer = layer;
  combine_bwd.handle_mem = handle;
  combine_bwd.handle_mem_bytes = handle_bytes;
  combine_bwd.grad_out = &grad_out_t;
  combine_bwd.expert_out = &recv_tokens_t;
  combine_bwd.recv_weights = &recv_weights_t;
  combine_bwd.grad_expert_out = &grad_expert_out_t;
  combine_bwd.grad_recv_weights = &grad_recv_weights_t;
  require_success(epx_combine_bwd(group, &combine_bwd), "epx_combine_bwd");

  epx_dispatch_bwd_args dispatch_bwd = {0};
  dispatch_bwd.struct_size = sizeof(dispatch_bwd);
  dispatch_bwd.layer = layer;
  dispatch_bwd.handle_mem = handle;
  dispatch_bwd.handle_mem_bytes = handle_bytes;
  dispatch_bwd.grad_recv = &grad_expert_out_t;
  dispatch_bwd.grad_recv_weights = &grad_recv_weights_t;
  dispatch_bwd.grad_tokens = &grad_tokens_t;
  dispatch_bwd.grad_topk_weights = &grad_weights_t;
  require_success(epx_dispatch_bwd(group, &dispatch_bwd), "epx_dispatch_bwd");

  check_received(offsets[num_local]);
  check_returned(num_tokens);
  free(handle);
}

/* The rank-major layout, forward: each rank holds a token once, and the experts are the identity. */
static void run_rank_major(epx_group group, int num_tokens, int num_ranks) {
  const epx_layer layer = {TOP_K, 0};
  size_t handle_bytes = 0;
  require_success(epx_handle_mem_size(group, &layer, &handle_bytes), "epx_handle_mem_size");
  void* handle = aligned_alloc(16, (handle_bytes + 15) / 16 * 16);
  require(handle != NULL, "aligned_alloc", "no memory for the handle");
  static int32_t recv_topk_idx[MAX_RANKS * MAX_TOKENS * TOP_K];
  int32_t counts[MAX_RANKS];
  const epx_tensor topk_idx_t = epx_tensor_2d(topk_idx, EPX_INT64, num_tokens, TOP_K);
  const epx_tensor tokens_t = epx_tensor_2d(tokens, EPX_FLOAT32, num_tokens, HIDDEN);
  const epx_tensor rows_t = epx_tensor_3d(recv_tokens, EPX_FLOAT32, num_ranks, MAX_TOKENS, HIDDEN);
  const epx_tensor recv_topk_idx_t = epx_tensor_3d(recv_topk_idx, EPX_INT32, num_ranks, MAX_TOKENS, TOP_K);
  const epx_tensor counts_t = epx_tensor_1d(counts, EPX_INT32, num_ranks);
  const epx_tensor out_t = epx_tensor_2d(out, EPX_FLOAT32, num_tokens, HIDDEN);

  epx_dispatch_rank_major_args dispatch = {0};
  dispatch.struct_size = sizeof(dispatch);
  dispatch.layer = layer;
  dispatch.handle_mem = handle;
  dispatch.handle_mem_bytes = handle_bytes;
  dispatch.tokens = &tokens_t;
  dispatch.topk_idx = &topk_idx_t;
  dispatch.recv_tokens = &rows_t;
  dispatch.recv_topk_idx = &recv_topk_idx_t;
  dispatch.counts = &counts_t;
  require_success(epx_dispatch_rank_major(group, &dispatch), "epx_dispatch_rank_major");
  for (int source = 0; source < num_ranks; ++source)
    for (int row = 0; row < counts[source]; ++row) {
      const int at = source * MAX_TOKENS + row;
      require(recv_topk_idx[at * TOP_K] >= 0 || recv_topk_idx[at * TOP_K + 1] >= 0, "recv_topk_idx",
              "a row without a route");
      require_equal(recv_tokens[at * HIDDEN + 1] - recv_tokens[at * HIDDEN], 1, "a row of tokens");
    }

  epx_combine_rank_major_args combine = {0};
  combine.struct_size = sizeof(combine);
  combine.layer = layer;
  combine.handle_mem = handle;
  combine.handle_mem_bytes = handle_bytes;
  combine.expert_out = &rows_t;
  combine.out = &out_t;
  require_success(epx_combine_rank_major(group, &combine), "epx_combine_rank_major");
  for (int t = 0; t < num_tokens; ++t) {
    int owner[TOP_K]; /* the first E mod P ranks own one expert more */
    for (int k = 0; k < TOP_K; ++k) {
      const int expert = (int)topk_idx[t * TOP_K + k], extra = EXPERTS % num_ranks, base = EXPERTS / num_ranks;
      owner[k] = expert < extra * (base + 1) ? expert / (base + 1) : extra + (expert - extra * (base + 1)) / base;
    }
    for (int h = 0; h < HIDDEN; ++h)
      require_equal(out[t * HIDDEN + h], (owner[0] == owner[1] ? 1 : 2) * token_at(my_rank, t, h), "the rank-major sum");
  }
  free(handle);
}

int main(int argc, char** argv) {
  require(argc == 5, "usage", "consumer DIRECTORY RANK NUM_RANKS VERSION");
  my_rank = atoi(argv[2]);
  const int num_ranks = atoi(argv[3]);
  require(num_ranks <= MAX_RANKS, "NUM_RANKS", argv[3]);

  char version[32];
  snprintf(version, sizeof(version), "%d.%d.%d", EPX_VERSION_MAJOR, EPX_VERSION_MINOR, EPX_VERSION_PATCH);
  require(strcmp(version, argv[4]) == 0, "the header's version is not the .pc file's", version);
  require_equal(epx_version(), EPX_VERSION_MAJOR * 10000 + EPX_VERSION_MINOR * 100 + EPX_VERSION_PATCH, "epx_version");

  epx_bootstrap bootstrap;
  require_success(epx_bootstrap_file(argv[1], "consumer", my_rank, num_ranks, TIMEOUT_MS, &bootstrap),
                  "epx_bootstrap_file");
  int64_t rows = 0;
  epx_group group = create_group(&bootstrap, &rows);
  epx_bootstrap_free(&bootstrap);

  const int num_tokens = 5 + my_rank;
  fill_inputs(num_tokens);
  run_layer(group, num_tokens, rows);
  run_rank_major(group, num_tokens, num_ranks);

  epx_group_report report;
  report.struct_size = sizeof(report);
  require_success(epx_group_status(group, &report), "epx_group_status");
  require(report.message[0] == '\0', "the group reports", report.message);
  epx_group_destroy(group);
  printf("rank %d of %d: right\n", my_rank, num_ranks);
  return 0;
}
