/* SPDX-License-Identifier: Apache-2.0 */
/* The C API only grows: what a caller was compiled against stays where it was. A line that no longer holds does not compile, a
 * function that is gone does not link. New fields, values and functions get lines of their own; no line changes. Structs
 * that the library fills in without being told their size, and those that lie in others, keep their size. */
#include <stdio.h>

#include "epx/epx.h"

#define AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #type "." #field " has moved")
#define IS(enumerator, value) _Static_assert((enumerator) == (value), #enumerator " has another value")
#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type " has another size")

AT(epx_tensor, data, 0);
AT(epx_tensor, dtype, 8);
AT(epx_tensor, ndim, 12);
AT(epx_tensor, sizes, 16);
AT(epx_tensor, sidecar, 48);
AT(epx_tensor, sidecar_row_bytes, 56);
AT(epx_tensor, reserved, 64);
SIZE(epx_tensor, 80);

AT(epx_bootstrap, struct_size, 0);
AT(epx_bootstrap, rank, 8);
AT(epx_bootstrap, num_ranks, 12);
AT(epx_bootstrap, all_gather, 16);
AT(epx_bootstrap, release, 24);
AT(epx_bootstrap, context, 32);
AT(epx_bootstrap, reserved, 40);
SIZE(epx_bootstrap, 64);

AT(epx_group_config, struct_size, 0);
AT(epx_group_config, num_experts, 8);
AT(epx_group_config, max_tokens_per_rank, 12);
AT(epx_group_config, hidden_dim, 16);
AT(epx_group_config, max_top_k, 20);
AT(epx_group_config, max_alignment, 24);
AT(epx_group_config, max_token_dtype, 28);
AT(epx_group_config, max_recv_tokens_per_rank, 32);
AT(epx_group_config, max_sidecar_bytes, 40);
AT(epx_group_config, combine_precision, 44);
AT(epx_group_config, overflow, 48);
AT(epx_group_config, transport, 52);
AT(epx_group_config, num_comm_sms, 56);
AT(epx_group_config, color, 60);
AT(epx_group_config, key, 64);
AT(epx_group_config, timeout_ms, 72);
AT(epx_group_config, reserved, 80);
AT(epx_group_config, ranks_per_node, 120);
AT(epx_group_config, fixed_rail_tokens, 124);
SIZE(epx_group_config, 128);

AT(epx_group_info, struct_size, 0);
AT(epx_group_info, group_id, 8);
AT(epx_group_info, rank, 16);
AT(epx_group_info, num_ranks, 20);
AT(epx_group_info, num_experts, 24);
AT(epx_group_info, num_local_experts, 28);
AT(epx_group_info, first_local_expert, 32);
AT(epx_group_info, transport, 36);
AT(epx_group_info, max_recv_tokens_per_rank, 40);
AT(epx_group_info, window_bytes, 48);
AT(epx_group_info, timeout_ms, 56);
AT(epx_group_info, max_tokens_per_rank, 64);
AT(epx_group_info, hidden_dim, 68);
AT(epx_group_info, max_top_k, 72);
AT(epx_group_info, max_alignment, 76);
AT(epx_group_info, max_token_dtype, 80);
AT(epx_group_info, combine_precision, 84);
AT(epx_group_info, num_comm_sms, 88);
AT(epx_group_info, ranks_per_node, 92);

AT(epx_memory_plan, struct_size, 0);
AT(epx_memory_plan, max_recv_tokens_per_rank, 8);
AT(epx_memory_plan, window_bytes, 16);
AT(epx_memory_plan, control_bytes, 24);
AT(epx_memory_plan, count_bytes, 32);
AT(epx_memory_plan, slot_record_bytes, 40);
AT(epx_memory_plan, scatter_row_bytes, 48);
AT(epx_memory_plan, scatter_sidecar_bytes, 56);
AT(epx_memory_plan, scatter_weight_bytes, 64);
AT(epx_memory_plan, gather_row_bytes, 72);
AT(epx_memory_plan, gather_weight_bytes, 80);
AT(epx_memory_plan, scratch_bytes, 88);
AT(epx_memory_plan, handle_mem_bytes, 96);

AT(epx_load_report, struct_size, 0);
AT(epx_load_report, routes, 8);
AT(epx_load_report, dropped, 16);
AT(epx_load_report, rows_needed, 24);
AT(epx_load_report, most_routes_of_rank, 32);
AT(epx_load_report, most_routes_of_expert, 40);

AT(epx_group_report, struct_size, 0);
AT(epx_group_report, status, 8);
AT(epx_group_report, operation, 12);
AT(epx_group_report, phase, 16);
AT(epx_group_report, culprit, 20);
AT(epx_group_report, sequence, 24);
AT(epx_group_report, expected, 32);
AT(epx_group_report, seen, 40);
AT(epx_group_report, num_missing, 48);
AT(epx_group_report, missing, 52);
AT(epx_group_report, event_counts, 312);
AT(epx_group_report, first_event, 440);
AT(epx_group_report, first_event_operation, 444);
AT(epx_group_report, first_event_sequence, 448);
AT(epx_group_report, message, 456);

AT(epx_layer, top_k, 0);
AT(epx_layer, alignment, 4);
SIZE(epx_layer, 8);

AT(epx_prepare_args, struct_size, 0);
AT(epx_prepare_args, layer, 8);
AT(epx_prepare_args, handle_mem, 16);
AT(epx_prepare_args, handle_mem_bytes, 24);
AT(epx_prepare_args, stream, 32);
AT(epx_prepare_args, topk_idx, 40);
AT(epx_prepare_args, counts, 48);
AT(epx_prepare_args, offsets, 56);
AT(epx_prepare_args, global_counts, 64);
AT(epx_prepare_args, info, 72);
AT(epx_prepare_args, slot, 80);
AT(epx_prepare_args, slot_origin, 88);
AT(epx_prepare_args, zone_stride, 96);

AT(epx_dispatch_args, struct_size, 0);
AT(epx_dispatch_args, layer, 8);
AT(epx_dispatch_args, handle_mem, 16);
AT(epx_dispatch_args, handle_mem_bytes, 24);
AT(epx_dispatch_args, stream, 32);
AT(epx_dispatch_args, tokens, 40);
AT(epx_dispatch_args, topk_weights, 48);
AT(epx_dispatch_args, recv_tokens, 56);
AT(epx_dispatch_args, recv_weights, 64);
AT(epx_dispatch_args, pads, 72);
AT(epx_dispatch_args, reserved0, 76);
AT(epx_dispatch_args, format, 80);

AT(epx_row_format, struct_size, 0);
AT(epx_row_format, scaling, 8);
AT(epx_row_format, dtype, 12);
AT(epx_row_format, amax_floor, 16);
AT(epx_row_format, scale_layout, 20);
AT(epx_row_format, scales, 24);
AT(epx_row_format, row_scales, 32);
AT(epx_row_format, encode_scale, 40);
AT(epx_row_format, recv_scales, 48);
AT(epx_row_format, recv_row_scales, 56);
AT(epx_row_format, reserved, 64);
SIZE(epx_row_format, 96);

AT(epx_prepare_dispatch_args, struct_size, 0);
AT(epx_prepare_dispatch_args, layer, 8);
AT(epx_prepare_dispatch_args, handle_mem, 16);
AT(epx_prepare_dispatch_args, handle_mem_bytes, 24);
AT(epx_prepare_dispatch_args, stream, 32);
AT(epx_prepare_dispatch_args, topk_idx, 40);
AT(epx_prepare_dispatch_args, counts, 48);
AT(epx_prepare_dispatch_args, offsets, 56);
AT(epx_prepare_dispatch_args, global_counts, 64);
AT(epx_prepare_dispatch_args, info, 72);
AT(epx_prepare_dispatch_args, slot, 80);
AT(epx_prepare_dispatch_args, slot_origin, 88);
AT(epx_prepare_dispatch_args, tokens, 96);
AT(epx_prepare_dispatch_args, topk_weights, 104);
AT(epx_prepare_dispatch_args, recv_tokens, 112);
AT(epx_prepare_dispatch_args, recv_weights, 120);
AT(epx_prepare_dispatch_args, pads, 128);
AT(epx_prepare_dispatch_args, reserved0, 132);
AT(epx_prepare_dispatch_args, format, 136);
AT(epx_prepare_dispatch_args, zone_stride, 144);

AT(epx_combine_args, struct_size, 0);
AT(epx_combine_args, layer, 8);
AT(epx_combine_args, handle_mem, 16);
AT(epx_combine_args, handle_mem_bytes, 24);
AT(epx_combine_args, stream, 32);
AT(epx_combine_args, expert_out, 40);
AT(epx_combine_args, recv_weights, 48);
AT(epx_combine_args, out, 56);
AT(epx_combine_args, format, 64);

AT(epx_combine_bwd_args, struct_size, 0);
AT(epx_combine_bwd_args, layer, 8);
AT(epx_combine_bwd_args, handle_mem, 16);
AT(epx_combine_bwd_args, handle_mem_bytes, 24);
AT(epx_combine_bwd_args, stream, 32);
AT(epx_combine_bwd_args, grad_out, 40);
AT(epx_combine_bwd_args, expert_out, 48);
AT(epx_combine_bwd_args, recv_weights, 56);
AT(epx_combine_bwd_args, grad_expert_out, 64);
AT(epx_combine_bwd_args, grad_recv_weights, 72);
AT(epx_combine_bwd_args, format, 80);

AT(epx_dispatch_bwd_args, struct_size, 0);
AT(epx_dispatch_bwd_args, layer, 8);
AT(epx_dispatch_bwd_args, handle_mem, 16);
AT(epx_dispatch_bwd_args, handle_mem_bytes, 24);
AT(epx_dispatch_bwd_args, stream, 32);
AT(epx_dispatch_bwd_args, grad_recv, 40);
AT(epx_dispatch_bwd_args, grad_recv_weights, 48);
AT(epx_dispatch_bwd_args, grad_tokens, 56);
AT(epx_dispatch_bwd_args, grad_topk_weights, 64);
AT(epx_dispatch_bwd_args, format, 72);

AT(epx_dispatch_rank_major_args, struct_size, 0);
AT(epx_dispatch_rank_major_args, layer, 8);
AT(epx_dispatch_rank_major_args, handle_mem, 16);
AT(epx_dispatch_rank_major_args, handle_mem_bytes, 24);
AT(epx_dispatch_rank_major_args, stream, 32);
AT(epx_dispatch_rank_major_args, tokens, 40);
AT(epx_dispatch_rank_major_args, topk_idx, 48);
AT(epx_dispatch_rank_major_args, topk_weights, 56);
AT(epx_dispatch_rank_major_args, recv_tokens, 64);
AT(epx_dispatch_rank_major_args, recv_topk_idx, 72);
AT(epx_dispatch_rank_major_args, recv_weights, 80);
AT(epx_dispatch_rank_major_args, counts, 88);
AT(epx_dispatch_rank_major_args, format, 96);
AT(epx_dispatch_rank_major_args, row_spacing, 104);
AT(epx_dispatch_rank_major_args, reserved0, 108);
SIZE(epx_dispatch_rank_major_args, 112);

AT(epx_combine_rank_major_args, struct_size, 0);
AT(epx_combine_rank_major_args, layer, 8);
AT(epx_combine_rank_major_args, handle_mem, 16);
AT(epx_combine_rank_major_args, handle_mem_bytes, 24);
AT(epx_combine_rank_major_args, stream, 32);
AT(epx_combine_rank_major_args, expert_out, 40);
AT(epx_combine_rank_major_args, out, 48);
AT(epx_combine_rank_major_args, format, 56);

AT(epx_combine_rank_major_bwd_args, struct_size, 0);
AT(epx_combine_rank_major_bwd_args, layer, 8);
AT(epx_combine_rank_major_bwd_args, handle_mem, 16);
AT(epx_combine_rank_major_bwd_args, handle_mem_bytes, 24);
AT(epx_combine_rank_major_bwd_args, stream, 32);
AT(epx_combine_rank_major_bwd_args, grad_out, 40);
AT(epx_combine_rank_major_bwd_args, grad_expert_out, 48);
AT(epx_combine_rank_major_bwd_args, format, 56);

AT(epx_dispatch_rank_major_bwd_args, struct_size, 0);
AT(epx_dispatch_rank_major_bwd_args, layer, 8);
AT(epx_dispatch_rank_major_bwd_args, handle_mem, 16);
AT(epx_dispatch_rank_major_bwd_args, handle_mem_bytes, 24);
AT(epx_dispatch_rank_major_bwd_args, stream, 32);
AT(epx_dispatch_rank_major_bwd_args, grad_recv, 40);
AT(epx_dispatch_rank_major_bwd_args, grad_recv_weights, 48);
AT(epx_dispatch_rank_major_bwd_args, grad_tokens, 56);
AT(epx_dispatch_rank_major_bwd_args, grad_topk_weights, 64);
AT(epx_dispatch_rank_major_bwd_args, format, 72);

AT(epx_ragged_all_to_all_args, struct_size, 0);
AT(epx_ragged_all_to_all_args, stream, 8);
AT(epx_ragged_all_to_all_args, operand, 16);
AT(epx_ragged_all_to_all_args, output, 24);
AT(epx_ragged_all_to_all_args, input_offsets, 32);
AT(epx_ragged_all_to_all_args, send_sizes, 40);
AT(epx_ragged_all_to_all_args, output_offsets, 48);
AT(epx_ragged_all_to_all_args, recv_sizes, 56);
AT(epx_ragged_all_to_all_args, direction, 64);
AT(epx_ragged_all_to_all_args, reserved0, 68);

SIZE(epx_status, 4);
IS(EPX_SUCCESS, 0);
IS(EPX_ERROR_INVALID_ARGUMENT, 1);
IS(EPX_ERROR_UNSUPPORTED, 2);
IS(EPX_ERROR_MISMATCH, 3);
IS(EPX_ERROR_OUT_OF_MEMORY, 4);
IS(EPX_ERROR_SYSTEM, 5);
IS(EPX_ERROR_TIMEOUT, 6);
IS(EPX_ERROR_ABORTED, 7);
IS(EPX_ERROR_OUT_OF_SEQUENCE, 8);
IS(EPX_ERROR_INTERNAL, 9);

SIZE(epx_dtype, 4);
IS(EPX_DTYPE_UNSET, 0);
IS(EPX_FLOAT32, 1);
IS(EPX_FLOAT16, 2);
IS(EPX_BFLOAT16, 3);
IS(EPX_INT32, 4);
IS(EPX_INT64, 5);
IS(EPX_FLOAT64, 6);
IS(EPX_UINT8, 7);
IS(EPX_FLOAT8_E4M3, 8);
IS(EPX_FLOAT8_E5M2, 9);
IS(EPX_FLOAT4_E2M1, 10);
IS(EPX_FLOAT8_E8M0, 11);

SIZE(epx_scaling, 4);
IS(EPX_SCALING_NONE, 0);
IS(EPX_SCALING_BLOCK128, 1);
IS(EPX_SCALING_BLOCK128_POW2, 2);
IS(EPX_SCALING_MX, 3);
IS(EPX_SCALING_NV, 4);

SIZE(epx_scale_layout, 4);
IS(EPX_SCALES_ROWS, 0);
IS(EPX_SCALES_COLUMNS, 1);
IS(EPX_SCALES_PACKED, 2);
IS(EPX_SCALES_TILES, 3);

SIZE(epx_combine_precision, 4);
IS(EPX_COMBINE_WIRE, 0);
IS(EPX_COMBINE_EXACT, 1);
IS(EPX_COMBINE_NODE, 2);

SIZE(epx_overflow, 4);
IS(EPX_OVERFLOW_ERROR, 0);
IS(EPX_OVERFLOW_DROP, 1);

SIZE(epx_transport, 4);
IS(EPX_TRANSPORT_AUTO, 0);
IS(EPX_TRANSPORT_HOST, 1);
IS(EPX_TRANSPORT_NCCL, 2);

SIZE(epx_operation, 4);
IS(EPX_OP_NONE, 0);
IS(EPX_OP_PREPARE, 1);
IS(EPX_OP_DISPATCH, 2);
IS(EPX_OP_COMBINE, 3);
IS(EPX_OP_COMBINE_BWD, 4);
IS(EPX_OP_DISPATCH_BWD, 5);
IS(EPX_OP_MEM_ALLOC, 6);
IS(EPX_OP_MEM_FREE, 7);
IS(EPX_OP_DISPATCH_RANK_MAJOR, 8);
IS(EPX_OP_COMBINE_RANK_MAJOR, 9);
IS(EPX_OP_COMBINE_RANK_MAJOR_BWD, 10);
IS(EPX_OP_DISPATCH_RANK_MAJOR_BWD, 11);
IS(EPX_OP_PREPARE_DISPATCH, 12);
IS(EPX_OP_ALL_GATHER, 13);
IS(EPX_OP_RAGGED_ALL_TO_ALL, 14);

SIZE(epx_slice_direction, 4);
IS(EPX_SLICES_FORWARD, 0);
IS(EPX_SLICES_TRANSPOSED, 1);

SIZE(epx_pads, 4);
IS(EPX_PADS_ZERO, 0);
IS(EPX_PADS_UNTOUCHED, 1);

SIZE(epx_phase, 4);
IS(EPX_PHASE_NONE, 0);
IS(EPX_PHASE_ARRIVE, 1);
IS(EPX_PHASE_COMPLETE, 2);

SIZE(epx_event_kind, 4);
IS(EPX_EVENT_BAD_INDEX, 0);
IS(EPX_EVENT_OVERFLOW, 1);
IS(EPX_EVENT_TOO_FEW_ROWS, 2);
IS(EPX_EVENT_HANDLE_MISMATCH, 3);
IS(EPX_EVENT_BAD_SLICE, 4);

IS(EPX_MAX_EVENT_KINDS, 16);
IS(EPX_MAX_REPORTED_RANKS, 64);
IS(EPX_MAX_MESSAGE_BYTES, 1024);
IS(EPX_MAX_RECORD_BYTES, 256);
IS(EPX_MAX_SLICES, 2048);

/* The compiler and the linker check here that no signature has changed and no function is gone. */
const struct {
  int32_t (*version)(void);
  const char* (*status_string)(epx_status);
  const char* (*last_error)(void);
  void (*set_last_error)(const char*);
  epx_status (*bootstrap_file)(const char*, const char*, int32_t, int32_t, int64_t, epx_bootstrap*);
  void (*bootstrap_free)(epx_bootstrap*);
  epx_status (*group_config_init)(epx_group_config*);
  epx_status (*row_format_init)(epx_row_format*, epx_scaling);
  epx_status (*group_create)(const epx_bootstrap*, const epx_group_config*, epx_group*);
  void (*group_destroy)(epx_group);
  epx_status (*group_abort)(epx_group);
  epx_status (*group_query)(epx_group, epx_group_info*);
  epx_status (*group_memory_plan)(const epx_group_config*, int32_t, epx_memory_plan*);
  epx_status (*group_all_gather)(epx_group, const void*, void*, size_t);
  epx_status (*group_status)(epx_group, epx_group_report*);
  epx_status (*mem_alloc)(epx_group, size_t, void**);
  epx_status (*mem_register)(epx_group, void*, size_t);
  epx_status (*mem_free)(epx_group, void*);
  epx_status (*handle_mem_size)(epx_group, const epx_layer*, size_t*);
  epx_status (*load_of_counts)(epx_group, const epx_layer*, int64_t, const epx_tensor*, epx_load_report*);
  epx_status (*prepare)(epx_group, const epx_prepare_args*);
  epx_status (*dispatch)(epx_group, const epx_dispatch_args*);
  epx_status (*prepare_dispatch)(epx_group, const epx_prepare_dispatch_args*);
  epx_status (*combine)(epx_group, const epx_combine_args*);
  epx_status (*combine_bwd)(epx_group, const epx_combine_bwd_args*);
  epx_status (*dispatch_bwd)(epx_group, const epx_dispatch_bwd_args*);
  epx_status (*dispatch_rank_major)(epx_group, const epx_dispatch_rank_major_args*);
  epx_status (*combine_rank_major)(epx_group, const epx_combine_rank_major_args*);
  epx_status (*combine_rank_major_bwd)(epx_group, const epx_combine_rank_major_bwd_args*);
  epx_status (*dispatch_rank_major_bwd)(epx_group, const epx_dispatch_rank_major_bwd_args*);
  epx_status (*ragged_all_to_all)(epx_group, const epx_ragged_all_to_all_args*);
} epx_functions = {
    .version = epx_version,
    .status_string = epx_status_string,
    .last_error = epx_last_error,
    .set_last_error = epx_set_last_error,
    .bootstrap_file = epx_bootstrap_file,
    .bootstrap_free = epx_bootstrap_free,
    .group_config_init = epx_group_config_init,
    .row_format_init = epx_row_format_init,
    .group_create = epx_group_create,
    .group_destroy = epx_group_destroy,
    .group_abort = epx_group_abort,
    .group_query = epx_group_query,
    .group_memory_plan = epx_group_memory_plan,
    .group_all_gather = epx_group_all_gather,
    .group_status = epx_group_status,
    .mem_alloc = epx_mem_alloc,
    .mem_register = epx_mem_register,
    .mem_free = epx_mem_free,
    .handle_mem_size = epx_handle_mem_size,
    .load_of_counts = epx_load_of_counts,
    .prepare = epx_prepare,
    .dispatch = epx_dispatch,
    .prepare_dispatch = epx_prepare_dispatch,
    .combine = epx_combine,
    .combine_bwd = epx_combine_bwd,
    .dispatch_bwd = epx_dispatch_bwd,
    .dispatch_rank_major = epx_dispatch_rank_major,
    .combine_rank_major = epx_combine_rank_major,
    .combine_rank_major_bwd = epx_combine_rank_major_bwd,
    .dispatch_rank_major_bwd = epx_dispatch_rank_major_bwd,
    .ragged_all_to_all = epx_ragged_all_to_all,
};

int main(void) {
  const int version = EPX_VERSION_MAJOR * 10000 + EPX_VERSION_MINOR * 100 + EPX_VERSION_PATCH;
  if (epx_version() == version) return 0;
  fprintf(stderr, "the library is version %d, the header %d\n", (int)epx_version(), version);
  return 1;
}
