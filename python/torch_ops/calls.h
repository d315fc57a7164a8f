// SPDX-License-Identifier: Apache-2.0
// What the operators that call epx.h have in common: their args, and views of their tensors.
#pragma once

#include <utility>

#include "failure.h"
#include "registry.h"
#include "tensors.h"

namespace epx_torch {

constexpr auto kRowDtypes = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16};
// Of tokens that no format quantises: those of few bits are copied.
constexpr auto kTokenDtypes = {ScalarType::Float,         ScalarType::Half,        ScalarType::BFloat16,
                               ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2, ScalarType::Float4_e2m1fn_x2};
constexpr auto kIndexDtypes = {ScalarType::Int, ScalarType::Long};
constexpr auto kFloat = {ScalarType::Float};
constexpr auto kByte = {ScalarType::Byte};

// For a field of 32 bits, which the library checks further.
inline int32_t to_int32(const char* name, int64_t value) {
  if (!std::in_range<int32_t>(value)) refuse(name, " is ", value, "; it must fit in 32 bits");
  return static_cast<int32_t>(value);
}

inline int64_t require_count(const char* name, int64_t value) {
  if (value < 0) refuse(name, " is ", value, "; it must be at least 0");
  return value;
}

// What the args of all operations have in common.
template <typename Args>
Args make_args(const Group& group, int64_t top_k, int64_t alignment) {
  Args args = {};
  args.struct_size = sizeof(args);
  args.layer = {to_int32("top_k", top_k), to_int32("alignment", alignment)};
  args.stream = current_stream(group.place);
  return args;
}

// Those of an operation that reads handle memory.
template <typename Args>
Args make_args(const Group& group, int64_t top_k, int64_t alignment, const Tensor& handle_mem) {
  auto args = make_args<Args>(group, top_k, alignment);
  const epx_tensor memory = view("handle_mem", handle_mem, group.place, {kAnySize}, kByte);
  args.handle_mem = memory.data;
  args.handle_mem_bytes = static_cast<size_t>(memory.sizes[0]);
  return args;
}

// Refuses the K of a topk_idx, or an alignment, that the group was not created for.
inline void require_layer(const Group& group, const epx_layer& layer) {
  if (layer.top_k < 1 || layer.top_k > group.info.max_top_k)
    refuse("topk_idx has K = ", layer.top_k, "; it must be 1 to ", group.info.max_top_k, ", the group's max_top_k");
  if (layer.alignment < 0 || layer.alignment > group.info.max_alignment)
    refuse("alignment is ", layer.alignment, "; it must be 0 to ", group.info.max_alignment, ", the group's max_alignment");
}

// Handle memory for an operation that fills it in, which gets its address.
template <typename Args>
Tensor new_handle_mem(const Group& group, Args& args) {
  require_layer(group, args.layer);
  throw_if_failed(epx_handle_mem_size(group.group, &args.layer, &args.handle_mem_bytes));
  Tensor handle_mem = new_tensor(group.place, {static_cast<int64_t>(args.handle_mem_bytes)}, ScalarType::Byte);
  args.handle_mem = handle_mem.data_ptr();
  return handle_mem;
}

// Operators have no optional results: a tensor of no elements stands for one that is not there.
inline Tensor nothing(const Group& group) {
  return new_tensor(group.place, {0}, ScalarType::Float);
}

inline epx_tensor view_rows(const char* name, const Tensor& rows, const Group& group, int64_t num_rows = kAnySize) {
  return view(name, rows, group.place, {num_rows, kAnySize}, kRowDtypes);
}

inline epx_tensor view_tokens(const Tensor& tokens, const Group& group) {
  return view("tokens", tokens, group.place, {kAnySize, kAnySize}, kTokenDtypes);
}

inline epx_tensor view_weights(const char* name, const Tensor& weights, const Group& group, int64_t num_rows) {
  return view(name, weights, group.place, {num_rows}, kFloat);
}

// Memory for the sidecar of received rows, [N, S] or [P, M, S], which are bytes.
inline Tensor new_recv_sidecar(const Group& group, const epx_tensor& rows, const Tensor& sidecar) {
  const int64_t row_bytes = view("sidecar", sidecar, group.place, {kAnySize, kAnySize}, kByte).sizes[1];
  return rows.ndim == 3 ? new_tensor(group.place, {rows.sizes[0], rows.sizes[1], row_bytes}, ScalarType::Byte)
                        : new_tensor(group.place, {rows.sizes[0], row_bytes}, ScalarType::Byte);
}

// Gives tokens [T, H] their sidecar [T, S], and the rows that they become the memory for theirs.
inline void attach_sidecar(const Group& group, epx_tensor& sent, const Tensor& sidecar, epx_tensor& rows,
                           const Tensor& recv_sidecar) {
  const epx_tensor bytes = view("sidecar", sidecar, group.place, {sent.sizes[0], kAnySize}, kByte);
  const int64_t row_bytes = bytes.sizes[1];
  const epx_tensor received =
      rows.ndim == 3 ? view("recv_sidecar", recv_sidecar, group.place, {rows.sizes[0], rows.sizes[1], row_bytes}, kByte)
                     : view("recv_sidecar", recv_sidecar, group.place, {rows.sizes[0], row_bytes}, kByte);
  sent.sidecar = bytes.data;
  rows.sidecar = received.data;
  sent.sidecar_row_bytes = rows.sidecar_row_bytes = row_bytes;
}

} // namespace epx_torch
