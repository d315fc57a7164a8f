/* SPDX-License-Identifier: Apache-2.0 */
/* A program of 0.1: knows only 0.1's headers (the folder 0.1), and runs with today's library. Takes a layer forward, with the
 * identity as experts, and reads the outputs, behind which nothing may be written.
 *   caller_0_1 DIRECTORY RANK NUM_RANKS
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <epx/epx.h>

enum { EXPERTS = 3, HIDDEN = 5, TOP_K = 2, TOKENS = 4, MAX_RANKS = 4, TIMEOUT_MS = 30000 };
enum { MAX_ROWS = MAX_RANKS * TOKENS * TOP_K, BEYOND = 256, UNTOUCHED = 0xa5 };

_Static_assert(sizeof(epx_group_info) == 88, "these are not the headers of 0.1");

/* An output of 0.1's size, and what lies behind it in the caller's memory. */
#define OUTPUT(type)                                                                                                       \
  struct {                                                                                                                 \
    type value;                                                                                                            \
    unsigned char beyond[BEYOND];                                                                                          \
  }
#define PREPARE_OUTPUT(output)                                                                                             \
  (memset(&(output), UNTOUCHED, sizeof(output)), (output).value.struct_size = sizeof(output.value))
#define CHECK_OUTPUT(output) check_output(#output, (output).value.struct_size, sizeof((output).value), (output).beyond)

static void fail(const char* what, const char* detail) {
  fprintf(stderr, "%s: %s\n", what, detail);
  exit(1);
}

static void require_success(epx_status status, const char* call) {
  if (status != EPX_SUCCESS) fail(call, epx_last_error());
}

static void require(int ok, const char* what) {
  if (!ok) fail("wrong", what);
}

static void check_output(const char* name, size_t struct_size, size_t expected_size, const unsigned char* beyond) {
  if (struct_size != expected_size) fail(name, "struct_size has changed");
  for (int i = 0; i < BEYOND; ++i)
    if (beyond[i] != UNTOUCHED) fail(name, "something is written behind it");
}

static void check_plan(const epx_group_config* config, int num_ranks) {
  OUTPUT(epx_memory_plan) plan;
  PREPARE_OUTPUT(plan);
  require_success(epx_group_memory_plan(config, num_ranks, &plan.value), "epx_group_memory_plan");
  CHECK_OUTPUT(plan);
  require(plan.value.max_recv_tokens_per_rank == num_ranks * TOKENS * TOP_K, "plan.max_recv_tokens_per_rank");
  require(plan.value.window_bytes > 0 && plan.value.handle_mem_bytes > 0, "the plan's bytes");
}

static void check_info(epx_group group, int rank, int num_ranks) {
  OUTPUT(epx_group_info) group_info;
  PREPARE_OUTPUT(group_info);
  require_success(epx_group_query(group, &group_info.value), "epx_group_query");
  CHECK_OUTPUT(group_info);
  require(group_info.value.rank == rank && group_info.value.num_ranks == num_ranks, "info.rank, info.num_ranks");
  require(group_info.value.num_experts == EXPERTS && group_info.value.transport == EPX_TRANSPORT_HOST, "info.num_experts");
  require(group_info.value.max_token_dtype == EPX_FLOAT32, "info.max_token_dtype");
  require(group_info.value.combine_precision == EPX_COMBINE_WIRE, "info.combine_precision");
}

/* A bad index is reported once. */
static void check_report(epx_group group, uint64_t bad_indices) {
  OUTPUT(epx_group_report) report;
  PREPARE_OUTPUT(report);
  require_success(epx_group_status(group, &report.value), "epx_group_status");
  CHECK_OUTPUT(report);
  require(report.value.status == EPX_SUCCESS && report.value.culprit == -1, "report.status, report.culprit");
  require(report.value.event_counts[EPX_EVENT_BAD_INDEX] == bad_indices, "report.event_counts");
  require((report.value.message[0] == '\0') == (bad_indices == 0), "report.message");
}

static float token_at(int rank, int t, int h) {
  return (float)(100 * rank + 10 * t + h);
}

/* All routes but that of token 0's second choice, which is a bad index. */
static void run_layer(epx_group group, int rank, int64_t rows) {
  static int32_t topk_idx[TOKENS * TOP_K], counts[EXPERTS], offsets[EXPERTS + 1];
  static float tokens[TOKENS * HIDDEN], recv_tokens[MAX_ROWS * HIDDEN], out[TOKENS * HIDDEN];
  const epx_layer layer = {TOP_K, 0};
  size_t handle_bytes = 0;
  require_success(epx_handle_mem_size(group, &layer, &handle_bytes), "epx_handle_mem_size");
  void* handle = aligned_alloc(16, (handle_bytes + 15) / 16 * 16);
  require(handle != NULL, "aligned_alloc");
  for (int t = 0; t < TOKENS; ++t) {
    for (int k = 0; k < TOP_K; ++k)
      topk_idx[t * TOP_K + k] = t == 0 && k == 1 ? EXPERTS : (rank + t + k) % EXPERTS;
    for (int h = 0; h < HIDDEN; ++h)
      tokens[t * HIDDEN + h] = token_at(rank, t, h);
  }

  epx_group_info group_info = {.struct_size = sizeof(group_info)};
  require_success(epx_group_query(group, &group_info), "epx_group_query");
  const epx_tensor topk_idx_t = epx_tensor_2d(topk_idx, EPX_INT32, TOKENS, TOP_K);
  const epx_tensor counts_t = epx_tensor_1d(counts, EPX_INT32, group_info.num_local_experts);
  const epx_tensor offsets_t = epx_tensor_1d(offsets, EPX_INT32, group_info.num_local_experts + 1);
  const epx_tensor tokens_t = epx_tensor_2d(tokens, EPX_FLOAT32, TOKENS, HIDDEN);
  const epx_tensor recv_tokens_t = epx_tensor_2d(recv_tokens, EPX_FLOAT32, rows, HIDDEN);
  const epx_tensor out_t = epx_tensor_2d(out, EPX_FLOAT32, TOKENS, HIDDEN);

  const epx_prepare_args prepare = {.struct_size = sizeof(prepare),
                                    .layer = layer,
                                    .handle_mem = handle,
                                    .handle_mem_bytes = handle_bytes,
                                    .topk_idx = &topk_idx_t,
                                    .counts = &counts_t,
                                    .offsets = &offsets_t};
  require_success(epx_prepare(group, &prepare), "epx_prepare");
  const epx_dispatch_args dispatch = {.struct_size = sizeof(dispatch),
                                      .layer = layer,
                                      .handle_mem = handle,
                                      .handle_mem_bytes = handle_bytes,
                                      .tokens = &tokens_t,
                                      .recv_tokens = &recv_tokens_t};
  require_success(epx_dispatch(group, &dispatch), "epx_dispatch");
  const epx_combine_args combine = {.struct_size = sizeof(combine),
                                    .layer = layer,
                                    .handle_mem = handle,
                                    .handle_mem_bytes = handle_bytes,
                                    .expert_out = &recv_tokens_t,
                                    .out = &out_t};
  require_success(epx_combine(group, &combine), "epx_combine");

  for (int t = 0; t < TOKENS; ++t) {
    const int routes = t == 0 ? TOP_K - 1 : TOP_K;
    for (int h = 0; h < HIDDEN; ++h)
      require(out[t * HIDDEN + h] == (float)routes * token_at(rank, t, h), "out");
  }
  /* Both backwards, on the same memory: what they compute other suites look at. */
  const epx_combine_bwd_args combine_bwd = {.struct_size = sizeof(combine_bwd),
                                            .layer = layer,
                                            .handle_mem = handle,
                                            .handle_mem_bytes = handle_bytes,
                                            .grad_out = &tokens_t,
                                            .grad_expert_out = &recv_tokens_t};
  require_success(epx_combine_bwd(group, &combine_bwd), "epx_combine_bwd");
  const epx_dispatch_bwd_args dispatch_bwd = {.struct_size = sizeof(dispatch_bwd),
                                              .layer = layer,
                                              .handle_mem = handle,
                                              .handle_mem_bytes = handle_bytes,
                                              .grad_recv = &recv_tokens_t,
                                              .grad_tokens = &out_t};
  require_success(epx_dispatch_bwd(group, &dispatch_bwd), "epx_dispatch_bwd");
  free(handle);
}

int main(int argc, char** argv) {
  if (argc != 4) fail("usage", "caller_0_1 DIRECTORY RANK NUM_RANKS");
  const int rank = atoi(argv[2]), num_ranks = atoi(argv[3]);
  if (num_ranks > MAX_RANKS) fail("NUM_RANKS", argv[3]);

  epx_group_config config;
  require_success(epx_group_config_init(&config), "epx_group_config_init");
  require(config.struct_size == sizeof(config), "config.struct_size");
  config.num_experts = EXPERTS;
  config.max_tokens_per_rank = TOKENS;
  config.hidden_dim = HIDDEN;
  config.max_top_k = TOP_K;
  config.max_alignment = 1;
  config.max_token_dtype = EPX_FLOAT32;
  config.transport = EPX_TRANSPORT_HOST;
  config.timeout_ms = TIMEOUT_MS;
  check_plan(&config, num_ranks);

  epx_bootstrap bootstrap;
  require_success(epx_bootstrap_file(argv[1], "caller_0_1", rank, num_ranks, TIMEOUT_MS, &bootstrap), "epx_bootstrap_file");
  require(bootstrap.struct_size == sizeof(bootstrap), "bootstrap.struct_size");
  epx_group group = NULL;
  require_success(epx_group_create(&bootstrap, &config, &group), "epx_group_create");
  epx_bootstrap_free(&bootstrap);
  check_info(group, rank, num_ranks);
  run_layer(group, rank, num_ranks * TOKENS * TOP_K);
  check_report(group, 1);
  check_report(group, 0);
  epx_group_destroy(group);
  printf("rank %d of %d: right\n", rank, num_ranks);
  return 0;
}
