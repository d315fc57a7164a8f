// SPDX-License-Identifier: Apache-2.0
#include "tests/multiprocess/refusals.h"

#include <cstddef>

#include "tests/multiprocess/bytes_0_1.h"

namespace epx::test {

namespace {

std::string text(int64_t value) {
  return std::to_string(value);
}

void* one_byte_on(void* data) {
  return static_cast<std::byte*>(data) + 1;
}

// Adds the refusals that all calls have in common. `args` finds a call's args in a Calls.
template <typename Args>
void add_common(std::vector<Refusal>& table, const std::string& call, Op op, Args Calls::*args, size_t handle_bytes) {
  const auto add = [&](const char* name, std::function<void(Calls&)> spoil, std::vector<std::string> words) {
    table.push_back({call + ": " + name, op, std::move(spoil), std::move(words)});
  };
  add("group NULL", [](Calls& c) { c.group = nullptr; }, {"group", "NULL"});
  add("args NULL", [](Calls& c) { c.without_args = true; }, {"args", "NULL"});
  const auto add_size = [&](const char* name, size_t size) {
    add(name, [=](Calls& c) { (c.*args).struct_size = size; },
        {"epx_" + call + "_args.struct_size is " + text(size), text(kBytes01<Args>), text(kMaxStructBytes)});
  };
  add_size("struct_size 0", 0);
  add_size("struct_size below that of 0.1", kBytes01<Args> - 8);
  add_size("struct_size that is no multiple of 8", sizeof(Args) + 4);
  add_size("struct_size that no version has", kMaxStructBytes + 8);
  add("top_k 0", [=](Calls& c) { (c.*args).layer.top_k = 0; }, {"top_k", "0", text(kMaxTopK)});
  add("top_k negative", [=](Calls& c) { (c.*args).layer.top_k = -7; }, {"top_k", "-7"});
  add("top_k beyond max_top_k", [=](Calls& c) { (c.*args).layer.top_k = 5; }, {"top_k", "5", text(kMaxTopK)});
  add("alignment negative", [=](Calls& c) { (c.*args).layer.alignment = -3; }, {"alignment", "-3"});
  add("alignment beyond max_alignment", [=](Calls& c) { (c.*args).layer.alignment = 9; },
      {"alignment", "9", text(kMaxAlignment)});
  add("handle_mem NULL", [=](Calls& c) { (c.*args).handle_mem = nullptr; }, {"handle_mem", "NULL"});
  add("handle_mem misaligned",
      [=](Calls& c) {
        // The args of prepare point to memory that is written, the others to const memory.
        auto& memory = (c.*args).handle_mem;
        memory = const_cast<std::byte*>(static_cast<const std::byte*>(memory)) + 8;
      },
      {"handle_mem", "16"});
  add("handle_mem_bytes 0", [=](Calls& c) { (c.*args).handle_mem_bytes = 0; }, {"handle_mem", text(handle_bytes)});
  add("handle_mem_bytes one too few", [=](Calls& c) { (c.*args).handle_mem_bytes = handle_bytes - 1; },
      {"handle_mem", text(handle_bytes - 1), text(handle_bytes)});
  add("stream on the host transport", [=](Calls& c) { (c.*args).stream = &c; }, {"stream"});
}

// Adds the refusals that all tensors have in common. `words` is how sentences name the tensor.
void add_tensor(std::vector<Refusal>& table, const std::string& call, Op op, const std::string& name,
                epx_tensor Calls::*tensor) {
  const auto add = [&](const char* what, std::function<void(Calls&)> spoil, std::vector<std::string> words) {
    words.push_back(name);
    table.push_back({call + ": " + name + " " + what, op, std::move(spoil), std::move(words)});
  };
  add("without data", [=](Calls& c) { (c.*tensor).data = nullptr; }, {"NULL"});
  add("with ndim 0", [=](Calls& c) { (c.*tensor).ndim = 0; }, {"0"});
  add("with ndim 5", [=](Calls& c) { (c.*tensor).ndim = 5; }, {"5"});
  add("with dtype unset", [=](Calls& c) { (c.*tensor).dtype = EPX_DTYPE_UNSET; }, {"dtype"});
  add("with a dtype that is none", [=](Calls& c) { (c.*tensor).dtype = static_cast<epx_dtype>(77); }, {"dtype"});
  add("with a negative size", [=](Calls& c) { (c.*tensor).sizes[0] = -2; }, {"-2"});
  add("misaligned", [=](Calls& c) { (c.*tensor).data = one_byte_on((c.*tensor).data); }, {"align"});
  add("with reserved set", [=](Calls& c) { (c.*tensor).reserved[1] = 1; }, {"reserved"});
}

// Only dispatch's rows may have sidecars.
void add_stray_sidecar(std::vector<Refusal>& table, const std::string& call, Op op, const std::string& name,
                       epx_tensor Calls::*tensor) {
  table.push_back({call + ": " + name + " with a sidecar",
                   op,
                   [=](Calls& c) {
                     (c.*tensor).sidecar = c.tokens.sidecar;
                     (c.*tensor).sidecar_row_bytes = kSidecarBytes;
                   },
                   {name, "sidecar"}});
}

// N rows of one element whose own bytes can be counted in 63 bits, but not those of the float32 weights that go with them;
// and more bytes of the rows themselves than that. `token_rows` is the other side, [T, H].
void add_too_many_rows(std::vector<Refusal>& table, const std::string& call, Op op, const std::string& name,
                       epx_tensor Calls::*recv_rows, epx_tensor Calls::*token_rows) {
  const auto add = [&](const char* what, int64_t rows, int64_t hidden) {
    table.push_back({call + ": " + name + " " + what,
                     op,
                     [=](Calls& c) {
                       (c.*recv_rows).sizes[0] = rows;
                       (c.*recv_rows).sizes[1] = (c.*token_rows).sizes[1] = hidden;
                       c.dispatch.topk_weights = c.dispatch.recv_weights = nullptr;
                       c.combine.recv_weights = c.combine_bwd.recv_weights = nullptr;
                       c.combine_bwd.expert_out = c.combine_bwd.grad_recv_weights = nullptr;
                       c.dispatch_bwd.grad_recv_weights = c.dispatch_bwd.grad_topk_weights = nullptr;
                     },
                     {call, name, text(rows), "2^63 - 1"}});
  };
  add("with weights of 2^63 bytes", int64_t{1} << 61, 1);
  add("of 2^63 bytes", int64_t{1} << 61, 2);
  add("of 2^64 elements", int64_t{1} << 61, 8);
}

std::vector<Refusal> of_prepare(int num_tokens, int num_local, int64_t num_rows) {
  const std::string call = "prepare";
  std::vector<Refusal> table;
  const auto add = [&](const char* name, std::function<void(Calls&)> spoil, std::vector<std::string> words) {
    table.push_back({call + ": " + name, Op::prepare, std::move(spoil), std::move(words)});
  };
  add("topk_idx NULL", [](Calls& c) { c.prepare.topk_idx = nullptr; }, {"topk_idx", "NULL"});
  add("topk_idx float32", [](Calls& c) { c.topk_idx.dtype = EPX_FLOAT32; }, {"topk_idx", "float32"});
  add("topk_idx of one dimension", [](Calls& c) { c.topk_idx.ndim = 1; }, {"topk_idx", "1"});
  add("topk_idx of another K", [](Calls& c) { c.topk_idx.sizes[1] = 3; }, {"topk_idx", "3", text(kTopK)});
  add("T beyond max_tokens_per_rank", [](Calls& c) { c.topk_idx.sizes[0] = c.slot.sizes[0] = 7; },
      {"topk_idx", "7", text(kMaxTokens)});
  add("counts NULL", [](Calls& c) { c.prepare.counts = nullptr; }, {"counts", "NULL"});
  add("counts of another E_l", [=](Calls& c) { c.counts.sizes[0] = 9; }, {"counts", "9", text(num_local)});
  add("counts float32", [](Calls& c) { c.counts.dtype = EPX_FLOAT32; }, {"counts", "float32"});
  add("offsets NULL", [](Calls& c) { c.prepare.offsets = nullptr; }, {"offsets", "NULL"});
  add("offsets without the last", [=](Calls& c) { --c.offsets.sizes[0]; },
      {"offsets", text(num_local), text(num_local + 1)});
  add("offsets of another dtype than counts", [](Calls& c) { c.counts.dtype = EPX_INT64; }, {"offsets", "int32", "int64"});
  add("global_counts [P]", [](Calls& c) { c.global_counts.ndim = 1; }, {"global_counts"});
  add("global_counts of another P", [](Calls& c) { c.global_counts.sizes[0] = 11; }, {"global_counts", "11", text(kRanks)});
  add("global_counts of another E", [](Calls& c) { c.global_counts.sizes[1] = 12; },
      {"global_counts", "12", text(kExperts)});
  add("global_counts of another dtype", [](Calls& c) { c.global_counts.dtype = EPX_INT64; }, {"global_counts", "int64"});
  add("info int32", [](Calls& c) { c.info.dtype = EPX_INT32; }, {"info", "int32"});
  add("info of four", [](Calls& c) { c.info.sizes[0] = 4; }, {"info", "4", "5"});
  add("slot int64", [](Calls& c) { c.slot.dtype = EPX_INT64; }, {"slot", "int64"});
  add("slot of another T", [=](Calls& c) { c.slot.sizes[0] = 1; }, {"slot", "1", text(num_tokens)});
  add("slot of another K", [](Calls& c) { c.slot.sizes[1] = 13; }, {"slot", "13", text(kTopK)});
  add("slot_origin int64", [](Calls& c) { c.slot_origin.dtype = EPX_INT64; }, {"slot_origin", "int64"});
  add("slot_origin of another R", [=](Calls& c) { --c.slot_origin.sizes[0]; },
      {"slot_origin", text(num_rows - 1), text(num_rows)});
  add("slot_origin of two columns", [](Calls& c) { c.slot_origin.sizes[1] = 2; }, {"slot_origin", "2", "3"});
  add("offsets in counts", [](Calls& c) { c.offsets.data = c.counts.data; }, {"offsets", "counts", "overlap"});
  add("slot in the handle memory", [](Calls& c) { c.slot.data = c.prepare.handle_mem; }, {"slot", "handle_mem", "overlap"});
  add("info in topk_idx", [](Calls& c) { c.info.data = c.topk_idx.data; }, {"info", "topk_idx", "overlap"});
  add_tensor(table, call, Op::prepare, "topk_idx", &Calls::topk_idx);
  add_tensor(table, call, Op::prepare, "slot_origin", &Calls::slot_origin);
  add_stray_sidecar(table, call, Op::prepare, "topk_idx", &Calls::topk_idx);
  return table;
}

std::vector<Refusal> of_dispatch(int num_tokens, int64_t num_rows) {
  const std::string call = "dispatch";
  std::vector<Refusal> table;
  const auto add = [&](const char* name, std::function<void(Calls&)> spoil, std::vector<std::string> words) {
    table.push_back({call + ": " + name, Op::dispatch, std::move(spoil), std::move(words)});
  };
  add("tokens NULL", [](Calls& c) { c.dispatch.tokens = nullptr; }, {"tokens", "NULL"});
  add("tokens int32", [](Calls& c) { c.tokens.dtype = c.recv_tokens.dtype = EPX_INT32; }, {"tokens", "int32"});
  add("dtype wider than max_token_dtype", [](Calls& c) { c.tokens.dtype = c.recv_tokens.dtype = EPX_FLOAT32; },
      {"float32", "max_token_dtype", "bfloat16"});
  add("H beyond hidden_dim", [](Calls& c) { c.tokens.sizes[1] = c.recv_tokens.sizes[1] = 17; }, {"17", text(kHiddenDim)});
  add("H 0", [](Calls& c) { c.tokens.sizes[1] = c.recv_tokens.sizes[1] = 0; }, {"tokens", "0"});
  add("T beyond max_tokens_per_rank", [](Calls& c) { c.tokens.sizes[0] = c.topk_weights.sizes[0] = 7; },
      {"tokens", "7", text(kMaxTokens)});
  add("recv_tokens NULL", [](Calls& c) { c.dispatch.recv_tokens = nullptr; }, {"recv_tokens", "NULL"});
  add("recv_tokens of another H", [](Calls& c) { c.recv_tokens.sizes[1] = 7; }, {"recv_tokens", "7", text(kHidden)});
  add("recv_tokens of another dtype", [](Calls& c) { c.recv_tokens.dtype = EPX_FLOAT16; },
      {"recv_tokens", "float16", "bfloat16"});
  add("topk_weights without recv_weights", [](Calls& c) { c.dispatch.recv_weights = nullptr; },
      {"topk_weights", "recv_weights"});
  add("recv_weights without topk_weights", [](Calls& c) { c.dispatch.topk_weights = nullptr; },
      {"topk_weights", "recv_weights"});
  add("topk_weights bfloat16", [](Calls& c) { c.topk_weights.dtype = EPX_BFLOAT16; }, {"topk_weights", "bfloat16"});
  add("topk_weights of another K", [](Calls& c) { c.topk_weights.sizes[1] = 3; }, {"topk_weights", "3", text(kTopK)});
  add("topk_weights of another T", [=](Calls& c) { c.topk_weights.sizes[0] = 1; }, {"topk_weights", "1", text(num_tokens)});
  add("recv_weights of another N", [=](Calls& c) { --c.recv_weights.sizes[0]; },
      {"recv_weights", text(num_rows - 1), text(num_rows)});
  add("recv_weights of two dimensions", [](Calls& c) { c.recv_weights.ndim = 2; }, {"recv_weights", "2"});
  add("sidecar sent but not received",
      [](Calls& c) {
        c.recv_tokens.sidecar = nullptr;
        c.recv_tokens.sidecar_row_bytes = 0;
      },
      {"sidecar", text(kSidecarBytes)});
  add("sidecar received but not sent",
      [](Calls& c) {
        c.tokens.sidecar = nullptr;
        c.tokens.sidecar_row_bytes = 0;
      },
      {"sidecar", text(kSidecarBytes)});
  add("sidecars of different bytes", [](Calls& c) { c.recv_tokens.sidecar_row_bytes = 7; },
      {"sidecar", "7", text(kSidecarBytes)});
  add("sidecar beyond max_sidecar_bytes",
      [](Calls& c) { c.tokens.sidecar_row_bytes = c.recv_tokens.sidecar_row_bytes = 17; },
      {"sidecar", "17", text(kMaxSidecarBytes)});
  add("sidecar of negative bytes", [](Calls& c) { c.tokens.sidecar_row_bytes = c.recv_tokens.sidecar_row_bytes = -8; },
      {"sidecar", "-8"});
  add("sidecar bytes without a sidecar", [](Calls& c) { c.tokens.sidecar = nullptr; }, {"sidecar", text(kSidecarBytes)});
  add("sidecar of no bytes", [](Calls& c) { c.tokens.sidecar_row_bytes = 0; }, {"sidecar", "0"});
  add("pads that are none", [](Calls& c) { c.dispatch.pads = static_cast<epx_pads>(2); }, {"pads", "2", "EPX_PADS_ZERO"});
  add("reserved0 set", [](Calls& c) { c.dispatch.reserved0 = 5; }, {"reserved0", "5"});
  add("recv_tokens in tokens", [](Calls& c) { c.recv_tokens.data = c.tokens.data; }, {"recv_tokens", "tokens", "overlap"});
  add("recv_weights in the received sidecar", [](Calls& c) { c.recv_weights.data = c.recv_tokens.sidecar; },
      {"recv_weights", "sidecar", "overlap"});
  add("a sidecar of 2^63 bytes",
      [](Calls& c) {
        c.recv_tokens.sizes[0] = int64_t{1} << 60;
        c.recv_tokens.sizes[1] = c.tokens.sizes[1] = 1;
        c.dispatch.topk_weights = c.dispatch.recv_weights = nullptr;
      },
      {"dispatch", "sidecar of recv_tokens", text(int64_t{1} << 60), text(kSidecarBytes), "2^63 - 1"});
  add_too_many_rows(table, call, Op::dispatch, "recv_tokens", &Calls::recv_tokens, &Calls::tokens);
  add_tensor(table, call, Op::dispatch, "tokens", &Calls::tokens);
  add_tensor(table, call, Op::dispatch, "recv_tokens", &Calls::recv_tokens);
  add_stray_sidecar(table, call, Op::dispatch, "topk_weights", &Calls::topk_weights);
  return table;
}

std::vector<Refusal> of_combine(int64_t num_rows) {
  const std::string call = "combine";
  std::vector<Refusal> table;
  const auto add = [&](const char* name, std::function<void(Calls&)> spoil, std::vector<std::string> words) {
    table.push_back({call + ": " + name, Op::combine, std::move(spoil), std::move(words)});
  };
  add("expert_out NULL", [](Calls& c) { c.combine.expert_out = nullptr; }, {"expert_out", "NULL"});
  add("out NULL", [](Calls& c) { c.combine.out = nullptr; }, {"out", "NULL"});
  add("out of another dtype", [](Calls& c) { c.out.dtype = EPX_FLOAT16; }, {"out", "float16", "bfloat16"});
  add("out of another H", [](Calls& c) { c.out.sizes[1] = 7; }, {"out", "7", text(kHidden)});
  add("T beyond max_tokens_per_rank", [](Calls& c) { c.out.sizes[0] = 7; }, {"out", "7", text(kMaxTokens)});
  add("dtype wider than max_token_dtype", [](Calls& c) { c.out.dtype = c.expert_out.dtype = EPX_FLOAT32; },
      {"float32", "max_token_dtype", "bfloat16"});
  add("H beyond hidden_dim", [](Calls& c) { c.out.sizes[1] = c.expert_out.sizes[1] = 17; }, {"17", text(kHiddenDim)});
  add("recv_weights of another N", [=](Calls& c) { --c.recv_weights.sizes[0]; },
      {"recv_weights", text(num_rows - 1), text(num_rows)});
  add("recv_weights float16", [](Calls& c) { c.recv_weights.dtype = EPX_FLOAT16; }, {"recv_weights", "float16"});
  add("out in expert_out", [](Calls& c) { c.out.data = c.expert_out.data; }, {"out", "expert_out", "overlap"});
  add_too_many_rows(table, call, Op::combine, "expert_out", &Calls::expert_out, &Calls::out);
  add_tensor(table, call, Op::combine, "expert_out", &Calls::expert_out);
  add_tensor(table, call, Op::combine, "out", &Calls::out);
  add_stray_sidecar(table, call, Op::combine, "expert_out", &Calls::expert_out);
  return table;
}

std::vector<Refusal> of_combine_bwd(int64_t num_rows) {
  const std::string call = "combine_bwd";
  std::vector<Refusal> table;
  const auto add = [&](const char* name, std::function<void(Calls&)> spoil, std::vector<std::string> words) {
    table.push_back({call + ": " + name, Op::combine_bwd, std::move(spoil), std::move(words)});
  };
  add("grad_out NULL", [](Calls& c) { c.combine_bwd.grad_out = nullptr; }, {"grad_out", "NULL"});
  add("grad_expert_out NULL", [](Calls& c) { c.combine_bwd.grad_expert_out = nullptr; }, {"grad_expert_out", "NULL"});
  add("grad_recv_weights without expert_out", [](Calls& c) { c.combine_bwd.expert_out = nullptr; },
      {"expert_out", "grad_recv_weights"});
  add("expert_out without grad_recv_weights", [](Calls& c) { c.combine_bwd.grad_recv_weights = nullptr; },
      {"expert_out", "grad_recv_weights"});
  add("expert_out of another dtype", [](Calls& c) { c.expert_out.dtype = EPX_FLOAT16; },
      {"expert_out", "float16", "bfloat16"});
  add("expert_out of another H", [](Calls& c) { c.expert_out.sizes[1] = 7; }, {"expert_out", "7", text(kHidden)});
  add("expert_out of another N", [=](Calls& c) { --c.expert_out.sizes[0]; },
      {"expert_out", text(num_rows - 1), text(num_rows)});
  add("grad_expert_out of another dtype", [](Calls& c) { c.grad_expert_out.dtype = EPX_FLOAT16; },
      {"grad_expert_out", "float16", "bfloat16"});
  add("grad_recv_weights of another N", [=](Calls& c) { --c.grad_recv_weights.sizes[0]; },
      {"grad_recv_weights", text(num_rows - 1), text(num_rows)});
  add("grad_recv_weights bfloat16", [](Calls& c) { c.grad_recv_weights.dtype = EPX_BFLOAT16; },
      {"grad_recv_weights", "bfloat16"});
  add("recv_weights of another N", [=](Calls& c) { --c.recv_weights.sizes[0]; },
      {"recv_weights", text(num_rows - 1), text(num_rows)});
  add("grad_expert_out in expert_out", [](Calls& c) { c.grad_expert_out.data = c.expert_out.data; },
      {"grad_expert_out", "expert_out", "overlap"});
  add_too_many_rows(table, call, Op::combine_bwd, "grad_expert_out", &Calls::grad_expert_out, &Calls::grad_out);
  add_tensor(table, call, Op::combine_bwd, "grad_out", &Calls::grad_out);
  add_tensor(table, call, Op::combine_bwd, "grad_expert_out", &Calls::grad_expert_out);
  add_stray_sidecar(table, call, Op::combine_bwd, "grad_out", &Calls::grad_out);
  return table;
}

std::vector<Refusal> of_dispatch_bwd(int num_tokens, int64_t num_rows) {
  const std::string call = "dispatch_bwd";
  std::vector<Refusal> table;
  const auto add = [&](const char* name, std::function<void(Calls&)> spoil, std::vector<std::string> words) {
    table.push_back({call + ": " + name, Op::dispatch_bwd, std::move(spoil), std::move(words)});
  };
  add("grad_recv NULL", [](Calls& c) { c.dispatch_bwd.grad_recv = nullptr; }, {"grad_recv", "NULL"});
  add("grad_tokens NULL", [](Calls& c) { c.dispatch_bwd.grad_tokens = nullptr; }, {"grad_tokens", "NULL"});
  add("grad_recv_weights without grad_topk_weights", [](Calls& c) { c.dispatch_bwd.grad_topk_weights = nullptr; },
      {"grad_recv_weights", "grad_topk_weights"});
  add("grad_topk_weights without grad_recv_weights", [](Calls& c) { c.dispatch_bwd.grad_recv_weights = nullptr; },
      {"grad_recv_weights", "grad_topk_weights"});
  add("grad_tokens of another dtype", [](Calls& c) { c.grad_tokens.dtype = EPX_FLOAT16; },
      {"grad_tokens", "float16", "bfloat16"});
  add("grad_tokens of another H", [](Calls& c) { c.grad_tokens.sizes[1] = 7; }, {"grad_tokens", "7", text(kHidden)});
  add("grad_topk_weights of another K", [](Calls& c) { c.grad_topk_weights.sizes[1] = 3; },
      {"grad_topk_weights", "3", text(kTopK)});
  add("grad_topk_weights of another T", [=](Calls& c) { c.grad_topk_weights.sizes[0] = 1; },
      {"grad_topk_weights", "1", text(num_tokens)});
  add("grad_recv_weights of another N", [=](Calls& c) { --c.grad_recv_weights.sizes[0]; },
      {"grad_recv_weights", text(num_rows - 1), text(num_rows)});
  add("grad_tokens in grad_recv", [](Calls& c) { c.grad_tokens.data = c.grad_recv.data; },
      {"grad_tokens", "grad_recv", "overlap"});
  add_too_many_rows(table, call, Op::dispatch_bwd, "grad_recv", &Calls::grad_recv, &Calls::grad_tokens);
  add_tensor(table, call, Op::dispatch_bwd, "grad_recv", &Calls::grad_recv);
  add_tensor(table, call, Op::dispatch_bwd, "grad_tokens", &Calls::grad_tokens);
  add_stray_sidecar(table, call, Op::dispatch_bwd, "grad_tokens", &Calls::grad_tokens);
  return table;
}

std::vector<Refusal> of_dispatch_rank_major(int num_tokens) {
  const std::string call = "dispatch_rank_major";
  std::vector<Refusal> table;
  const auto add = [&](const char* name, std::function<void(Calls&)> spoil, std::vector<std::string> words) {
    table.push_back({call + ": " + name, Op::dispatch_rank_major, std::move(spoil), std::move(words)});
  };
  add("an alignment", [](Calls& c) { c.dispatch_rank_major.layer.alignment = 4; }, {"alignment", "4", "0 or 1"});
  add("tokens NULL", [](Calls& c) { c.dispatch_rank_major.tokens = nullptr; }, {"tokens", "NULL"});
  add("topk_idx NULL", [](Calls& c) { c.dispatch_rank_major.topk_idx = nullptr; }, {"topk_idx", "NULL"});
  add("topk_idx of another T", [](Calls& c) { c.topk_idx.sizes[0] = 1; }, {"topk_idx", "1", text(num_tokens)});
  add("topk_idx float32", [](Calls& c) { c.topk_idx.dtype = EPX_FLOAT32; }, {"topk_idx", "float32"});
  add("T beyond max_tokens_per_rank", [](Calls& c) { c.tokens.sizes[0] = c.topk_idx.sizes[0] = 7; },
      {"tokens", "7", text(kMaxTokens)});
  add("recv_tokens NULL", [](Calls& c) { c.dispatch_rank_major.recv_tokens = nullptr; }, {"recv_tokens", "NULL"});
  add("recv_tokens of two dimensions", [](Calls& c) { c.recv_rows.ndim = 2; }, {"recv_tokens", "2", "[P, M, H]"});
  add("recv_tokens of another P", [](Calls& c) { c.recv_rows.sizes[0] = 3; }, {"recv_tokens", "3", "P = 2"});
  add("recv_tokens of another H", [](Calls& c) { c.recv_rows.sizes[2] = 7; }, {"recv_tokens", "7", text(kHidden)});
  add("recv_tokens of another dtype", [](Calls& c) { c.recv_rows.dtype = EPX_FLOAT16; },
      {"recv_tokens", "float16", "bfloat16"});
  add("recv_tokens of 2^63 bytes",
      [](Calls& c) { c.recv_rows.sizes[1] = c.recv_row_idx.sizes[1] = c.recv_row_weights.sizes[1] = int64_t{1} << 60; },
      {"recv_tokens", "2^63 - 1"});
  add("rows whose weights would take 2^63 bytes",
      [](Calls& c) {
        c.recv_rows.sizes[1] = int64_t{1} << 60;
        c.recv_rows.sizes[2] = c.tokens.sizes[1] = 1;
      },
      {"recv_tokens", text(int64_t{1} << 61), "2^63 - 1"});
  add("recv_topk_idx NULL", [](Calls& c) { c.dispatch_rank_major.recv_topk_idx = nullptr; }, {"recv_topk_idx", "NULL"});
  add("recv_topk_idx of another M", [](Calls& c) { c.recv_row_idx.sizes[1] = 2; },
      {"recv_topk_idx", "2", text(kRowsPerSource)});
  add("recv_topk_idx float32", [](Calls& c) { c.recv_row_idx.dtype = EPX_FLOAT32; }, {"recv_topk_idx", "float32"});
  add("topk_weights without recv_weights", [](Calls& c) { c.dispatch_rank_major.recv_weights = nullptr; },
      {"topk_weights", "recv_weights"});
  add("recv_weights without topk_weights", [](Calls& c) { c.dispatch_rank_major.topk_weights = nullptr; },
      {"topk_weights", "recv_weights"});
  add("recv_weights of another K", [](Calls& c) { c.recv_row_weights.sizes[2] = 1; }, {"recv_weights", "1", text(kTopK)});
  add("counts NULL", [](Calls& c) { c.dispatch_rank_major.counts = nullptr; }, {"counts", "NULL"});
  add("counts of another P", [](Calls& c) { c.source_counts.sizes[0] = 3; }, {"counts", "3", "P = 2"});
  add("sidecar sent but not received",
      [](Calls& c) {
        c.recv_rows.sidecar = nullptr;
        c.recv_rows.sidecar_row_bytes = 0;
      },
      {"sidecar", text(kSidecarBytes)});
  add("recv_tokens in tokens", [](Calls& c) { c.recv_rows.data = c.tokens.data; }, {"recv_tokens", "tokens", "overlap"});
  add("counts in the handle memory", [](Calls& c) { c.source_counts.data = c.dispatch_rank_major.handle_mem; },
      {"counts", "handle_mem", "overlap"});
  add("recv_topk_idx in the sidecar of the last source", // a sidecar is [P, M, bytes]
      [](Calls& c) {
        c.recv_row_idx.data = static_cast<std::byte*>(c.recv_rows.sidecar) + (kRanks * kRowsPerSource - 1) * kSidecarBytes;
      },
      {"recv_topk_idx", "sidecar", "overlap"});
  add_tensor(table, call, Op::dispatch_rank_major, "recv_tokens", &Calls::recv_rows);
  add_tensor(table, call, Op::dispatch_rank_major, "recv_topk_idx", &Calls::recv_row_idx);
  add_tensor(table, call, Op::dispatch_rank_major, "counts", &Calls::source_counts);
  add_stray_sidecar(table, call, Op::dispatch_rank_major, "recv_topk_idx", &Calls::recv_row_idx);
  return table;
}

std::vector<Refusal> of_later_rank_major_calls(int num_tokens) {
  std::vector<Refusal> table;
  const auto add = [&](const std::string& call, Op op, const char* name, std::function<void(Calls&)> spoil,
                       std::vector<std::string> words) {
    words.push_back("epx_" + call);
    table.push_back({call + ": " + name, op, std::move(spoil), std::move(words)});
  };
  const auto in_combine = [&](auto&&... rest) { add("combine_rank_major", Op::combine_rank_major, rest...); };
  in_combine(
      "an alignment", [](Calls& c) { c.combine_rank_major.layer.alignment = 2; },
      std::vector<std::string>{"alignment", "2", "0 or 1"});
  in_combine(
      "expert_out NULL", [](Calls& c) { c.combine_rank_major.expert_out = nullptr; },
      std::vector<std::string>{"expert_out", "NULL"});
  in_combine(
      "out NULL", [](Calls& c) { c.combine_rank_major.out = nullptr; }, std::vector<std::string>{"out", "NULL"});
  in_combine(
      "out of another H", [](Calls& c) { c.out.sizes[1] = 7; }, std::vector<std::string>{"out", "7", text(kHidden)});
  in_combine(
      "T beyond max_tokens_per_rank", [](Calls& c) { c.out.sizes[0] = 7; },
      std::vector<std::string>{"out", "7", text(kMaxTokens)});
  in_combine(
      "out in expert_out", [](Calls& c) { c.out.data = c.row_expert_out.data; },
      std::vector<std::string>{"out", "expert_out", "overlap"});
  add_tensor(table, "combine_rank_major", Op::combine_rank_major, "expert_out", &Calls::row_expert_out);
  add_stray_sidecar(table, "combine_rank_major", Op::combine_rank_major, "expert_out", &Calls::row_expert_out);

  const auto in_combine_bwd = [&](auto&&... rest) { add("combine_rank_major_bwd", Op::combine_rank_major_bwd, rest...); };
  in_combine_bwd(
      "grad_out NULL", [](Calls& c) { c.combine_rank_major_bwd.grad_out = nullptr; },
      std::vector<std::string>{"grad_out", "NULL"});
  in_combine_bwd(
      "grad_expert_out of another P", [](Calls& c) { c.grad_rows.sizes[0] = 1; },
      std::vector<std::string>{"grad_expert_out", "1", "P = 2"});
  in_combine_bwd(
      "grad_expert_out of another dtype", [](Calls& c) { c.grad_rows.dtype = EPX_FLOAT16; },
      std::vector<std::string>{"grad_expert_out", "float16", "bfloat16"});
  in_combine_bwd(
      "grad_expert_out in grad_out", [](Calls& c) { c.grad_rows.data = c.grad_out.data; },
      std::vector<std::string>{"grad_expert_out", "grad_out", "overlap"});
  add_tensor(table, "combine_rank_major_bwd", Op::combine_rank_major_bwd, "grad_expert_out", &Calls::grad_rows);

  const auto in_dispatch_bwd = [&](auto&&... rest) {
    add("dispatch_rank_major_bwd", Op::dispatch_rank_major_bwd, rest...);
  };
  in_dispatch_bwd(
      "grad_tokens NULL", [](Calls& c) { c.dispatch_rank_major_bwd.grad_tokens = nullptr; },
      std::vector<std::string>{"grad_tokens", "NULL"});
  in_dispatch_bwd(
      "grad_recv_weights without grad_topk_weights",
      [](Calls& c) { c.dispatch_rank_major_bwd.grad_topk_weights = nullptr; },
      std::vector<std::string>{"grad_recv_weights", "grad_topk_weights"});
  in_dispatch_bwd(
      "grad_recv_weights of another M", [](Calls& c) { c.recv_row_weights.sizes[1] = 2; },
      std::vector<std::string>{"grad_recv_weights", "2", text(kRowsPerSource)});
  in_dispatch_bwd(
      "grad_topk_weights of another T", [](Calls& c) { c.grad_topk_weights.sizes[0] = 1; },
      std::vector<std::string>{"grad_topk_weights", "1", text(num_tokens)});
  add_tensor(table, "dispatch_rank_major_bwd", Op::dispatch_rank_major_bwd, "grad_recv", &Calls::grad_rows);
  return table;
}

// prepare_dispatch refuses what prepare and dispatch refuse, and tokens that are not those of the indices.
std::vector<Refusal> of_prepare_dispatch(int num_tokens, int num_local, int64_t num_rows) {
  std::vector<Refusal> table;
  const auto add = [&](const Refusal& refusal) {
    table.push_back({"prepare_dispatch as " + refusal.name, Op::prepare_dispatch,
                     [spoil = refusal.spoil](Calls& c) {
                       spoil(c);
                       set_prepare_dispatch(c);
                     },
                     refusal.words});
  };
  for (const Refusal& refusal : of_prepare(num_tokens, num_local, num_rows))
    add(refusal);
  for (const Refusal& refusal : of_dispatch(num_tokens, num_rows))
    add(refusal);
  const auto other_tokens = [](Calls& c) { c.tokens.sizes[0] = c.topk_weights.sizes[0] = 1; };
  table.push_back({"prepare_dispatch: tokens of another T",
                   Op::prepare_dispatch,
                   other_tokens,
                   {"epx_prepare_dispatch", "tokens", "1", text(num_tokens), "topk_idx"}});
  table.push_back({"prepare_dispatch: recv_tokens in slot_origin",
                   Op::prepare_dispatch,
                   [](Calls& c) { c.recv_tokens.data = c.slot_origin.data; },
                   {"recv_tokens", "slot_origin", "overlap"}});
  return table;
}

} // namespace

std::vector<Refusal> refusals(int num_tokens, int num_local_experts, int64_t num_rows, size_t handle_bytes) {
  std::vector<Refusal> table;
  add_common(table, "prepare", Op::prepare, &Calls::prepare, handle_bytes);
  add_common(table, "dispatch", Op::dispatch, &Calls::dispatch, handle_bytes);
  add_common(table, "prepare_dispatch", Op::prepare_dispatch, &Calls::prepare_dispatch, handle_bytes);
  add_common(table, "combine", Op::combine, &Calls::combine, handle_bytes);
  add_common(table, "combine_bwd", Op::combine_bwd, &Calls::combine_bwd, handle_bytes);
  add_common(table, "dispatch_bwd", Op::dispatch_bwd, &Calls::dispatch_bwd, handle_bytes);
  add_common(table, "dispatch_rank_major", Op::dispatch_rank_major, &Calls::dispatch_rank_major, handle_bytes);
  add_common(table, "combine_rank_major", Op::combine_rank_major, &Calls::combine_rank_major, handle_bytes);
  add_common(table, "combine_rank_major_bwd", Op::combine_rank_major_bwd, &Calls::combine_rank_major_bwd, handle_bytes);
  add_common(table, "dispatch_rank_major_bwd", Op::dispatch_rank_major_bwd, &Calls::dispatch_rank_major_bwd, handle_bytes);
  for (auto& part :
       {of_prepare(num_tokens, num_local_experts, num_rows), of_dispatch(num_tokens, num_rows),
        of_prepare_dispatch(num_tokens, num_local_experts, num_rows), of_combine(num_rows), of_combine_bwd(num_rows),
        of_dispatch_bwd(num_tokens, num_rows), of_dispatch_rank_major(num_tokens), of_later_rank_major_calls(num_tokens)}) {
    table.insert(table.end(), part.begin(), part.end());
  }
  return table;
}

} // namespace epx::test
