// SPDX-License-Identifier: Apache-2.0
// A RefusalTable makes the refusals of one call.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/multiprocess/bytes_0_1.h"
#include "tests/multiprocess/layer_round.h"
#include "tests/multiprocess/refusals.h"

namespace epx::test {

inline std::string text(int64_t value) {
  return std::to_string(value);
}

inline void* one_byte_on(void* data) {
  return static_cast<std::byte*>(data) + 1;
}

// Adds refusals of one call, whose sentences name its function.
class RefusalTable {
public:
  RefusalTable(std::vector<Refusal>& refusals, std::string call, Op op)
      : refusals_(refusals), call_(std::move(call)), op_(op) {}

  void add(const std::string& name, std::function<void(Calls&)> spoil, std::vector<std::string> words) {
    words.push_back("epx_" + call_);
    refusals_.push_back({call_ + ": " + name, op_, std::move(spoil), std::move(words)});
  }

  // In those below `name` is how sentences name the tensor.

  // A tensor of another size than `wanted` in one dimension.
  void add_size(const std::string& name, const std::string& what, epx_tensor Calls::*tensor, int dimension, int64_t size,
                int64_t wanted) {
    add(name + " " + what, [=](Calls& c) { (c.*tensor).sizes[dimension] = size; }, {name, text(size), text(wanted)});
  }
  void add_other_dtype(const std::string& name, epx_tensor Calls::*tensor) {
    add(name + " of another dtype", [=](Calls& c) { (c.*tensor).dtype = EPX_FLOAT16; }, {name, "float16", "bfloat16"});
  }
  void add_overlap(const std::string& name, epx_tensor Calls::*tensor, const std::string& other,
                   epx_tensor Calls::*other_tensor) {
    add(name + " in " + other, [=](Calls& c) { (c.*tensor).data = (c.*other_tensor).data; }, {name, other, "overlap"});
  }

  template <typename Args>
  void add_basic(Args Calls::*args);
  template <typename Args>
  void add_common(Args Calls::*args, size_t handle_bytes);
  void add_tensor(const std::string& name, epx_tensor Calls::*tensor);
  void add_stray_sidecar(const std::string& name, epx_tensor Calls::*tensor);
  void add_too_many_rows(const std::string& name, epx_tensor Calls::*recv_rows, epx_tensor Calls::*token_rows);

private:
  std::vector<Refusal>& refusals_;
  std::string call_;
  Op op_;
};

// Adds the refusals that all calls have in common. `args` finds a call's args in a Calls.
template <typename Args>
void RefusalTable::add_basic(Args Calls::*args) {
  add("group NULL", [](Calls& c) { c.group = nullptr; }, {"group", "NULL"});
  add("args NULL", [](Calls& c) { c.without_args = true; }, {"args", "NULL"});
  const auto add_size = [&](const char* name, size_t size) {
    add(name, [=](Calls& c) { (c.*args).struct_size = size; },
        {"epx_" + call_ + "_args.struct_size is " + text(size), text(kBytes01<Args>), text(kMaxStructBytes)});
  };
  add_size("struct_size 0", 0);
  add_size("struct_size below that of 0.1", kBytes01<Args> - 8);
  add_size("struct_size that is no multiple of 8", sizeof(Args) + 4);
  add_size("struct_size that no version has", kMaxStructBytes + 8);
  add("stream on the host transport", [=](Calls& c) { (c.*args).stream = &c; }, {"stream"});
}

// Adds those that all calls of a layer have in common.
template <typename Args>
void RefusalTable::add_common(Args Calls::*args, size_t handle_bytes) {
  add_basic(args);
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
}

// Adds the refusals that all tensors have in common.
inline void RefusalTable::add_tensor(const std::string& name, epx_tensor Calls::*tensor) {
  const auto add = [&](const char* what, std::function<void(Calls&)> spoil, std::vector<std::string> words) {
    words.push_back(name);
    this->add(name + " " + what, std::move(spoil), std::move(words));
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
inline void RefusalTable::add_stray_sidecar(const std::string& name, epx_tensor Calls::*tensor) {
  const auto spoil = [=](Calls& c) {
    (c.*tensor).sidecar = c.tokens.sidecar;
    (c.*tensor).sidecar_row_bytes = kSidecarBytes;
  };
  add(name + " with a sidecar", spoil, {name, "sidecar"});
}

// N rows of one element whose own bytes can be counted in 63 bits, but not those of the float32 weights that go with them;
// and more bytes of the rows themselves than that. `token_rows` is the other side, [T, H].
inline void RefusalTable::add_too_many_rows(const std::string& name, epx_tensor Calls::*recv_rows,
                                            epx_tensor Calls::*token_rows) {
  const auto add = [&](const char* what, int64_t hidden) {
    const int64_t rows = int64_t{1} << 61;
    const auto spoil = [=](Calls& c) {
      (c.*recv_rows).sizes[0] = rows;
      (c.*recv_rows).sizes[1] = (c.*token_rows).sizes[1] = hidden;
      c.dispatch.topk_weights = c.dispatch.recv_weights = nullptr;
      c.combine.recv_weights = c.combine_bwd.recv_weights = nullptr;
      c.combine_bwd.expert_out = c.combine_bwd.grad_recv_weights = nullptr;
      c.dispatch_bwd.grad_recv_weights = c.dispatch_bwd.grad_topk_weights = nullptr;
    };
    this->add(name + " " + what, spoil, {call_, name, text(rows), "2^63 - 1"});
  };
  add("with weights of 2^63 bytes", 1);
  add("of 2^63 bytes", 2);
  add("of 2^64 elements", 8);
}

// The rows of a call that may have a format.
struct FormattedRows {
  epx_tensor Calls::*sent;
  std::string sent_name;
  epx_tensor Calls::*received;
  std::string received_name;
};

// Adds those of a call with a row format. `rows` are N, or P * M.
void add_format_refusals(RefusalTable& table, Op op, int num_tokens, int64_t rows, const FormattedRows& names);

// Adds those of ragged_all_to_all.
void add_ragged_refusals(RefusalTable& table);

// Adds those of a call whose sums have a format.
void add_sum_format_refusals(RefusalTable& table, Op op, const FormattedRows& names);

} // namespace epx::test
