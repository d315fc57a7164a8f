// SPDX-License-Identifier: Apache-2.0
// The operations as custom calls of XLA's FFI, on CPU devices (host transport) and on CUDA devices (transport nccl). Both are
// the same code, since a stream is a pointer to it.
//
// A call's first operand is a token, a float32 scalar that it returns as its first result, in place. It has no meaning but the
// order: the next call of the group takes it. A backward call has another token, behind the first: that which entered its
// forward. Optional tensors come last, and results follow them. Those of a dispatch are in the order of Optional; its attributes
// `optional_operands` and `optional_results` have a bit for each that is there.
#include <bit>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <epx/epx.h>
#include <xla/ffi/api/ffi.h>

#include "groups.h"

namespace ffi = xla::ffi;

namespace {

// The attributes of a dispatch: those of all calls, what is optional, and its row format, whose scaling is EPX_SCALING_NONE
// without one. zone_stride is of prepare_dispatch, and row_spacing of dispatch_rank_major; they are 0 in the others.
struct DispatchAttributes {
  int64_t group, top_k, alignment, zone_stride, row_spacing, optional_operands, optional_results, scaling, dtype,
      scale_layout;
  float amax_floor;
};

// Those of prepare, which moves no rows.
struct PrepareAttributes {
  int64_t group, top_k, alignment, zone_stride;
};

// Those of the other calls, which have no optional tensors of rows, but a format.
struct FormatAttributes {
  int64_t group, top_k, alignment, scaling, dtype, scale_layout;
  float amax_floor;
};

// Those of the ragged all-to-all, which has no layer.
struct SliceAttributes {
  int64_t group;
  bool transposed;
};

} // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(DispatchAttributes, ffi::StructMember<int64_t>("group"),
                                      ffi::StructMember<int64_t>("top_k"), ffi::StructMember<int64_t>("alignment"),
                                      ffi::StructMember<int64_t>("zone_stride"), ffi::StructMember<int64_t>("row_spacing"),
                                      ffi::StructMember<int64_t>("optional_operands"),
                                      ffi::StructMember<int64_t>("optional_results"), ffi::StructMember<int64_t>("scaling"),
                                      ffi::StructMember<int64_t>("dtype"), ffi::StructMember<int64_t>("scale_layout"),
                                      ffi::StructMember<float>("amax_floor"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(PrepareAttributes, ffi::StructMember<int64_t>("group"),
                                      ffi::StructMember<int64_t>("top_k"), ffi::StructMember<int64_t>("alignment"),
                                      ffi::StructMember<int64_t>("zone_stride"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(FormatAttributes, ffi::StructMember<int64_t>("group"),
                                      ffi::StructMember<int64_t>("top_k"), ffi::StructMember<int64_t>("alignment"),
                                      ffi::StructMember<int64_t>("scaling"), ffi::StructMember<int64_t>("dtype"),
                                      ffi::StructMember<int64_t>("scale_layout"), ffi::StructMember<float>("amax_floor"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(SliceAttributes, ffi::StructMember<int64_t>("group"),
                                      ffi::StructMember<bool>("transposed"));

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
  case ffi::DataType::F8E4M3FN:
    return EPX_FLOAT8_E4M3;
  case ffi::DataType::F8E5M2:
    return EPX_FLOAT8_E5M2;
  case ffi::DataType::F8E8M0FNU:
    return EPX_FLOAT8_E8M0;
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

const epx_tensor* optional(const std::vector<epx_tensor>& tensors, size_t i) {
  return i < tensors.size() ? &tensors[i] : nullptr;
}

// As python/epx/jax/_rows.py has them.
enum Optional : uint64_t { kWeights = 1, kScales = 2, kRowScales = 4, kEncodeScale = 8, kSidecar = 16, kSlot = 32 };

template <typename Buffers>
class OptionalTensors {
public:
  OptionalTensors(const Buffers& buffers, int64_t present)
      : buffers_(buffers), tensors_(tensors_of(buffers)), present_(static_cast<uint64_t>(present)) {}

  // NULL where it is not there.
  const epx_tensor* get(Optional which) const {
    return (present_ & which) != 0 ? optional(tensors_, place(which)) : nullptr;
  }

  // Has the rows take a sidecar along where there is one, which may be of a dtype that epx does not have.
  void attach_sidecar(epx_tensor& rows) const {
    if (get(kSidecar) == nullptr) return;
    const auto sidecar = buffer_at(buffers_, place(kSidecar));
    rows.sidecar = sidecar.untyped_data();
    rows.sidecar_row_bytes = sidecar.dimensions().back() * static_cast<int64_t>(ffi::ByteWidth(sidecar.element_type()));
  }

private:
  size_t place(Optional which) const { return static_cast<size_t>(std::popcount(present_ & (which - 1))); }

  const Buffers& buffers_;
  std::vector<epx_tensor> tensors_;
  uint64_t present_;
};

// Without tensors.
template <typename Attributes>
epx_row_format format_of(const Attributes& attributes) {
  epx_row_format format = {};
  format.struct_size = sizeof(format);
  format.scaling = static_cast<epx_scaling>(attributes.scaling);
  format.dtype = static_cast<epx_dtype>(attributes.dtype);
  format.amax_floor = attributes.amax_floor;
  format.scale_layout = static_cast<epx_scale_layout>(attributes.scale_layout);
  return format;
}

const epx_row_format* optional(const epx_row_format& format) {
  return format.scaling != EPX_SCALING_NONE ? &format : nullptr;
}

// The tensors of a dispatch that are its rows', which its args point to.
class DispatchTensors {
public:
  DispatchTensors(const ffi::AnyBuffer& tokens, const ffi::RemainingArgs& operands, const ffi::AnyBuffer& recv_tokens,
                  const ffi::RemainingRets& results, const DispatchAttributes& attributes)
      : operands_(operands, attributes.optional_operands), results_(results, attributes.optional_results),
        sent_(tensor_of(tokens)), received_(tensor_of(recv_tokens)), format_(format_of(attributes)) {
    operands_.attach_sidecar(sent_);
    results_.attach_sidecar(received_);
    format_.scales = operands_.get(kScales);
    format_.row_scales = operands_.get(kRowScales);
    format_.encode_scale = operands_.get(kEncodeScale);
    format_.recv_scales = results_.get(kScales);
    format_.recv_row_scales = results_.get(kRowScales);
    if (format_.dtype == EPX_FLOAT4_E2M1)
      for (epx_tensor* rows : {&sent_, &received_})
        as_elements_of_4_bits(*rows);
  }
  DispatchTensors(const DispatchTensors&) = delete;
  DispatchTensors& operator=(const DispatchTensors&) = delete;

  template <typename Args>
  void point(Args& args) const {
    args.tokens = &sent_;
    args.topk_weights = operands_.get(kWeights);
    args.recv_tokens = &received_;
    args.recv_weights = results_.get(kWeights);
    args.format = optional(format_);
  }

  const epx_tensor* slot() const { return results_.get(kSlot); }

private:
  // Python has them as bytes, two to a byte.
  static void as_elements_of_4_bits(epx_tensor& rows) {
    if (rows.dtype != EPX_UINT8) return;
    rows.dtype = EPX_FLOAT4_E2M1;
    rows.sizes[rows.ndim - 1] *= 2;
  }

  OptionalTensors<ffi::RemainingArgs> operands_;
  OptionalTensors<ffi::RemainingRets> results_;
  epx_tensor sent_, received_;
  epx_row_format format_;
};

// Makes a call of any kind. On CPU devices the stream is NULL.
template <typename Args>
ffi::Error call_group(epx_status (*function)(epx_group, const Args*), int64_t group, void* stream, Args args) {
  const GroupUse use(group);
  if (use.get() == nullptr) return {ffi::ErrorCode::kFailedPrecondition, "epx: the group of this call has been destroyed"};
  if ((stream == nullptr) != use.is_on_host())
    return {ffi::ErrorCode::kInvalidArgument, std::string("epx: the group has transport ") +
                                                  (use.is_on_host() ? "host" : "nccl") + ", and this call is on a " +
                                                  (stream == nullptr ? "CPU" : "CUDA") + " device"};
  args.struct_size = sizeof(Args);
  args.stream = stream;
  const epx_status status = function(use.get(), &args);
  if (status == EPX_SUCCESS) return ffi::Error::Success();
  return {code_of(status), std::string("epx: ") + epx_status_string(status) + ": " + epx_last_error()};
}

// Makes a call of a layer.
template <typename Attributes, typename Args>
ffi::Error call(epx_status (*function)(epx_group, const Args*), const Attributes& attributes, void* stream,
                const ffi::AnyBuffer& handle_mem, Args args) {
  const int64_t top_k = attributes.top_k, alignment = attributes.alignment;
  if (!std::in_range<int32_t>(top_k) || !std::in_range<int32_t>(alignment))
    return {ffi::ErrorCode::kInvalidArgument, "epx: top_k is " + std::to_string(top_k) + " and alignment is " +
                                                  std::to_string(alignment) + "; each must fit in 32 bits"};
  args.layer.top_k = static_cast<int32_t>(top_k);
  args.layer.alignment = static_cast<int32_t>(alignment);
  args.handle_mem_bytes = handle_mem.size_bytes();
  return call_group(function, attributes.group, stream, args);
}

// Optional: slot behind info, which is [5, 2] uint32: the words of int64, which JAX does not have unless it is told to.
ffi::Error prepare(void* stream, ffi::AnyBuffer, ffi::AnyBuffer topk_idx, ffi::Result<ffi::AnyBuffer>,
                   ffi::Result<ffi::AnyBuffer> handle_mem, ffi::Result<ffi::AnyBuffer> counts,
                   ffi::Result<ffi::AnyBuffer> offsets, ffi::Result<ffi::AnyBuffer> global_counts,
                   ffi::Result<ffi::AnyBuffer> info, ffi::RemainingRets slot, PrepareAttributes attributes) {
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
  args.zone_stride = attributes.zone_stride;
  return call(epx_prepare, attributes, stream, *handle_mem, args);
}

ffi::Error dispatch(void* stream, ffi::AnyBuffer, ffi::AnyBuffer handle_mem, ffi::AnyBuffer tokens,
                    ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer> recv_tokens,
                    ffi::RemainingRets results, DispatchAttributes attributes) {
  const DispatchTensors rows(tokens, operands, *recv_tokens, results, attributes);
  epx_dispatch_args args{};
  args.handle_mem = handle_mem.untyped_data();
  rows.point(args);
  return call(epx_dispatch, attributes, stream, handle_mem, args);
}

ffi::Error prepare_dispatch(void* stream, ffi::AnyBuffer, ffi::AnyBuffer topk_idx, ffi::AnyBuffer tokens,
                            ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer>,
                            ffi::Result<ffi::AnyBuffer> handle_mem, ffi::Result<ffi::AnyBuffer> counts,
                            ffi::Result<ffi::AnyBuffer> offsets, ffi::Result<ffi::AnyBuffer> global_counts,
                            ffi::Result<ffi::AnyBuffer> info, ffi::Result<ffi::AnyBuffer> recv_tokens,
                            ffi::RemainingRets results, DispatchAttributes attributes) {
  const epx_tensor idx = tensor_of(topk_idx), count = tensor_of(*counts), offset = tensor_of(*offsets);
  const epx_tensor global = tensor_of(*global_counts);
  const epx_tensor numbers = epx_tensor_1d(info->untyped_data(), EPX_INT64, info->dimensions().front());
  const DispatchTensors rows(tokens, operands, *recv_tokens, results, attributes);
  epx_prepare_dispatch_args args{};
  args.handle_mem = handle_mem->untyped_data();
  args.topk_idx = &idx;
  args.counts = &count;
  args.offsets = &offset;
  args.global_counts = &global;
  args.info = &numbers;
  args.slot = rows.slot();
  rows.point(args);
  args.zone_stride = attributes.zone_stride;
  return call(epx_prepare_dispatch, attributes, stream, *handle_mem, args);
}

// Optional: recv_weights.
ffi::Error combine(void* stream, ffi::AnyBuffer, ffi::AnyBuffer handle_mem, ffi::AnyBuffer expert_out,
                   ffi::RemainingArgs recv_weights, ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer> out,
                   FormatAttributes attributes) {
  const epx_tensor rows = tensor_of(expert_out), sums = tensor_of(*out);
  const auto in = tensors_of(recv_weights);
  const epx_row_format format = format_of(attributes);
  epx_combine_args args{};
  args.handle_mem = handle_mem.untyped_data();
  args.expert_out = &rows;
  args.recv_weights = optional(in, 0);
  args.out = &sums;
  args.format = optional(format);
  return call(epx_combine, attributes, stream, handle_mem, args);
}

// Optional: recv_weights and expert_out, and grad_recv_weights behind grad_expert_out.
ffi::Error combine_bwd(void* stream, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer handle_mem, ffi::AnyBuffer grad_out,
                       ffi::RemainingArgs weights_and_rows, ffi::Result<ffi::AnyBuffer>,
                       ffi::Result<ffi::AnyBuffer> grad_expert_out, ffi::RemainingRets grad_recv_weights,
                       FormatAttributes attributes) {
  const epx_tensor grad = tensor_of(grad_out), grad_rows = tensor_of(*grad_expert_out);
  const auto in = tensors_of(weights_and_rows), out = tensors_of(grad_recv_weights);
  const epx_row_format format = format_of(attributes);
  epx_combine_bwd_args args{};
  args.handle_mem = handle_mem.untyped_data();
  args.grad_out = &grad;
  args.recv_weights = optional(in, 0);
  args.expert_out = optional(in, 1);
  args.grad_expert_out = &grad_rows;
  args.grad_recv_weights = optional(out, 0);
  args.format = optional(format);
  return call(epx_combine_bwd, attributes, stream, handle_mem, args);
}

// Optional: grad_recv_weights, and grad_topk_weights behind grad_tokens.
ffi::Error dispatch_bwd(void* stream, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer handle_mem, ffi::AnyBuffer grad_recv,
                        ffi::RemainingArgs grad_recv_weights, ffi::Result<ffi::AnyBuffer>,
                        ffi::Result<ffi::AnyBuffer> grad_tokens, ffi::RemainingRets grad_topk_weights,
                        FormatAttributes attributes) {
  const epx_tensor grad_rows = tensor_of(grad_recv), grad = tensor_of(*grad_tokens);
  const auto in = tensors_of(grad_recv_weights), out = tensors_of(grad_topk_weights);
  const epx_row_format format = format_of(attributes);
  epx_dispatch_bwd_args args{};
  args.handle_mem = handle_mem.untyped_data();
  args.grad_recv = &grad_rows;
  args.grad_recv_weights = optional(in, 0);
  args.grad_tokens = &grad;
  args.grad_topk_weights = optional(out, 0);
  args.format = optional(format);
  return call(epx_dispatch_bwd, attributes, stream, handle_mem, args);
}

ffi::Error dispatch_rank_major(void* stream, ffi::AnyBuffer, ffi::AnyBuffer topk_idx, ffi::AnyBuffer tokens,
                               ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer>,
                               ffi::Result<ffi::AnyBuffer> handle_mem, ffi::Result<ffi::AnyBuffer> counts,
                               ffi::Result<ffi::AnyBuffer> recv_topk_idx, ffi::Result<ffi::AnyBuffer> recv_tokens,
                               ffi::RemainingRets results, DispatchAttributes attributes) {
  const epx_tensor idx = tensor_of(topk_idx), count = tensor_of(*counts), local_idx = tensor_of(*recv_topk_idx);
  const DispatchTensors rows(tokens, operands, *recv_tokens, results, attributes);
  epx_dispatch_rank_major_args args{};
  args.handle_mem = handle_mem->untyped_data();
  args.topk_idx = &idx;
  args.recv_topk_idx = &local_idx;
  args.counts = &count;
  args.row_spacing = static_cast<epx_row_spacing>(attributes.row_spacing);
  rows.point(args);
  return call(epx_dispatch_rank_major, attributes, stream, *handle_mem, args);
}

ffi::Error combine_rank_major(void* stream, ffi::AnyBuffer, ffi::AnyBuffer handle_mem, ffi::AnyBuffer expert_out,
                              ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer> out, FormatAttributes attributes) {
  const epx_tensor rows = tensor_of(expert_out), sums = tensor_of(*out);
  const epx_row_format format = format_of(attributes);
  epx_combine_rank_major_args args{};
  args.handle_mem = handle_mem.untyped_data();
  args.expert_out = &rows;
  args.out = &sums;
  args.format = optional(format);
  return call(epx_combine_rank_major, attributes, stream, handle_mem, args);
}

ffi::Error combine_rank_major_bwd(void* stream, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer handle_mem,
                                  ffi::AnyBuffer grad_out, ffi::Result<ffi::AnyBuffer>,
                                  ffi::Result<ffi::AnyBuffer> grad_expert_out, FormatAttributes attributes) {
  const epx_tensor grad = tensor_of(grad_out), grad_rows = tensor_of(*grad_expert_out);
  const epx_row_format format = format_of(attributes);
  epx_combine_rank_major_bwd_args args{};
  args.handle_mem = handle_mem.untyped_data();
  args.grad_out = &grad;
  args.grad_expert_out = &grad_rows;
  args.format = optional(format);
  return call(epx_combine_rank_major_bwd, attributes, stream, handle_mem, args);
}

// Optional: grad_recv_weights, and grad_topk_weights behind grad_tokens.
ffi::Error dispatch_rank_major_bwd(void* stream, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer handle_mem,
                                   ffi::AnyBuffer grad_recv, ffi::RemainingArgs grad_recv_weights,
                                   ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer> grad_tokens,
                                   ffi::RemainingRets grad_topk_weights, FormatAttributes attributes) {
  const epx_tensor grad_rows = tensor_of(grad_recv), grad = tensor_of(*grad_tokens);
  const auto in = tensors_of(grad_recv_weights), out = tensors_of(grad_topk_weights);
  const epx_row_format format = format_of(attributes);
  epx_dispatch_rank_major_bwd_args args{};
  args.handle_mem = handle_mem.untyped_data();
  args.grad_recv = &grad_rows;
  args.grad_recv_weights = optional(in, 0);
  args.grad_tokens = &grad;
  args.grad_topk_weights = optional(out, 0);
  args.format = optional(format);
  return call(epx_dispatch_rank_major_bwd, attributes, stream, handle_mem, args);
}

// Rows as bytes, [N, bytes of a row], so that any dtype of whole bytes will do, and any number of dimensions.
epx_tensor rows_as_bytes(const ffi::AnyBuffer& rows) {
  const auto sizes = rows.dimensions();
  int64_t row_bytes = static_cast<int64_t>(ffi::ByteWidth(rows.element_type()));
  for (size_t i = 1; i < sizes.size(); ++i)
    row_bytes *= sizes[i];
  return epx_tensor_2d(rows.untyped_data(), EPX_UINT8, sizes.front(), row_bytes);
}

// The result lies in the place of `output`, which XLA has copied there where somebody else still reads it.
ffi::Error ragged_all_to_all(void* stream, ffi::AnyBuffer, ffi::AnyBuffer operand, ffi::AnyBuffer output,
                             ffi::AnyBuffer input_offsets, ffi::AnyBuffer send_sizes, ffi::AnyBuffer output_offsets,
                             ffi::AnyBuffer recv_sizes, ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer> result,
                             SliceAttributes attributes) {
  if (result->size_bytes() > 0 && result->untyped_data() != output.untyped_data())
    return {ffi::ErrorCode::kInternal, "epx: XLA gave ragged_all_to_all a result that does not lie in the place of output"};
  const epx_tensor rows = rows_as_bytes(operand), received = rows_as_bytes(*result);
  const epx_tensor first_sent = tensor_of(input_offsets), sent = tensor_of(send_sizes);
  const epx_tensor first_received = tensor_of(output_offsets), expected = tensor_of(recv_sizes);
  epx_ragged_all_to_all_args args{};
  args.operand = &rows;
  args.output = &received;
  args.input_offsets = &first_sent;
  args.send_sizes = &sent;
  args.output_offsets = &first_received;
  args.recv_sizes = &expected;
  args.direction = attributes.transposed ? EPX_SLICES_TRANSPOSED : EPX_SLICES_FORWARD;
  return call_group(epx_ragged_all_to_all, attributes.group, stream, args);
}

ffi::Error ragged_all_to_all_bwd(void* stream, ffi::AnyBuffer token, ffi::AnyBuffer, ffi::AnyBuffer operand,
                                 ffi::AnyBuffer output, ffi::AnyBuffer input_offsets, ffi::AnyBuffer send_sizes,
                                 ffi::AnyBuffer output_offsets, ffi::AnyBuffer recv_sizes,
                                 ffi::Result<ffi::AnyBuffer> next_token, ffi::Result<ffi::AnyBuffer> result,
                                 SliceAttributes attributes) {
  return ragged_all_to_all(stream, token, operand, output, input_offsets, send_sizes, output_offsets, recv_sizes,
                           next_token, result, attributes);
}

// Makes no call: XLA keeps it, and with it all that its token depends on.
ffi::Error hold(void*, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) {
  return ffi::Error::Success();
}

// Makes a handler of a function, whose parameters XLA decodes by their types. A binding cannot be moved, so it is the last
// parameter's that makes the handler.
template <typename... Params>
struct Bind {
  static auto to(auto function, auto binding) { return binding.To(function); }
};
template <typename Param, typename... Params>
struct Bind<Param, Params...> {
  static auto to(auto function, auto binding) {
    using Rest = Bind<Params...>;
    if constexpr (std::is_same_v<Param, ffi::AnyBuffer>)
      return Rest::to(function, std::move(binding).template Arg<ffi::AnyBuffer>());
    else if constexpr (std::is_same_v<Param, ffi::Result<ffi::AnyBuffer>>)
      return Rest::to(function, std::move(binding).template Ret<ffi::AnyBuffer>());
    else if constexpr (std::is_same_v<Param, ffi::RemainingArgs>)
      return Rest::to(function, std::move(binding).RemainingArgs());
    else if constexpr (std::is_same_v<Param, ffi::RemainingRets>)
      return Rest::to(function, std::move(binding).RemainingRets());
    else
      return Rest::to(function, std::move(binding).template Attrs<Param>());
  }
};

// A call as handlers. On CPU devices there is no stream.
template <auto function>
struct Handlers;
template <typename... Params, ffi::Error (*function)(void*, Params...)>
struct Handlers<function> {
  static auto on_host() {
    return Bind<Params...>::to(
        +[](Params... params) { return function(nullptr, params...); }, ffi::Ffi::Bind());
  }
  static auto on_gpu() { return Bind<Params...>::to(function, ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()); }
};

} // namespace

#define EPX_HANDLER(symbol, make)                                                                                          \
  extern "C" EPX_API XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) {                                                     \
    static auto* const handler = make().release();                                                                         \
    return handler->Call(frame);                                                                                           \
  }
#define EPX_HANDLERS(name)                                                                                                 \
  EPX_HANDLER(epx_ffi_##name##_cpu, Handlers<name>::on_host)                                                               \
  EPX_HANDLER(epx_ffi_##name##_cuda, Handlers<name>::on_gpu)

EPX_HANDLERS(prepare)
EPX_HANDLERS(dispatch)
EPX_HANDLERS(prepare_dispatch)
EPX_HANDLERS(combine)
EPX_HANDLERS(combine_bwd)
EPX_HANDLERS(dispatch_bwd)
EPX_HANDLERS(dispatch_rank_major)
EPX_HANDLERS(combine_rank_major)
EPX_HANDLERS(combine_rank_major_bwd)
EPX_HANDLERS(dispatch_rank_major_bwd)
EPX_HANDLERS(ragged_all_to_all)
EPX_HANDLERS(ragged_all_to_all_bwd)
EPX_HANDLERS(hold)
