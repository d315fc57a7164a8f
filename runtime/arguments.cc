// SPDX-License-Identifier: Apache-2.0
#include "runtime/arguments.h"

#include <string>

#include <fmt/format.h>

#include "base/dtypes.h"
#include "base/error.h"
#include "base/names.h"
#include "runtime/argument_checker.h"

namespace epx {
namespace {

// What prepare reads and writes.
template <typename ArgsStruct>
PrepareCall plan_tensors(ArgumentChecker& checker, const ArgsStruct& args) {
  PrepareCall call{};
  call.topk_idx = checker.in("topk_idx", args.topk_idx, Type::indices, {Dim::T, Dim::K});
  call.topk_idx_is_64 = args.topk_idx->dtype == EPX_INT64;
  call.counts = checker.out("counts", args.counts, Type::counts, {Dim::E_l});
  call.counts_are_64 = args.counts->dtype == EPX_INT64;
  call.offsets = checker.out("offsets", args.offsets, Type::like_counts, {Dim::E_l_and_1});
  call.global_counts = checker.optional_out("global_counts", args.global_counts, Type::like_counts, {Dim::P, Dim::E});
  call.info = checker.optional_out<int64_t>("info", args.info, Type::int64, {Dim::number_5});
  call.slot = checker.optional_out<int32_t>("slot", args.slot, Type::int32, {Dim::T, Dim::K});
  call.slot_origin = checker.optional_out<int32_t>("slot_origin", args.slot_origin, Type::int32, {Dim::R, Dim::number_3});
  call.zone_stride = checker.zone_stride(args.zone_stride);
  const MovementCall common = checker.movement();
  call.stream = common.stream;
  call.top_k = common.top_k;
  call.alignment = common.alignment;
  call.handle_mem = static_cast<std::byte*>(args.handle_mem);
  call.num_tokens = common.num_tokens;
  return call;
}

// What dispatch reads and writes besides the handle memory.
template <typename ArgsStruct>
DispatchCall row_tensors(ArgumentChecker& checker, const ArgsStruct& args) {
  DispatchCall call{};
  checker.format(args.format);
  call.tokens = checker.in<const std::byte>("tokens", args.tokens, Type::sent_rows, {Dim::T, Dim::H}, true);
  call.recv_tokens = checker.out<std::byte>("recv_tokens", args.recv_tokens, Type::received_rows, {Dim::N, Dim::H}, true);
  call.format_tensors = checker.format_tensors();
  checker.sidecars(*args.tokens, *args.recv_tokens);
  checker.both_or_neither("topk_weights", args.topk_weights, "recv_weights", args.recv_weights);
  call.topk_weights = checker.optional_in<const float>("topk_weights", args.topk_weights, Type::float32, {Dim::T, Dim::K});
  call.recv_weights = checker.optional_out<float>("recv_weights", args.recv_weights, Type::float32, {Dim::N});
  if (args.pads != EPX_PADS_ZERO && args.pads != EPX_PADS_UNTOUCHED)
    checker.refuse("pads is {}; it must be EPX_PADS_ZERO ({}) or EPX_PADS_UNTOUCHED ({})", static_cast<int>(args.pads),
                   static_cast<int>(EPX_PADS_ZERO), static_cast<int>(EPX_PADS_UNTOUCHED));
  if (args.reserved0 != 0) checker.refuse("reserved0 is {}; it must be 0", args.reserved0);
  call.sidecar_bytes = args.tokens->sidecar_row_bytes;
  call.sidecar = static_cast<const std::byte*>(args.tokens->sidecar);
  call.recv_sidecar = static_cast<std::byte*>(args.recv_tokens->sidecar);
  call.clears_pads = args.pads == EPX_PADS_ZERO;
  static_cast<MovementCall&>(call) = checker.movement();
  return call;
}

// The call of a movement, all of whose tensors have been checked.
template <typename Call>
Call finish(const ArgumentChecker& checker, Call call) {
  checker.no_overlap();
  static_cast<MovementCall&>(call) = checker.movement();
  return call;
}

} // namespace

std::vector<int64_t> check_counts(const GroupContext& context, const epx_layer& layer, const epx_tensor& global_counts) {
  const GroupShape& shape = context.shape;
  const auto refuse = [](const std::string& why) {
    fail(EPX_ERROR_INVALID_ARGUMENT, "epx_load_of_counts: global_counts {}", why);
  };
  if (global_counts.dtype != EPX_INT32 && global_counts.dtype != EPX_INT64)
    refuse(fmt::format("has dtype {} ({}); it must be {} or {}", static_cast<int>(global_counts.dtype),
                       name_of(global_counts.dtype), name_of(EPX_INT32), name_of(EPX_INT64)));
  if (global_counts.ndim != 2 || global_counts.sizes[0] != shape.num_ranks || global_counts.sizes[1] != shape.num_experts)
    refuse(fmt::format("has {} dimensions, the first of {} and {} elements; it must be [P, E], here [{}, {}]",
                       global_counts.ndim, global_counts.sizes[0], global_counts.sizes[1], shape.num_ranks,
                       shape.num_experts));
  if (global_counts.data == nullptr) refuse("has elements, but its data is NULL");
  const int64_t most = int64_t{shape.max_tokens_per_rank} * layer.top_k;
  std::vector<int64_t> counts(static_cast<size_t>(shape.num_ranks) * static_cast<size_t>(shape.num_experts));
  for (size_t i = 0; i < counts.size(); ++i) {
    counts[i] = global_counts.dtype == EPX_INT32 ? static_cast<const int32_t*>(global_counts.data)[i]
                                                 : static_cast<const int64_t*>(global_counts.data)[i];
    if (counts[i] < 0 || counts[i] > most)
      refuse(fmt::format("has {} routes from rank {} to expert {}; there can be 0..{} (max_tokens_per_rank * top_k)",
                         counts[i], i / static_cast<size_t>(shape.num_experts), i % static_cast<size_t>(shape.num_experts),
                         most));
  }
  return counts;
}

void require_pointer(const char* function, const char* name, const void* pointer) {
  if (pointer == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "{}: {} is NULL", function, name);
}

PrepareCall check(const GroupContext& context, const epx_prepare_args& args) {
  ArgumentChecker checker(context, args, Direction::out);
  const PrepareCall call = plan_tensors(checker, args);
  checker.no_overlap();
  return call;
}

DispatchCall check(const GroupContext& context, const epx_dispatch_args& args) {
  ArgumentChecker checker(context, args, Direction::in);
  const DispatchCall call = row_tensors(checker, args);
  checker.no_overlap();
  return call;
}

PrepareDispatchCall check(const GroupContext& context, const epx_prepare_dispatch_args& args) {
  ArgumentChecker checker(context, args, Direction::out);
  const PrepareCall prepare = plan_tensors(checker, args);
  checker.forget(Dim::T); // for a sentence of its own
  const DispatchCall dispatch = row_tensors(checker, args);
  if (dispatch.num_tokens != prepare.num_tokens)
    checker.refuse("tokens has T = sizes[0] = {}; it must be {}, that of topk_idx", dispatch.num_tokens,
                   prepare.num_tokens);
  checker.no_overlap();
  return {prepare, dispatch};
}

CombineCall check(const GroupContext& context, const epx_combine_args& args) {
  ArgumentChecker checker(context, args, Direction::in);
  CombineCall call{};
  checker.sum_format(args.format);
  call.expert_out = checker.in<const std::byte>("expert_out", args.expert_out, Type::rows, {Dim::N, Dim::H});
  call.out = checker.out<std::byte>("out", args.out, Type::like_rows, {Dim::T, Dim::H});
  call.recv_weights = checker.optional_in<const float>("recv_weights", args.recv_weights, Type::float32, {Dim::N});
  checker.format_tensors();
  return finish(checker, call);
}

CombineBwdCall check(const GroupContext& context, const epx_combine_bwd_args& args) {
  ArgumentChecker checker(context, args, Direction::in);
  CombineBwdCall call{};
  checker.format(args.format);
  call.grad_out = checker.in<const std::byte>("grad_out", args.grad_out,
                                              args.format == nullptr ? Type::rows : Type::sent_rows, {Dim::T, Dim::H});
  call.grad_expert_out =
      checker.out<std::byte>("grad_expert_out", args.grad_expert_out, Type::received_rows, {Dim::N, Dim::H});
  call.format_tensors = checker.format_tensors();
  checker.both_or_neither("expert_out", args.expert_out, "grad_recv_weights", args.grad_recv_weights);
  call.expert_out = checker.optional_in<const std::byte>(
      "expert_out", args.expert_out, args.format == nullptr ? Type::like_rows : Type::wide_rows, {Dim::N, Dim::H});
  if (args.expert_out != nullptr) call.expert_dtype = args.expert_out->dtype;
  call.grad_recv_weights =
      checker.optional_out<float>("grad_recv_weights", args.grad_recv_weights, Type::float32, {Dim::N});
  call.recv_weights = checker.optional_in<const float>("recv_weights", args.recv_weights, Type::float32, {Dim::N});
  if (call.recv_weights != nullptr && call.format_tensors.recv_scales != nullptr &&
      args.format->scaling != EPX_SCALING_BLOCK128)
    checker.refuse("recv_weights is given, and rows arrive quantised with scaling {}, whose scales take no weights: use "
                   "scaling block128, or weigh early, where the experts compute, and pass NULL",
                   name_of(args.format->scaling));
  return finish(checker, call);
}

DispatchBwdCall check(const GroupContext& context, const epx_dispatch_bwd_args& args) {
  ArgumentChecker checker(context, args, Direction::in);
  DispatchBwdCall call{};
  checker.sum_format(args.format);
  call.grad_recv = checker.in<const std::byte>("grad_recv", args.grad_recv, Type::rows, {Dim::N, Dim::H});
  call.grad_tokens = checker.out<std::byte>("grad_tokens", args.grad_tokens, Type::like_rows, {Dim::T, Dim::H});
  checker.both_or_neither("grad_recv_weights", args.grad_recv_weights, "grad_topk_weights", args.grad_topk_weights);
  call.grad_recv_weights =
      checker.optional_in<const float>("grad_recv_weights", args.grad_recv_weights, Type::float32, {Dim::N});
  call.grad_topk_weights =
      checker.optional_out<float>("grad_topk_weights", args.grad_topk_weights, Type::float32, {Dim::T, Dim::K});
  checker.format_tensors();
  return finish(checker, call);
}

DispatchRankMajorCall check(const GroupContext& context, const epx_dispatch_rank_major_args& args) {
  ArgumentChecker checker(context, args, Direction::out, true);
  DispatchRankMajorCall call{};
  checker.format(args.format);
  call.tokens = checker.in<const std::byte>("tokens", args.tokens, Type::sent_rows, {Dim::T, Dim::H}, true);
  const epx_tensor& tokens = *args.tokens;
  call.topk_idx = checker.in("topk_idx", args.topk_idx, Type::indices, {Dim::T, Dim::K});
  checker.forget(Dim::H); // for a sentence of its own
  call.recv_tokens =
      checker.out<std::byte>("recv_tokens", args.recv_tokens, Type::received_rows, {Dim::P, Dim::M, Dim::H}, true);
  const epx_tensor& recv_tokens = *args.recv_tokens;
  if (recv_tokens.sizes[2] != tokens.sizes[1])
    checker.refuse("recv_tokens has H = sizes[2] = {}; it must be {}, that of tokens", recv_tokens.sizes[2],
                   tokens.sizes[1]);
  checker.rank_major_staging();
  call.format_tensors = checker.format_tensors();
  checker.sidecars(tokens, recv_tokens);
  call.recv_topk_idx = checker.out("recv_topk_idx", args.recv_topk_idx, Type::indices, {Dim::P, Dim::M, Dim::K});
  checker.both_or_neither("topk_weights", args.topk_weights, "recv_weights", args.recv_weights);
  call.topk_weights = checker.optional_in<const float>("topk_weights", args.topk_weights, Type::float32, {Dim::T, Dim::K});
  call.recv_weights =
      checker.optional_out<float>("recv_weights", args.recv_weights, Type::float32, {Dim::P, Dim::M, Dim::K});
  call.counts = checker.out("counts", args.counts, Type::counts, {Dim::P});
  call.sidecar_bytes = tokens.sidecar_row_bytes;
  call.sidecar = static_cast<const std::byte*>(tokens.sidecar);
  call.recv_sidecar = static_cast<std::byte*>(recv_tokens.sidecar);
  call.plan = static_cast<std::byte*>(args.handle_mem);
  call.topk_idx_is_64 = args.topk_idx->dtype == EPX_INT64;
  call.recv_topk_idx_is_64 = args.recv_topk_idx->dtype == EPX_INT64;
  call.counts_are_64 = args.counts->dtype == EPX_INT64;
  if (args.row_spacing != EPX_ROWS_STRIDED && args.row_spacing != EPX_ROWS_COMPACT)
    checker.refuse("row_spacing is {}; it must be EPX_ROWS_STRIDED ({}) or EPX_ROWS_COMPACT ({})",
                   static_cast<int>(args.row_spacing), static_cast<int>(EPX_ROWS_STRIDED),
                   static_cast<int>(EPX_ROWS_COMPACT));
  if (args.reserved0 != 0) checker.refuse("reserved0 is {}; it must be 0", args.reserved0);
  call.is_compact = args.row_spacing == EPX_ROWS_COMPACT;
  return finish(checker, call);
}

RaggedAllToAllCall check(const GroupContext& context, const epx_ragged_all_to_all_args& args) {
  ArgumentChecker checker(context, args);
  RaggedAllToAllCall call{};
  call.stream = args.stream;
  call.operand = checker.rows_in("operand", args.operand, Dim::N);
  call.output = checker.rows_out("output", args.output, "operand", *args.operand, Dim::M);
  call.input_offsets = checker.in("input_offsets", args.input_offsets, Type::counts, {Dim::K});
  call.send_sizes = checker.in("send_sizes", args.send_sizes, Type::like_counts, {Dim::K});
  call.output_offsets = checker.in("output_offsets", args.output_offsets, Type::like_counts, {Dim::K});
  call.recv_sizes = checker.in("recv_sizes", args.recv_sizes, Type::like_counts, {Dim::K});
  call.integers_are_64 = args.input_offsets->dtype == EPX_INT64;
  call.operand_rows = checker.decided(Dim::N);
  call.output_rows = checker.decided(Dim::M);
  call.row_bytes = row_bytes(args.operand->dtype, checker.decided(Dim::H));
  const int num_ranks = context.shape.num_ranks;
  const int64_t slices = checker.decided(Dim::K);
  if (slices < 1 || slices > EPX_MAX_SLICES || slices % num_ranks != 0)
    checker.refuse("input_offsets has K = sizes[0] = {} slices; it must be a multiple of the {} ranks, 1..{}", slices,
                   num_ranks, static_cast<int>(EPX_MAX_SLICES));
  call.num_slices = static_cast<int>(slices);
  if (args.direction != EPX_SLICES_FORWARD && args.direction != EPX_SLICES_TRANSPOSED)
    checker.refuse("direction is {}; it must be EPX_SLICES_FORWARD ({}) or EPX_SLICES_TRANSPOSED ({})",
                   static_cast<int>(args.direction), static_cast<int>(EPX_SLICES_FORWARD),
                   static_cast<int>(EPX_SLICES_TRANSPOSED));
  if (args.reserved0 != 0) checker.refuse("reserved0 is {}; it must be 0", args.reserved0);
  call.is_transposed = args.direction == EPX_SLICES_TRANSPOSED;
  checker.no_overlap();
  return call;
}

CombineCall check(const GroupContext& context, const epx_combine_rank_major_args& args) {
  ArgumentChecker checker(context, args, Direction::in, true);
  checker.rank_major_sums();
  CombineCall call{};
  checker.sum_format(args.format);
  call.expert_out = checker.in<const std::byte>("expert_out", args.expert_out, Type::rows, {Dim::P, Dim::M, Dim::H});
  checker.rank_major_staging();
  call.out = checker.out<std::byte>("out", args.out, Type::like_rows, {Dim::T, Dim::H});
  checker.format_tensors();
  return finish(checker, call);
}

CombineBwdCall check(const GroupContext& context, const epx_combine_rank_major_bwd_args& args) {
  ArgumentChecker checker(context, args, Direction::in, true);
  CombineBwdCall call{};
  checker.format(args.format);
  call.grad_out = checker.in<const std::byte>("grad_out", args.grad_out,
                                              args.format == nullptr ? Type::rows : Type::sent_rows, {Dim::T, Dim::H});
  call.grad_expert_out =
      checker.out<std::byte>("grad_expert_out", args.grad_expert_out, Type::received_rows, {Dim::P, Dim::M, Dim::H});
  checker.rank_major_staging();
  call.format_tensors = checker.format_tensors();
  return finish(checker, call);
}

DispatchBwdCall check(const GroupContext& context, const epx_dispatch_rank_major_bwd_args& args) {
  ArgumentChecker checker(context, args, Direction::in, true);
  checker.rank_major_sums();
  DispatchBwdCall call{};
  checker.sum_format(args.format);
  call.grad_recv = checker.in<const std::byte>("grad_recv", args.grad_recv, Type::rows, {Dim::P, Dim::M, Dim::H});
  checker.rank_major_staging();
  call.grad_tokens = checker.out<std::byte>("grad_tokens", args.grad_tokens, Type::like_rows, {Dim::T, Dim::H});
  checker.both_or_neither("grad_recv_weights", args.grad_recv_weights, "grad_topk_weights", args.grad_topk_weights);
  call.grad_recv_weights = checker.optional_in<const float>("grad_recv_weights", args.grad_recv_weights, Type::float32,
                                                            {Dim::P, Dim::M, Dim::K});
  call.grad_topk_weights =
      checker.optional_out<float>("grad_topk_weights", args.grad_topk_weights, Type::float32, {Dim::T, Dim::K});
  checker.format_tensors();
  return finish(checker, call);
}

} // namespace epx
