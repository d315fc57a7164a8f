// SPDX-License-Identifier: Apache-2.0
#include "tests/multiprocess/refusals.h"

#include "base/operations.h"
#include "tests/multiprocess/refusal_table.h"

namespace epx::test {

namespace {

void add_prepare(std::vector<Refusal>& refusals, int num_tokens, int num_local, int64_t num_rows) {
  RefusalTable table(refusals, "prepare", Op::prepare);
  table.add("topk_idx NULL", [](Calls& c) { c.prepare.topk_idx = nullptr; }, {"topk_idx", "NULL"});
  table.add("topk_idx float32", [](Calls& c) { c.topk_idx.dtype = EPX_FLOAT32; }, {"topk_idx", "float32"});
  table.add("topk_idx of one dimension", [](Calls& c) { c.topk_idx.ndim = 1; }, {"topk_idx", "1"});
  table.add_size("topk_idx", "of another K", &Calls::topk_idx, 1, 3, kTopK);
  table.add("T beyond max_tokens_per_rank", [](Calls& c) { c.topk_idx.sizes[0] = c.slot.sizes[0] = 7; },
            {"topk_idx", "7", text(kMaxTokens)});
  table.add("counts NULL", [](Calls& c) { c.prepare.counts = nullptr; }, {"counts", "NULL"});
  table.add_size("counts", "of another E_l", &Calls::counts, 0, 9, num_local);
  table.add("counts float32", [](Calls& c) { c.counts.dtype = EPX_FLOAT32; }, {"counts", "float32"});
  table.add("offsets NULL", [](Calls& c) { c.prepare.offsets = nullptr; }, {"offsets", "NULL"});
  table.add("offsets without the last", [=](Calls& c) { --c.offsets.sizes[0]; },
            {"offsets", text(num_local), text(num_local + 1)});
  table.add("offsets of another dtype than counts", [](Calls& c) { c.counts.dtype = EPX_INT64; },
            {"offsets", "int32", "int64"});
  table.add("global_counts [P]", [](Calls& c) { c.global_counts.ndim = 1; }, {"global_counts"});
  table.add_size("global_counts", "of another P", &Calls::global_counts, 0, 11, kRanks);
  table.add_size("global_counts", "of another E", &Calls::global_counts, 1, 12, kExperts);
  table.add("global_counts of another dtype", [](Calls& c) { c.global_counts.dtype = EPX_INT64; },
            {"global_counts", "int64"});
  constexpr int64_t kZones = (kExperts + kRanks - 1) / kRanks;
  const auto add_stride = [&](const char* name, int64_t stride, std::vector<std::string> words) {
    words.insert(words.end(), {"zone_stride", text(stride)});
    table.add(
        name, [=](Calls& c) { c.prepare.zone_stride = stride; }, std::move(words));
  };
  add_stride("a negative zone_stride", -4, {"0.." + text(num_rows / kZones)});
  add_stride("zones a stride apart that R has no room for", num_rows / kZones + 1,
             {text(kZones), "max_recv_tokens_per_rank", text(num_rows)});
  add_stride("a zone_stride of another alignment", 2, {"alignment", text(kAlignment)});
  table.add("info int32", [](Calls& c) { c.info.dtype = EPX_INT32; }, {"info", "int32"});
  table.add_size("info", "of four", &Calls::info, 0, 4, 5);
  table.add("slot int64", [](Calls& c) { c.slot.dtype = EPX_INT64; }, {"slot", "int64"});
  table.add_size("slot", "of another T", &Calls::slot, 0, 1, num_tokens);
  table.add_size("slot", "of another K", &Calls::slot, 1, 13, kTopK);
  table.add("slot_origin int64", [](Calls& c) { c.slot_origin.dtype = EPX_INT64; }, {"slot_origin", "int64"});
  table.add_size("slot_origin", "of another R", &Calls::slot_origin, 0, num_rows - 1, num_rows);
  table.add_size("slot_origin", "of two columns", &Calls::slot_origin, 1, 2, 3);
  table.add_overlap("offsets", &Calls::offsets, "counts", &Calls::counts);
  table.add("slot in the handle memory", [](Calls& c) { c.slot.data = c.prepare.handle_mem; },
            {"slot", "handle_mem", "overlap"});
  table.add_overlap("info", &Calls::info, "topk_idx", &Calls::topk_idx);
  table.add_tensor("topk_idx", &Calls::topk_idx);
  table.add_tensor("slot_origin", &Calls::slot_origin);
  table.add_stray_sidecar("topk_idx", &Calls::topk_idx);
}

void add_dispatch(std::vector<Refusal>& refusals, int num_tokens, int64_t num_rows) {
  RefusalTable table(refusals, "dispatch", Op::dispatch);
  table.add("tokens NULL", [](Calls& c) { c.dispatch.tokens = nullptr; }, {"tokens", "NULL"});
  table.add("tokens int32", [](Calls& c) { c.tokens.dtype = c.recv_tokens.dtype = EPX_INT32; }, {"tokens", "int32"});
  table.add("dtype wider than max_token_dtype", [](Calls& c) { c.tokens.dtype = c.recv_tokens.dtype = EPX_FLOAT32; },
            {"float32", "max_token_dtype", "bfloat16"});
  table.add("H beyond hidden_dim", [](Calls& c) { c.tokens.sizes[1] = c.recv_tokens.sizes[1] = 17; },
            {"17", text(kHiddenDim)});
  table.add("H 0", [](Calls& c) { c.tokens.sizes[1] = c.recv_tokens.sizes[1] = 0; }, {"tokens", "0"});
  table.add("T beyond max_tokens_per_rank", [](Calls& c) { c.tokens.sizes[0] = c.topk_weights.sizes[0] = 7; },
            {"tokens", "7", text(kMaxTokens)});
  table.add("recv_tokens NULL", [](Calls& c) { c.dispatch.recv_tokens = nullptr; }, {"recv_tokens", "NULL"});
  table.add_size("recv_tokens", "of another H", &Calls::recv_tokens, 1, 7, kHidden);
  table.add_other_dtype("recv_tokens", &Calls::recv_tokens);
  table.add("topk_weights without recv_weights", [](Calls& c) { c.dispatch.recv_weights = nullptr; },
            {"topk_weights", "recv_weights"});
  table.add("recv_weights without topk_weights", [](Calls& c) { c.dispatch.topk_weights = nullptr; },
            {"topk_weights", "recv_weights"});
  table.add("topk_weights bfloat16", [](Calls& c) { c.topk_weights.dtype = EPX_BFLOAT16; }, {"topk_weights", "bfloat16"});
  table.add_size("topk_weights", "of another K", &Calls::topk_weights, 1, 3, kTopK);
  table.add_size("topk_weights", "of another T", &Calls::topk_weights, 0, 1, num_tokens);
  table.add_size("recv_weights", "of another N", &Calls::recv_weights, 0, num_rows - 1, num_rows);
  table.add("recv_weights of two dimensions", [](Calls& c) { c.recv_weights.ndim = 2; }, {"recv_weights", "2"});
  table.add("sidecar sent but not received",
            [](Calls& c) {
              c.recv_tokens.sidecar = nullptr;
              c.recv_tokens.sidecar_row_bytes = 0;
            },
            {"sidecar", text(kSidecarBytes)});
  table.add("sidecar received but not sent",
            [](Calls& c) {
              c.tokens.sidecar = nullptr;
              c.tokens.sidecar_row_bytes = 0;
            },
            {"sidecar", text(kSidecarBytes)});
  table.add("sidecars of different bytes", [](Calls& c) { c.recv_tokens.sidecar_row_bytes = 7; },
            {"sidecar", "7", text(kSidecarBytes)});
  table.add("sidecar beyond max_sidecar_bytes",
            [](Calls& c) { c.tokens.sidecar_row_bytes = c.recv_tokens.sidecar_row_bytes = 17; },
            {"sidecar", "17", text(kMaxSidecarBytes)});
  table.add("sidecar of negative bytes",
            [](Calls& c) { c.tokens.sidecar_row_bytes = c.recv_tokens.sidecar_row_bytes = -8; }, {"sidecar", "-8"});
  table.add("sidecar bytes without a sidecar", [](Calls& c) { c.tokens.sidecar = nullptr; },
            {"sidecar", text(kSidecarBytes)});
  table.add("sidecar of no bytes", [](Calls& c) { c.tokens.sidecar_row_bytes = 0; }, {"sidecar", "0"});
  table.add("pads that are none", [](Calls& c) { c.dispatch.pads = static_cast<epx_pads>(2); },
            {"pads", "2", "EPX_PADS_ZERO"});
  table.add("reserved0 set", [](Calls& c) { c.dispatch.reserved0 = 5; }, {"reserved0", "5"});
  table.add_overlap("recv_tokens", &Calls::recv_tokens, "tokens", &Calls::tokens);
  table.add("recv_weights in the received sidecar", [](Calls& c) { c.recv_weights.data = c.recv_tokens.sidecar; },
            {"recv_weights", "sidecar", "overlap"});
  table.add("a sidecar of 2^63 bytes",
            [](Calls& c) {
              c.recv_tokens.sizes[0] = int64_t{1} << 60;
              c.recv_tokens.sizes[1] = c.tokens.sizes[1] = 1;
              c.dispatch.topk_weights = c.dispatch.recv_weights = nullptr;
            },
            {"dispatch", "sidecar of recv_tokens", text(int64_t{1} << 60), text(kSidecarBytes), "2^63 - 1"});
  table.add_too_many_rows("recv_tokens", &Calls::recv_tokens, &Calls::tokens);
  table.add_tensor("tokens", &Calls::tokens);
  table.add_tensor("recv_tokens", &Calls::recv_tokens);
  table.add_stray_sidecar("topk_weights", &Calls::topk_weights);
  add_format_refusals(table, Op::dispatch, num_tokens, num_rows,
                      {&Calls::tokens, "tokens", &Calls::recv_tokens, "recv_tokens"});
}

void add_combine(std::vector<Refusal>& refusals, int64_t num_rows) {
  RefusalTable table(refusals, "combine", Op::combine);
  table.add("expert_out NULL", [](Calls& c) { c.combine.expert_out = nullptr; }, {"expert_out", "NULL"});
  table.add("out NULL", [](Calls& c) { c.combine.out = nullptr; }, {"out", "NULL"});
  table.add("expert_out quantised", [](Calls& c) { c.expert_out.dtype = c.out.dtype = EPX_FLOAT8_E4M3; },
            {"expert_out", "float8_e4m3"});
  table.add_other_dtype("out", &Calls::out);
  table.add_size("out", "of another H", &Calls::out, 1, 7, kHidden);
  table.add("T beyond max_tokens_per_rank", [](Calls& c) { c.out.sizes[0] = 7; }, {"out", "7", text(kMaxTokens)});
  table.add("dtype wider than max_token_dtype", [](Calls& c) { c.out.dtype = c.expert_out.dtype = EPX_FLOAT32; },
            {"float32", "max_token_dtype", "bfloat16"});
  table.add("H beyond hidden_dim", [](Calls& c) { c.out.sizes[1] = c.expert_out.sizes[1] = 17; }, {"17", text(kHiddenDim)});
  table.add_size("recv_weights", "of another N", &Calls::recv_weights, 0, num_rows - 1, num_rows);
  table.add("recv_weights float16", [](Calls& c) { c.recv_weights.dtype = EPX_FLOAT16; }, {"recv_weights", "float16"});
  table.add_overlap("out", &Calls::out, "expert_out", &Calls::expert_out);
  table.add_too_many_rows("expert_out", &Calls::expert_out, &Calls::out);
  table.add_tensor("expert_out", &Calls::expert_out);
  table.add_tensor("out", &Calls::out);
  table.add_stray_sidecar("expert_out", &Calls::expert_out);
  add_sum_format_refusals(table, Op::combine, {&Calls::expert_out, "expert_out", &Calls::out, "out"});
}

void add_combine_bwd(std::vector<Refusal>& refusals, int num_tokens, int64_t num_rows) {
  RefusalTable table(refusals, "combine_bwd", Op::combine_bwd);
  table.add("grad_out NULL", [](Calls& c) { c.combine_bwd.grad_out = nullptr; }, {"grad_out", "NULL"});
  table.add("grad_expert_out NULL", [](Calls& c) { c.combine_bwd.grad_expert_out = nullptr; }, {"grad_expert_out", "NULL"});
  table.add("grad_out quantised", [](Calls& c) { c.grad_out.dtype = c.grad_expert_out.dtype = EPX_FLOAT8_E4M3; },
            {"grad_out", "float8_e4m3"});
  table.add("grad_recv_weights without expert_out", [](Calls& c) { c.combine_bwd.expert_out = nullptr; },
            {"expert_out", "grad_recv_weights"});
  table.add("expert_out without grad_recv_weights", [](Calls& c) { c.combine_bwd.grad_recv_weights = nullptr; },
            {"expert_out", "grad_recv_weights"});
  table.add_other_dtype("expert_out", &Calls::expert_out);
  table.add_size("expert_out", "of another H", &Calls::expert_out, 1, 7, kHidden);
  table.add_size("expert_out", "of another N", &Calls::expert_out, 0, num_rows - 1, num_rows);
  table.add_other_dtype("grad_expert_out", &Calls::grad_expert_out);
  table.add_size("grad_recv_weights", "of another N", &Calls::grad_recv_weights, 0, num_rows - 1, num_rows);
  table.add("grad_recv_weights bfloat16", [](Calls& c) { c.grad_recv_weights.dtype = EPX_BFLOAT16; },
            {"grad_recv_weights", "bfloat16"});
  table.add_size("recv_weights", "of another N", &Calls::recv_weights, 0, num_rows - 1, num_rows);
  table.add_overlap("grad_expert_out", &Calls::grad_expert_out, "expert_out", &Calls::expert_out);
  table.add_too_many_rows("grad_expert_out", &Calls::grad_expert_out, &Calls::grad_out);
  table.add_tensor("grad_out", &Calls::grad_out);
  table.add_tensor("grad_expert_out", &Calls::grad_expert_out);
  table.add_stray_sidecar("grad_out", &Calls::grad_out);
  add_format_refusals(table, Op::combine_bwd, num_tokens, num_rows,
                      {&Calls::grad_out, "grad_out", &Calls::grad_expert_out, "grad_expert_out"});
}

void add_dispatch_bwd(std::vector<Refusal>& refusals, int num_tokens, int64_t num_rows) {
  RefusalTable table(refusals, "dispatch_bwd", Op::dispatch_bwd);
  table.add("grad_recv NULL", [](Calls& c) { c.dispatch_bwd.grad_recv = nullptr; }, {"grad_recv", "NULL"});
  table.add("grad_tokens NULL", [](Calls& c) { c.dispatch_bwd.grad_tokens = nullptr; }, {"grad_tokens", "NULL"});
  table.add("grad_recv_weights without grad_topk_weights", [](Calls& c) { c.dispatch_bwd.grad_topk_weights = nullptr; },
            {"grad_recv_weights", "grad_topk_weights"});
  table.add("grad_topk_weights without grad_recv_weights", [](Calls& c) { c.dispatch_bwd.grad_recv_weights = nullptr; },
            {"grad_recv_weights", "grad_topk_weights"});
  table.add_other_dtype("grad_tokens", &Calls::grad_tokens);
  table.add_size("grad_tokens", "of another H", &Calls::grad_tokens, 1, 7, kHidden);
  table.add_size("grad_topk_weights", "of another K", &Calls::grad_topk_weights, 1, 3, kTopK);
  table.add_size("grad_topk_weights", "of another T", &Calls::grad_topk_weights, 0, 1, num_tokens);
  table.add_size("grad_recv_weights", "of another N", &Calls::grad_recv_weights, 0, num_rows - 1, num_rows);
  table.add_overlap("grad_tokens", &Calls::grad_tokens, "grad_recv", &Calls::grad_recv);
  table.add_too_many_rows("grad_recv", &Calls::grad_recv, &Calls::grad_tokens);
  table.add_tensor("grad_recv", &Calls::grad_recv);
  table.add_tensor("grad_tokens", &Calls::grad_tokens);
  table.add_stray_sidecar("grad_tokens", &Calls::grad_tokens);
  add_sum_format_refusals(table, Op::dispatch_bwd, {&Calls::grad_recv, "grad_recv", &Calls::grad_tokens, "grad_tokens"});
}

void add_dispatch_rank_major(std::vector<Refusal>& refusals, int num_tokens) {
  RefusalTable table(refusals, "dispatch_rank_major", Op::dispatch_rank_major);
  table.add("an alignment", [](Calls& c) { c.dispatch_rank_major.layer.alignment = 4; }, {"alignment", "4", "0 or 1"});
  table.add("tokens NULL", [](Calls& c) { c.dispatch_rank_major.tokens = nullptr; }, {"tokens", "NULL"});
  table.add("topk_idx NULL", [](Calls& c) { c.dispatch_rank_major.topk_idx = nullptr; }, {"topk_idx", "NULL"});
  table.add_size("topk_idx", "of another T", &Calls::topk_idx, 0, 1, num_tokens);
  table.add("topk_idx float32", [](Calls& c) { c.topk_idx.dtype = EPX_FLOAT32; }, {"topk_idx", "float32"});
  table.add("T beyond max_tokens_per_rank", [](Calls& c) { c.tokens.sizes[0] = c.topk_idx.sizes[0] = 7; },
            {"tokens", "7", text(kMaxTokens)});
  table.add("recv_tokens NULL", [](Calls& c) { c.dispatch_rank_major.recv_tokens = nullptr; }, {"recv_tokens", "NULL"});
  table.add("recv_tokens of two dimensions", [](Calls& c) { c.recv_rows.ndim = 2; }, {"recv_tokens", "2", "[P, M, H]"});
  table.add("recv_tokens of another P", [](Calls& c) { c.recv_rows.sizes[0] = 3; }, {"recv_tokens", "3", "P = 2"});
  table.add_size("recv_tokens", "of another H", &Calls::recv_rows, 2, 7, kHidden);
  table.add_other_dtype("recv_tokens", &Calls::recv_rows);
  table.add(
      "recv_tokens of 2^63 bytes",
      [](Calls& c) { c.recv_rows.sizes[1] = c.recv_row_idx.sizes[1] = c.recv_row_weights.sizes[1] = int64_t{1} << 60; },
      {"recv_tokens", "2^63 - 1"});
  table.add("rows whose weights would take 2^63 bytes",
            [](Calls& c) {
              c.recv_rows.sizes[1] = int64_t{1} << 60;
              c.recv_rows.sizes[2] = c.tokens.sizes[1] = 1;
            },
            {"recv_tokens", text(int64_t{1} << 61), "2^63 - 1"});
  table.add("recv_topk_idx NULL", [](Calls& c) { c.dispatch_rank_major.recv_topk_idx = nullptr; },
            {"recv_topk_idx", "NULL"});
  table.add_size("recv_topk_idx", "of another M", &Calls::recv_row_idx, 1, 2, kRowsPerSource);
  table.add("recv_topk_idx float32", [](Calls& c) { c.recv_row_idx.dtype = EPX_FLOAT32; }, {"recv_topk_idx", "float32"});
  table.add("topk_weights without recv_weights", [](Calls& c) { c.dispatch_rank_major.recv_weights = nullptr; },
            {"topk_weights", "recv_weights"});
  table.add("recv_weights without topk_weights", [](Calls& c) { c.dispatch_rank_major.topk_weights = nullptr; },
            {"topk_weights", "recv_weights"});
  table.add_size("recv_weights", "of another K", &Calls::recv_row_weights, 2, 1, kTopK);
  table.add("counts NULL", [](Calls& c) { c.dispatch_rank_major.counts = nullptr; }, {"counts", "NULL"});
  table.add("counts of another P", [](Calls& c) { c.source_counts.sizes[0] = 3; }, {"counts", "3", "P = 2"});
  table.add("sidecar sent but not received",
            [](Calls& c) {
              c.recv_rows.sidecar = nullptr;
              c.recv_rows.sidecar_row_bytes = 0;
            },
            {"sidecar", text(kSidecarBytes)});
  table.add_overlap("recv_tokens", &Calls::recv_rows, "tokens", &Calls::tokens);
  table.add("counts in the handle memory", [](Calls& c) { c.source_counts.data = c.dispatch_rank_major.handle_mem; },
            {"counts", "handle_mem", "overlap"});
  table.add("recv_topk_idx in the sidecar of the last source", // a sidecar is [P, M, bytes]
            [](Calls& c) {
              c.recv_row_idx.data =
                  static_cast<std::byte*>(c.recv_rows.sidecar) + (kRanks * kRowsPerSource - 1) * kSidecarBytes;
            },
            {"recv_topk_idx", "sidecar", "overlap"});
  table.add_tensor("recv_tokens", &Calls::recv_rows);
  table.add_tensor("recv_topk_idx", &Calls::recv_row_idx);
  table.add_tensor("counts", &Calls::source_counts);
  table.add_stray_sidecar("recv_topk_idx", &Calls::recv_row_idx);
  table.add("an unknown row_spacing", [](Calls& c) { c.dispatch_rank_major.row_spacing = static_cast<epx_row_spacing>(2); },
            {"row_spacing is 2", "EPX_ROWS_STRIDED (0)", "EPX_ROWS_COMPACT (1)"});
  table.add("reserved0", [](Calls& c) { c.dispatch_rank_major.reserved0 = 7; }, {"reserved0 is 7"});
  add_format_refusals(table, Op::dispatch_rank_major, num_tokens, kRanks * kRowsPerSource,
                      {&Calls::tokens, "tokens", &Calls::recv_rows, "recv_tokens"});
}

void add_later_rank_major_calls(std::vector<Refusal>& refusals, int num_tokens) {
  RefusalTable combine(refusals, "combine_rank_major", Op::combine_rank_major);
  combine.add("an alignment", [](Calls& c) { c.combine_rank_major.layer.alignment = 2; }, {"alignment", "2", "0 or 1"});
  combine.add("expert_out NULL", [](Calls& c) { c.combine_rank_major.expert_out = nullptr; }, {"expert_out", "NULL"});
  combine.add("out NULL", [](Calls& c) { c.combine_rank_major.out = nullptr; }, {"out", "NULL"});
  combine.add_size("out", "of another H", &Calls::out, 1, 7, kHidden);
  combine.add("T beyond max_tokens_per_rank", [](Calls& c) { c.out.sizes[0] = 7; }, {"out", "7", text(kMaxTokens)});
  combine.add_overlap("out", &Calls::out, "expert_out", &Calls::row_expert_out);
  combine.add_tensor("expert_out", &Calls::row_expert_out);
  combine.add_stray_sidecar("expert_out", &Calls::row_expert_out);
  add_sum_format_refusals(combine, Op::combine_rank_major, {&Calls::row_expert_out, "expert_out", &Calls::out, "out"});

  RefusalTable combine_bwd(refusals, "combine_rank_major_bwd", Op::combine_rank_major_bwd);
  combine_bwd.add("grad_out NULL", [](Calls& c) { c.combine_rank_major_bwd.grad_out = nullptr; }, {"grad_out", "NULL"});
  combine_bwd.add("grad_expert_out of another P", [](Calls& c) { c.grad_rows.sizes[0] = 1; },
                  {"grad_expert_out", "1", "P = 2"});
  combine_bwd.add_other_dtype("grad_expert_out", &Calls::grad_rows);
  combine_bwd.add_overlap("grad_expert_out", &Calls::grad_rows, "grad_out", &Calls::grad_out);
  combine_bwd.add_tensor("grad_expert_out", &Calls::grad_rows);
  add_format_refusals(combine_bwd, Op::combine_rank_major_bwd, num_tokens, kRanks * kRowsPerSource,
                      {&Calls::grad_out, "grad_out", &Calls::grad_rows, "grad_expert_out"});

  RefusalTable dispatch_bwd(refusals, "dispatch_rank_major_bwd", Op::dispatch_rank_major_bwd);
  dispatch_bwd.add("grad_tokens NULL", [](Calls& c) { c.dispatch_rank_major_bwd.grad_tokens = nullptr; },
                   {"grad_tokens", "NULL"});
  dispatch_bwd.add("grad_recv_weights without grad_topk_weights",
                   [](Calls& c) { c.dispatch_rank_major_bwd.grad_topk_weights = nullptr; },
                   {"grad_recv_weights", "grad_topk_weights"});
  dispatch_bwd.add_size("grad_recv_weights", "of another M", &Calls::recv_row_weights, 1, 2, kRowsPerSource);
  dispatch_bwd.add_size("grad_topk_weights", "of another T", &Calls::grad_topk_weights, 0, 1, num_tokens);
  dispatch_bwd.add_tensor("grad_recv", &Calls::grad_rows);
  add_sum_format_refusals(dispatch_bwd, Op::dispatch_rank_major_bwd,
                          {&Calls::grad_rows, "grad_recv", &Calls::grad_tokens, "grad_tokens"});
}

// prepare_dispatch refuses what prepare and dispatch refuse, and tokens that are not those of the indices.
void add_prepare_dispatch(std::vector<Refusal>& refusals, int num_tokens, int num_local, int64_t num_rows) {
  std::vector<Refusal> parts;
  add_prepare(parts, num_tokens, num_local, num_rows);
  add_dispatch(parts, num_tokens, num_rows);
  RefusalTable table(refusals, "prepare_dispatch", Op::prepare_dispatch);
  for (Refusal& refusal : parts) {
    refusal.words.pop_back(); // the part's function
    const auto spoil = [spoil_part = std::move(refusal.spoil)](Calls& c) {
      spoil_part(c);
      set_prepare_dispatch(c);
    };
    table.add("as " + refusal.name, spoil, std::move(refusal.words));
  }
  table.add("tokens of another T", [](Calls& c) { c.tokens.sizes[0] = c.topk_weights.sizes[0] = 1; },
            {"tokens", "1", text(num_tokens), "topk_idx"});
  table.add_overlap("recv_tokens", &Calls::recv_tokens, "slot_origin", &Calls::slot_origin);
}

} // namespace

std::vector<Refusal> refusals(int num_tokens, int num_local_experts, int64_t num_rows, size_t handle_bytes) {
  std::vector<Refusal> table;
#define EPX_TEST_COMMON(NUMBER, name, ...) RefusalTable(table, #name, Op::name).add_common(&Calls::name, handle_bytes);
  EPX_LAYER_OPERATIONS(EPX_TEST_COMMON)
#undef EPX_TEST_COMMON
  add_prepare(table, num_tokens, num_local_experts, num_rows);
  add_dispatch(table, num_tokens, num_rows);
  add_prepare_dispatch(table, num_tokens, num_local_experts, num_rows);
  add_combine(table, num_rows);
  add_combine_bwd(table, num_tokens, num_rows);
  add_dispatch_bwd(table, num_tokens, num_rows);
  add_dispatch_rank_major(table, num_tokens);
  add_later_rank_major_calls(table, num_tokens);
  RefusalTable ragged(table, "ragged_all_to_all", Op::ragged_all_to_all);
  ragged.add_basic(&Calls::ragged_all_to_all);
  add_ragged_refusals(ragged);
  return table;
}

} // namespace epx::test
