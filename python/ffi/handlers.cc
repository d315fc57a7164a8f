// SPDX-License-Identifier: Apache-2.0
// The operations as custom calls of XLA's FFI, on CPU devices (host transport) and on CUDA devices (transport nccl). Both are
// the same code, since a stream is a pointer to it.
//
// A call's first operand is a token, a float32 scalar that it returns as its first result, in place. It has no meaning but the
// order: the next call of the group takes it. A backward call has another token, behind the first: that which entered its
// forward. Optional tensors come last, a sidecar last of all (attribute `has_sidecar`), and results follow them.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <epx/epx.h>
#include <xla/ffi/api/ffi.h>

#include "groups.h"

namespace ffi = xla::ffi;

namespace {

using epx_ffi::GroupUse;

epx_dtype dtype_of(ffi::DataType type) {
  switch (type) {
  case ffi::DataType::F32:
    return EPX_FLOAT32;
  case ffi::DataType::F16:
    return EPX_FLOAT16;
  case ffi::DataType::BF16:
    return EPX_BFLOAT16;
  case ffi::DataType::S32:
    return EPX_INT32;
  case ffi::DataType::S64:
    return EPX_INT64;
  case ffi::DataType::F64:
    return EPX_FLOAT64;
  case ffi::DataType::U8:
    return EPX_UINT8;
  default:
    return EPX_DTYPE_UNSET; // epx refuses it
  }
}

epx_tensor tensor_of(const ffi::AnyBuffer& buffer) {
  epx_tensor tensor{};
  tensor.data = buffer.untyped_data();
  tensor.dtype = dtype_of(buffer.element_type());
  const auto sizes = buffer.dimensions();
  tensor.ndim = static_cast<int32_t>(sizes.size());
  for (size_t i = 0; i < sizes.size() && i < 4; ++i)
    tensor.sizes[i] = sizes[i];
  return tensor;
}

ffi::ErrorCode code_of(epx_status status) {
  switch (status) {
  case EPX_ERROR_INVALID_ARGUMENT:
    return ffi::ErrorCode::kInvalidArgument;
  case EPX_ERROR_UNSUPPORTED:
    return ffi::ErrorCode::kUnimplemented;
  case EPX_ERROR_TIMEOUT:
    return ffi::ErrorCode::kDeadlineExceeded;
  case EPX_ERROR_ABORTED:
    return ffi::ErrorCode::kAborted;
  case EPX_ERROR_INTERNAL:
    return ffi::ErrorCode::kInternal;
  default:
    return ffi::ErrorCode::kFailedPrecondition;
  }
}

ffi::AnyBuffer buffer_at(const ffi::RemainingArgs& buffers, size_t i) {
  return buffers.get<ffi::AnyBuffer>(i).value();
}
ffi::AnyBuffer buffer_at(const ffi::RemainingRets& buffers, size_t i) {
  return *buffers.get<ffi::AnyBuffer>(i).value();
}

// The tensors of a call: its optional operands or results, by their place.
template <typename Buffers>
std::vector<epx_tensor> tensors_of(const Buffers& buffers) {
  std::vector<epx_tensor> tensors;
  for (size_t i = 0; i < buffers.size(); ++i)
    tensors.push_back(tensor_of(buffer_at(buffers, i)));
  return tensors;
}

// The optional tensors of a dispatch. If there is a sidecar, it is the last of them, and becomes that of `rows`.
template <typename Buffers>
std::vector<epx_tensor> tensors_of_dispatch(const Buffers& buffers, bool has_sidecar, epx_tensor& rows) {
  auto tensors = tensors_of(buffers);
  if (has_sidecar && !tensors.empty()) {
    const auto sidecar = buffer_at(buffers, tensors.size() - 1);
    rows.sidecar = sidecar.untyped_data();
    rows.sidecar_row_bytes = sidecar.dimensions().back() * static_cast<int64_t>(ffi::ByteWidth(sidecar.element_type()));
    tensors.pop_back();
  }
  return tensors;
}

const epx_tensor* optional(const std::vector<epx_tensor>& tensors, size_t i) {
  return i < tensors.size() ? &tensors[i] : nullptr;
}

// Makes the call. On CPU devices the stream is NULL.
template <typename Args>
ffi::Error call(epx_status (*function)(epx_group, const Args*), int64_t group, int64_t top_k, int64_t alignment,
                void* stream, const ffi::AnyBuffer& handle_mem, Args args) {
  const GroupUse use(group);
  if (use.get() == nullptr) return {ffi::ErrorCode::kFailedPrecondition, "epx: the group of this call has been destroyed"};
  if ((stream == nullptr) != use.is_on_host())
    return {ffi::ErrorCode::kInvalidArgument, std::string("epx: the group has transport ") +
                                                  (use.is_on_host() ? "host" : "nccl") + ", and this call is on a " +
                                                  (stream == nullptr ? "CPU" : "CUDA") + " device"};
  if (!std::in_range<int32_t>(top_k) || !std::in_range<int32_t>(alignment))
    return {ffi::ErrorCode::kInvalidArgument, "epx: top_k is " + std::to_string(top_k) + " and alignment is " +
                                                  std::to_string(alignment) + "; each must fit in 32 bits"};
  args.struct_size = sizeof(Args);
  args.layer.top_k = static_cast<int32_t>(top_k);
  args.layer.alignment = static_cast<int32_t>(alignment);
  args.handle_mem_bytes = handle_mem.size_bytes();
  args.stream = stream;
  const epx_status status = function(use.get(), &args);
  if (status == EPX_SUCCESS) return ffi::Error::Success();
  return {code_of(status), std::string("epx: ") + epx_status_string(status) + ": " + epx_last_error()};
}

// Optional: slot behind info, which is [5, 2] uint32: the words of int64, which JAX does not have unless it is told to.
ffi::Error prepare(void* stream, ffi::AnyBuffer, ffi::AnyBuffer topk_idx, ffi::Result<ffi::AnyBuffer>,
                   ffi::Result<ffi::AnyBuffer> handle_mem, ffi::Result<ffi::AnyBuffer> counts,
                   ffi::Result<ffi::AnyBuffer> offsets, ffi::Result<ffi::AnyBuffer> global_counts,
                   ffi::Result<ffi::AnyBuffer> info, ffi::RemainingRets slot, int64_t group, int64_t top_k,
                   int64_t alignment) {
  const epx_tensor idx = tensor_of(topk_idx), count = tensor_of(*counts), offset = tensor_of(*offsets);
  const epx_tensor global = tensor_of(*global_counts);
  const epx_tensor numbers = epx_tensor_1d(info->untyped_data(), EPX_INT64, info->dimensions().front());
  const auto out = tensors_of(slot);
  epx_prepare_args args{};
  args.handle_mem = handle_mem->untyped_data();
  args.topk_idx = &idx;
  args.counts = &count;
  args.offsets = &offset;
  args.global_counts = &global;
  args.info = &numbers;
  args.slot = optional(out, 0);
  return call(epx_prepare, group, top_k, alignment, stream, *handle_mem, args);
}

// Optional: topk_weights and the sidecar; recv_weights and its sidecar behind recv_tokens.
ffi::Error dispatch(void* stream, ffi::AnyBuffer, ffi::AnyBuffer handle_mem, ffi::AnyBuffer tokens,
                    ffi::RemainingArgs weights, ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer> recv_tokens,
                    ffi::RemainingRets recv_weights, int64_t has_sidecar, int64_t group, int64_t top_k, int64_t alignment) {
  epx_tensor sent = tensor_of(tokens), received = tensor_of(*recv_tokens);
  const auto in = tensors_of_dispatch(weights, has_sidecar != 0, sent);
  const auto out = tensors_of_dispatch(recv_weights, has_sidecar != 0, received);
  epx_dispatch_args args{};
  args.handle_mem = handle_mem.untyped_data();
  args.tokens = &sent;
  args.topk_weights = optional(in, 0);
  args.recv_tokens = &received;
  args.recv_weights = optional(out, 0);
  return call(epx_dispatch, group, top_k, alignment, stream, handle_mem, args);
}

// Optional: topk_weights and the sidecar; recv_weights, slot (attribute `has_slot`) and the rows' sidecar behind recv_tokens.
ffi::Error prepare_dispatch(void* stream, ffi::AnyBuffer, ffi::AnyBuffer topk_idx, ffi::AnyBuffer tokens,
                            ffi::RemainingArgs weights, ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer> handle_mem,
                            ffi::Result<ffi::AnyBuffer> counts, ffi::Result<ffi::AnyBuffer> offsets,
                            ffi::Result<ffi::AnyBuffer> global_counts, ffi::Result<ffi::AnyBuffer> info,
                            ffi::Result<ffi::AnyBuffer> recv_tokens, ffi::RemainingRets recv_weights_and_slot,
                            int64_t has_sidecar, int64_t has_slot, int64_t group, int64_t top_k, int64_t alignment) {
  const epx_tensor idx = tensor_of(topk_idx), count = tensor_of(*counts), offset = tensor_of(*offsets);
  const epx_tensor global = tensor_of(*global_counts);
  const epx_tensor numbers = epx_tensor_1d(info->untyped_data(), EPX_INT64, info->dimensions().front());
  epx_tensor sent = tensor_of(tokens), received = tensor_of(*recv_tokens);
  const auto in = tensors_of_dispatch(weights, has_sidecar != 0, sent);
  const auto out = tensors_of_dispatch(recv_weights_and_slot, has_sidecar != 0, received);
  epx_prepare_dispatch_args args{};
  args.handle_mem = handle_mem->untyped_data();
  args.topk_idx = &idx;
  args.counts = &count;
  args.offsets = &offset;
  args.global_counts = &global;
  args.info = &numbers;
  args.slot = has_slot != 0 ? &out.back() : nullptr;
  args.tokens = &sent;
  args.topk_weights = optional(in, 0);
  args.recv_tokens = &received;
  args.recv_weights = in.empty() ? nullptr : &out.front();
  return call(epx_prepare_dispatch, group, top_k, alignment, stream, *handle_mem, args);
}

// Optional: recv_weights.
ffi::Error combine(void* stream, ffi::AnyBuffer, ffi::AnyBuffer handle_mem, ffi::AnyBuffer expert_out,
                   ffi::RemainingArgs recv_weights, ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer> out,
                   int64_t group, int64_t top_k, int64_t alignment) {
  const epx_tensor rows = tensor_of(expert_out), sums = tensor_of(*out);
  const auto in = tensors_of(recv_weights);
  epx_combine_args args{};
  args.handle_mem = handle_mem.untyped_data();
  args.expert_out = &rows;
  args.recv_weights = optional(in, 0);
  args.out = &sums;
  return call(epx_combine, group, top_k, alignment, stream, handle_mem, args);
}

// Optional: recv_weights and expert_out, and grad_recv_weights behind grad_expert_out.
ffi::Error combine_bwd(void* stream, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer handle_mem, ffi::AnyBuffer grad_out,
                       ffi::RemainingArgs weights_and_rows, ffi::Result<ffi::AnyBuffer>,
                       ffi::Result<ffi::AnyBuffer> grad_expert_out, ffi::RemainingRets grad_recv_weights, int64_t group,
                       int64_t top_k, int64_t alignment) {
  const epx_tensor grad = tensor_of(grad_out), grad_rows = tensor_of(*grad_expert_out);
  const auto in = tensors_of(weights_and_rows), out = tensors_of(grad_recv_weights);
  epx_combine_bwd_args args{};
  args.handle_mem = handle_mem.untyped_data();
  args.grad_out = &grad;
  args.recv_weights = optional(in, 0);
  args.expert_out = optional(in, 1);
  args.grad_expert_out = &grad_rows;
  args.grad_recv_weights = optional(out, 0);
  return call(epx_combine_bwd, group, top_k, alignment, stream, handle_mem, args);
}

// Optional: grad_recv_weights, and grad_topk_weights behind grad_tokens.
ffi::Error dispatch_bwd(void* stream, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer handle_mem, ffi::AnyBuffer grad_recv,
                        ffi::RemainingArgs grad_recv_weights, ffi::Result<ffi::AnyBuffer>,
                        ffi::Result<ffi::AnyBuffer> grad_tokens, ffi::RemainingRets grad_topk_weights, int64_t group,
                        int64_t top_k, int64_t alignment) {
  const epx_tensor grad_rows = tensor_of(grad_recv), grad = tensor_of(*grad_tokens);
  const auto in = tensors_of(grad_recv_weights), out = tensors_of(grad_topk_weights);
  epx_dispatch_bwd_args args{};
  args.handle_mem = handle_mem.untyped_data();
  args.grad_recv = &grad_rows;
  args.grad_recv_weights = optional(in, 0);
  args.grad_tokens = &grad;
  args.grad_topk_weights = optional(out, 0);
  return call(epx_dispatch_bwd, group, top_k, alignment, stream, handle_mem, args);
}

// Optional: topk_weights and the sidecar; recv_weights and its sidecar behind recv_tokens.
ffi::Error dispatch_rank_major(void* stream, ffi::AnyBuffer, ffi::AnyBuffer topk_idx, ffi::AnyBuffer tokens,
                               ffi::RemainingArgs weights, ffi::Result<ffi::AnyBuffer>,
                               ffi::Result<ffi::AnyBuffer> handle_mem, ffi::Result<ffi::AnyBuffer> counts,
                               ffi::Result<ffi::AnyBuffer> recv_topk_idx, ffi::Result<ffi::AnyBuffer> recv_tokens,
                               ffi::RemainingRets recv_weights, int64_t has_sidecar, int64_t group, int64_t top_k,
                               int64_t alignment) {
  const epx_tensor idx = tensor_of(topk_idx), count = tensor_of(*counts), local_idx = tensor_of(*recv_topk_idx);
  epx_tensor sent = tensor_of(tokens), received = tensor_of(*recv_tokens);
  const auto in = tensors_of_dispatch(weights, has_sidecar != 0, sent);
  const auto out = tensors_of_dispatch(recv_weights, has_sidecar != 0, received);
  epx_dispatch_rank_major_args args{};
  args.handle_mem = handle_mem->untyped_data();
  args.tokens = &sent;
  args.topk_idx = &idx;
  args.topk_weights = optional(in, 0);
  args.recv_tokens = &received;
  args.recv_topk_idx = &local_idx;
  args.recv_weights = optional(out, 0);
  args.counts = &count;
  return call(epx_dispatch_rank_major, group, top_k, alignment, stream, *handle_mem, args);
}

ffi::Error combine_rank_major(void* stream, ffi::AnyBuffer, ffi::AnyBuffer handle_mem, ffi::AnyBuffer expert_out,
                              ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer> out, int64_t group, int64_t top_k,
                              int64_t alignment) {
  const epx_tensor rows = tensor_of(expert_out), sums = tensor_of(*out);
  epx_combine_rank_major_args args{};
  args.handle_mem = handle_mem.untyped_data();
  args.expert_out = &rows;
  args.out = &sums;
  return call(epx_combine_rank_major, group, top_k, alignment, stream, handle_mem, args);
}

ffi::Error combine_rank_major_bwd(void* stream, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer handle_mem,
                                  ffi::AnyBuffer grad_out, ffi::Result<ffi::AnyBuffer>,
                                  ffi::Result<ffi::AnyBuffer> grad_expert_out, int64_t group, int64_t top_k,
                                  int64_t alignment) {
  const epx_tensor grad = tensor_of(grad_out), grad_rows = tensor_of(*grad_expert_out);
  epx_combine_rank_major_bwd_args args{};
  args.handle_mem = handle_mem.untyped_data();
  args.grad_out = &grad;
  args.grad_expert_out = &grad_rows;
  return call(epx_combine_rank_major_bwd, group, top_k, alignment, stream, handle_mem, args);
}

// Optional: grad_recv_weights, and grad_topk_weights behind grad_tokens.
ffi::Error dispatch_rank_major_bwd(void* stream, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer handle_mem,
                                   ffi::AnyBuffer grad_recv, ffi::RemainingArgs grad_recv_weights,
                                   ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer> grad_tokens,
                                   ffi::RemainingRets grad_topk_weights, int64_t group, int64_t top_k, int64_t alignment) {
  const epx_tensor grad_rows = tensor_of(grad_recv), grad = tensor_of(*grad_tokens);
  const auto in = tensors_of(grad_recv_weights), out = tensors_of(grad_topk_weights);
  epx_dispatch_rank_major_bwd_args args{};
  args.handle_mem = handle_mem.untyped_data();
  args.grad_recv = &grad_rows;
  args.grad_recv_weights = optional(in, 0);
  args.grad_tokens = &grad;
  args.grad_topk_weights = optional(out, 0);
  return call(epx_dispatch_rank_major_bwd, group, top_k, alignment, stream, handle_mem, args);
}

// Makes no call: XLA keeps it, and with it all that its token depends on.
ffi::Error hold(void*, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) {
  return ffi::Error::Success();
}

// On CPU devices there is no stream.
template <auto function>
struct OnHost;
template <typename... Args, ffi::Error (*function)(void*, Args...)>
struct OnHost<function> {
  static ffi::Error run(Args... args) { return function(nullptr, args...); }
};

using Buffer = ffi::AnyBuffer;

} // namespace

#define EPX_ATTRIBUTES .Attr<int64_t>("group").Attr<int64_t>("top_k").Attr<int64_t>("alignment")
#define EPX_CALL_HANDLER(name, operands) EPX_HANDLER(name, operands EPX_ATTRIBUTES)
#define EPX_HANDLER(name, operands)                                                                                        \
  extern "C" EPX_API XLA_FFI_Error* epx_ffi_##name##_cpu(XLA_FFI_CallFrame*);                                              \
  extern "C" EPX_API XLA_FFI_Error* epx_ffi_##name##_cuda(XLA_FFI_CallFrame*);                                             \
                                                                                                                           \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(epx_ffi_##name##_cpu, OnHost<name>::run, ffi::Ffi::Bind() operands);                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(epx_ffi_##name##_cuda, name, ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>() operands)

EPX_CALL_HANDLER(prepare, .Arg<Buffer>()
                              .Arg<Buffer>()
                              .Ret<Buffer>()
                              .Ret<Buffer>()
                              .Ret<Buffer>()
                              .Ret<Buffer>()
                              .Ret<Buffer>()
                              .Ret<Buffer>()
                              .RemainingRets());
EPX_CALL_HANDLER(
    dispatch,
    .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().RemainingArgs().Ret<Buffer>().Ret<Buffer>().RemainingRets().Attr<int64_t>(
        "has_sidecar"));
EPX_CALL_HANDLER(prepare_dispatch, .Arg<Buffer>()
                                       .Arg<Buffer>()
                                       .Arg<Buffer>()
                                       .RemainingArgs()
                                       .Ret<Buffer>()
                                       .Ret<Buffer>()
                                       .Ret<Buffer>()
                                       .Ret<Buffer>()
                                       .Ret<Buffer>()
                                       .Ret<Buffer>()
                                       .Ret<Buffer>()
                                       .RemainingRets()
                                       .Attr<int64_t>("has_sidecar")
                                       .Attr<int64_t>("has_slot"));
EPX_CALL_HANDLER(combine, .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().RemainingArgs().Ret<Buffer>().Ret<Buffer>());
EPX_CALL_HANDLER(
    combine_bwd,
    .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().RemainingArgs().Ret<Buffer>().Ret<Buffer>().RemainingRets());
EPX_CALL_HANDLER(
    dispatch_bwd,
    .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().RemainingArgs().Ret<Buffer>().Ret<Buffer>().RemainingRets());
EPX_CALL_HANDLER(dispatch_rank_major, .Arg<Buffer>()
                                          .Arg<Buffer>()
                                          .Arg<Buffer>()
                                          .RemainingArgs()
                                          .Ret<Buffer>()
                                          .Ret<Buffer>()
                                          .Ret<Buffer>()
                                          .Ret<Buffer>()
                                          .Ret<Buffer>()
                                          .RemainingRets()
                                          .Attr<int64_t>("has_sidecar"));
EPX_CALL_HANDLER(combine_rank_major, .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Ret<Buffer>().Ret<Buffer>());
EPX_CALL_HANDLER(combine_rank_major_bwd,
                 .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Ret<Buffer>().Ret<Buffer>());
EPX_CALL_HANDLER(
    dispatch_rank_major_bwd,
    .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().RemainingArgs().Ret<Buffer>().Ret<Buffer>().RemainingRets());
EPX_HANDLER(hold, .Arg<Buffer>().Ret<Buffer>());
