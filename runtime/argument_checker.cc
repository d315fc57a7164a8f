// SPDX-License-Identifier: Apache-2.0
#include "runtime/argument_checker.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <span>

#include "base/dtypes.h"
#include "base/names.h"
#include "runtime/formats/format_arguments.h"
#include "runtime/layout/multi_node_handle.h"
#include "runtime/layout/slots.h"

namespace epx {
namespace {

constexpr uintptr_t kHandleMemAlignment = 16; // bytes

bool is_aligned(const void* pointer, uintptr_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

const char* symbol_of(Dim dim) {
  return kDimNames[static_cast<size_t>(dim)];
}

std::string shape_of(std::initializer_list<Dim> dims) {
  std::string text;
  for (const Dim dim : dims)
    text += (text.empty() ? "[" : ", ") + std::string(symbol_of(dim));
  return text + "]";
}

// The rows of a tensor are all its dimensions but the last.
int64_t num_rows(const epx_tensor& tensor) {
  int64_t rows = 1;
  for (int32_t axis = 0; axis + 1 < tensor.ndim; ++axis)
    rows *= tensor.sizes[axis];
  return rows;
}

} // namespace

void ArgumentChecker::common(const epx_layer& layer, size_t handle_mem_bytes, Direction handle_direction) {
  const GroupShape& shape = context_.shape;
  if (is_rank_major_ && shape.num_nodes() > 1)
    fail(EPX_ERROR_UNSUPPORTED,
         "{}: the group has {} nodes, between which rank-major rows do not travel: each rank would need {} bytes of "
         "staging for them, P * max_tokens_per_rank = {} * {} rows of {} bytes",
         function_, shape.num_nodes(), shape.num_ranks * int64_t{shape.max_tokens_per_rank} * context_.layout.row_stride,
         shape.num_ranks, shape.max_tokens_per_rank, context_.layout.row_stride);
  call_.top_k = layer.top_k;
  call_.alignment = require_layer(context_, layer, function_);
  if (call_.handle_mem == nullptr) refuse("handle_mem is NULL");
  if (!is_aligned(call_.handle_mem, kHandleMemAlignment))
    refuse("handle_mem is not aligned to {} bytes", kHandleMemAlignment);
  const int64_t needed = epx::handle_mem_bytes(shape, context_.window_access, layer.top_k);
  if (handle_mem_bytes < static_cast<size_t>(needed))
    refuse("handle_mem_bytes is {}; top_k {} needs {} (epx_handle_mem_size)", handle_mem_bytes, layer.top_k, needed);
  check_stream();
  add_span("handle_mem", call_.handle_mem, needed, handle_direction);
  if (is_rank_major_ && call_.alignment != 1)
    refuse("layer.alignment is {}; the rank-major layout has no zones, so it must be 0 or 1", layer.alignment);

  const int64_t num_local_experts = ExpertBlocks{shape.num_experts, shape.num_ranks}.num_local_experts(context_.rank);
  for (const Dim dim : {Dim::T, Dim::N, Dim::M, Dim::H})
    size_of(dim) = kUnknown;
  size_of(Dim::K) = layer.top_k;
  size_of(Dim::P) = shape.num_ranks;
  size_of(Dim::E) = shape.num_experts;
  size_of(Dim::R) = shape.max_recv_tokens;
  size_of(Dim::E_l) = num_local_experts;
  size_of(Dim::E_l_and_1) = num_local_experts + 1;
  size_of(Dim::number_1) = 1;
  size_of(Dim::number_3) = 3;
  size_of(Dim::number_5) = 5;
  size_of(Dim::number_512) = 512;
}

ArgumentChecker::ArgumentChecker(const GroupContext& context, const epx_ragged_all_to_all_args& args)
    : context_(context), function_(OperationOf<epx_ragged_all_to_all_args>::kFunction), is_rank_major_(false) {
  if (context.shape.num_nodes() > 1)
    fail(EPX_ERROR_UNSUPPORTED, "{}: the group has {} nodes, between which slices do not travel", function_,
         context.shape.num_nodes());
  call_.operation = EPX_OP_RAGGED_ALL_TO_ALL;
  call_.stream = args.stream;
  check_stream();
  for (const Dim dim : {Dim::N, Dim::M, Dim::H, Dim::K})
    size_of(dim) = kUnknown;
}

void ArgumentChecker::check_stream() const {
  if (call_.stream != nullptr && context_.window_access == WindowAccess::by_host)
    refuse("stream is {}; the host transport has no streams, pass NULL", fmt::ptr(call_.stream));
}

void ArgumentChecker::check_any_rows(const char* name, const epx_tensor* tensor, const char* like_name,
                                     const epx_tensor* like, Dim rows, Direction direction) {
  if (tensor == nullptr) refuse("{} is NULL; it is required", name);
  check_dtype(name, *tensor, like == nullptr ? Type::any : Type::like_any);
  if (tensor->ndim < 1 || tensor->ndim > 4) refuse("{} has {} dimensions (ndim); it must have 1..4", name, tensor->ndim);
  if (like != nullptr && tensor->ndim != like->ndim)
    refuse("{} has {} dimensions (ndim); {} has {}", name, tensor->ndim, like_name, like->ndim);
  int64_t elements = 1; // of a row
  for (int axis = 0; axis < tensor->ndim; ++axis) {
    const int64_t size = tensor->sizes[axis];
    if (size < 0) refuse("{} has sizes[{}] = {}; sizes are not negative", name, axis, size);
    if (axis == 0) continue;
    if (like != nullptr && size != like->sizes[axis])
      refuse("{} has sizes[{}] = {}; {} has {}", name, axis, size, like_name, like->sizes[axis]);
    if (__builtin_mul_overflow(elements, size, &elements)) refuse_size(name, *tensor);
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (tensor->sizes[0] > kMost) refuse("{} has sizes[0] = {} rows; {} are the most", name, tensor->sizes[0], kMost);
  if (elements % elements_per_byte(tensor->dtype) != 0)
    refuse("{} has rows of {} elements; their number must be even, since a byte has two elements of {}", name, elements,
           epx::name_of(tensor->dtype));
  const std::optional<int64_t> row = checked_bytes_of_rows(tensor->dtype, 1, elements);
  if (!row || *row < 1 || *row > kMost)
    refuse("{} has rows of {} elements of {}; a row has 1..{} bytes", name, elements, epx::name_of(tensor->dtype), kMost);
  const int64_t bytes = tensor->sizes[0] * *row;
  if (bytes > 0 && tensor->data == nullptr) refuse("{} has {} rows, but its data is NULL", name, tensor->sizes[0]);
  size_of(rows) = tensor->sizes[0];
  size_of(Dim::H) = elements;
  check_memory(name, *tensor, bytes, direction, false);
}

void ArgumentChecker::check(const char* name, const epx_tensor* tensor, Type type, std::initializer_list<Dim> dims,
                            Direction direction, bool may_have_sidecar) {
  if (tensor == nullptr) refuse("{} is NULL; it is required", name);
  check_dtype(name, *tensor, type);
  const auto decides = [&](Dim dim) { return size_of(dim) == kUnknown && std::ranges::count(dims, dim) != 0; };
  const bool decides_tokens = decides(Dim::T), decides_rows = decides(Dim::N) || decides(Dim::M);
  check_memory(name, *tensor, check_sizes(name, *tensor, dims), direction, may_have_sidecar);
  if (type == Type::rows || type == Type::sent_rows) check_rows(name, *tensor, tensor->ndim - 1);
  if (decides_tokens && size_of(Dim::T) > context_.shape.max_tokens_per_rank)
    refuse("{} has T = sizes[0] = {} tokens; the group's max_tokens_per_rank is {}", name, size_of(Dim::T),
           context_.shape.max_tokens_per_rank);
  if (decides_rows) check_recv_rows(name, *tensor);
}

void ArgumentChecker::check_memory(const char* name, const epx_tensor& tensor, int64_t bytes, Direction direction,
                                   bool may_have_sidecar) {
  if (!is_aligned(tensor.data, static_cast<uintptr_t>(single_element_bytes(tensor.dtype))))
    refuse("{} has data at {}, which is not aligned to its {} bytes per element", name, fmt::ptr(tensor.data),
           single_element_bytes(tensor.dtype));
  if (tensor.reserved[0] != 0 || tensor.reserved[1] != 0) refuse("{} has a reserved field that is not 0", name);
  if (tensor.sidecar_row_bytes < 0)
    refuse("{} has sidecar_row_bytes = {}; it is not negative", name, tensor.sidecar_row_bytes);
  if (!may_have_sidecar && (tensor.sidecar != nullptr || tensor.sidecar_row_bytes != 0))
    refuse("{} has a sidecar of {} bytes per row; sidecars belong to the tokens of dispatch", name,
           tensor.sidecar_row_bytes);
  add_span(name, tensor.data, bytes, direction);
}

void ArgumentChecker::check_dtype(const char* name, const epx_tensor& tensor, Type type) {
  static constexpr epx_dtype kIntegers[] = {EPX_INT32, EPX_INT64};
  static constexpr epx_dtype kFloat32 = EPX_FLOAT32, kInt32 = EPX_INT32, kInt64 = EPX_INT64;
  static constexpr epx_dtype kAny[] = {EPX_FLOAT32,     EPX_FLOAT16,     EPX_BFLOAT16,   EPX_INT32,
                                       EPX_INT64,       EPX_FLOAT64,     EPX_UINT8,      EPX_FLOAT8_E4M3,
                                       EPX_FLOAT8_E5M2, EPX_FLOAT4_E2M1, EPX_FLOAT8_E8M0};
  const auto dtypes = [&]() -> std::span<const epx_dtype> {
    switch (type) {
    case Type::any:
      return kAny;
    case Type::like_any:
      return {&rows_dtype_, 1};
    case Type::rows:
    case Type::like_rows:
    case Type::wide_rows:
    case Type::sent_rows:
    case Type::received_rows:
      return row_dtypes(type);
    case Type::scales:
      return {&call_.format.scales, 1};
    case Type::indices:
    case Type::counts:
      return kIntegers;
    case Type::like_counts:
      return {&counts_dtype_, 1};
    case Type::float32:
      return {&kFloat32, 1};
    case Type::int32:
      return {&kInt32, 1};
    case Type::int64:
      return {&kInt64, 1};
    }
    return {};
  }();
  if (std::ranges::count(dtypes, tensor.dtype) == 0) {
    std::string wanted;
    for (const epx_dtype dtype : dtypes)
      wanted += (wanted.empty() ? "" : " or ") + std::string(epx::name_of(dtype));
    refuse("{} has dtype {} ({}); it must be {}", name, static_cast<int>(tensor.dtype), epx::name_of(tensor.dtype), wanted);
  }
  if (type == Type::rows || type == Type::sent_rows || type == Type::any) rows_dtype_ = recv_dtype_ = tensor.dtype;
  if (type == Type::received_rows) recv_dtype_ = tensor.dtype;
  if (type == Type::counts) counts_dtype_ = tensor.dtype;
}

// Returns the dtypes that rows may have: where they are sums, those that are summed; where they are moved, the quantised ones
// too, of which a format has one. A format quantises what comes wide.
std::span<const epx_dtype> ArgumentChecker::row_dtypes(Type type) {
  static constexpr epx_dtype kRows[] = {EPX_FLOAT32,     EPX_FLOAT16,     EPX_BFLOAT16,
                                        EPX_FLOAT8_E4M3, EPX_FLOAT8_E5M2, EPX_FLOAT4_E2M1};
  constexpr size_t kSummed = 3;
  switch (type) {
  case Type::rows:
  case Type::wide_rows:
    return {kRows, kSummed};
  case Type::sent_rows:
    if (format_ == nullptr) return kRows;
    std::ranges::copy_n(kRows, kSummed, row_dtypes_.begin());
    row_dtypes_[kSummed] = call_.format.elements;
    return {row_dtypes_.data(), kSummed + 1};
  case Type::received_rows:
    if (format_ != nullptr && !is_quantised_dtype(rows_dtype_)) {
      row_dtypes_ = {rows_dtype_, call_.format.elements};
      return {row_dtypes_.data(), 2};
    }
    break;
  default:
    break;
  }
  return {&rows_dtype_, 1};
}

// Returns the tensor's bytes.
int64_t ArgumentChecker::check_sizes(const char* name, const epx_tensor& tensor, std::initializer_list<Dim> dims) {
  if (tensor.ndim != static_cast<int32_t>(dims.size()))
    refuse("{} has {} dimensions (ndim); it must have {}: {}", name, tensor.ndim, dims.size(), shape_of(dims));
  int64_t elements = 1;
  size_t axis = 0;
  for (const Dim dim : dims) {
    const int64_t size = tensor.sizes[axis];
    if (size < 0) refuse("{} has sizes[{}] = {}; sizes are not negative", name, axis, size);
    if (size_of(dim) == kUnknown) size_of(dim) = size;
    if (size != size_of(dim))
      refuse("{} has sizes[{}] = {}; it must be {} = {}, shape {}", name, axis, size, symbol_of(dim), size_of(dim),
             shape_of(dims));
    if (__builtin_mul_overflow(elements, size, &elements)) refuse_size(name, tensor);
    ++axis;
  }
  const int64_t last_size = tensor.sizes[axis - 1];
  const std::optional<int64_t> bytes =
      checked_bytes_of_rows(tensor.dtype, elements == 0 ? 0 : elements / last_size, last_size);
  if (!bytes) refuse_size(name, tensor);
  if (*bytes > 0 && tensor.data == nullptr) refuse("{} has {} elements, but its data is NULL", name, elements);
  return *bytes;
}

// Checks that rows with H elements in dimension `axis` fit the group.
void ArgumentChecker::check_rows(const char* name, const epx_tensor& rows, int axis) const {
  const GroupShape& shape = context_.shape;
  if (format_ == nullptr && row_bytes(rows.dtype, shape.hidden_dim) > row_bytes(shape.max_token_dtype, shape.hidden_dim))
    refuse("{} has dtype {}, which is wider than the group's max_token_dtype {}", name, epx::name_of(rows.dtype),
           epx::name_of(shape.max_token_dtype));
  if (rows.sizes[axis] % elements_per_byte(rows.dtype) != 0)
    refuse("{} has H = sizes[{}] = {}; it must be even, since a byte has two elements of {}", name, axis, rows.sizes[axis],
           epx::name_of(rows.dtype));
  if (rows.sizes[axis] < 1 || rows.sizes[axis] > shape.hidden_dim)
    refuse("{} has H = sizes[{}] = {}; it must be 1..{} (hidden_dim)", name, axis, rows.sizes[axis], shape.hidden_dim);
}

// Receive rows have float32 weights, given or not: both must have a number of bytes that can be represented.
void ArgumentChecker::check_recv_rows(const char* name, const epx_tensor& rows) const {
  constexpr int64_t kMaxRows = std::numeric_limits<int64_t>::max() / static_cast<int64_t>(sizeof(float));
  if (num_rows(rows) > kMaxRows)
    refuse("{} has {} rows; their float32 weights would take more than 2^63 - 1 bytes, {} rows are the most", name,
           rows.ndim == 2 ? fmt::format("N = sizes[0] = {}", rows.sizes[0]) : std::to_string(num_rows(rows)), kMaxRows);
}

void ArgumentChecker::check_sidecar(const char* name, const epx_tensor& tensor, Direction direction) {
  const int64_t rows = num_rows(tensor);
  if (tensor.sidecar_row_bytes > context_.shape.max_sidecar_bytes)
    refuse("{} has sidecar_row_bytes = {}; the group's max_sidecar_bytes is {}", name, tensor.sidecar_row_bytes,
           context_.shape.max_sidecar_bytes);
  int64_t bytes = 0;
  if (__builtin_mul_overflow(rows, tensor.sidecar_row_bytes, &bytes))
    refuse("{} has {} rows of {} bytes, which are more than 2^63 - 1 bytes", name, rows, tensor.sidecar_row_bytes);
  if (bytes > 0 && tensor.sidecar == nullptr)
    refuse("{} has sidecar_row_bytes = {}, but its sidecar is NULL", name, tensor.sidecar_row_bytes);
  if (tensor.sidecar_row_bytes == 0 && tensor.sidecar != nullptr)
    refuse("{} has a sidecar with sidecar_row_bytes = 0", name);
  add_span(name, tensor.sidecar, bytes, direction);
}

void ArgumentChecker::sidecars(const epx_tensor& tokens, const epx_tensor& recv_tokens) {
  check_sidecar("the sidecar of tokens", tokens, Direction::in);
  check_sidecar("the sidecar of recv_tokens", recv_tokens, Direction::out);
  if (tokens.sidecar_row_bytes != recv_tokens.sidecar_row_bytes)
    refuse("tokens has sidecar_row_bytes = {}, recv_tokens has {}; they must be equal", tokens.sidecar_row_bytes,
           recv_tokens.sidecar_row_bytes);
}

void ArgumentChecker::format(const epx_row_format* format) {
  if (format == nullptr) return;
  call_.format = check_format(*format, function_);
  format_ = format;
}

FormatTensors ArgumentChecker::format_tensors() {
  if (format_ == nullptr) return {};
  const WireFormat& format = call_.format;
  const GroupShape& shape = context_.shape;
  const int64_t hidden = size_of(Dim::H);
  const bool comes_quantised = is_quantised_dtype(rows_dtype_), arrives_quantised = is_quantised_dtype(recv_dtype_);
  require_whole_bytes(format, hidden, function_);
  const int64_t wire_bytes = WireRow(format, shape.hidden_dim).bytes;
  if (wire_bytes > context_.layout.row_stride)
    refuse("rows of {} with scaling {} take up to {} bytes, and those of the group's max_token_dtype {} take {}",
           name_of(format.elements), name_of(format.scaling), wire_bytes, name_of(shape.max_token_dtype),
           context_.layout.row_stride);
  if (is_rank_major_) size_of(Dim::N) = shape.num_ranks * size_of(Dim::M);
  FormatTensors tensors;
  ScaleLayout& layout = tensors.recv_layout;
  layout = {format_->scale_layout, static_cast<int>(single_element_bytes(format.scales)), format.num_scales(hidden),
            size_of(Dim::N)};
  size_of(Dim::S) = layout.num_scales;
  size_of(Dim::ld) = layout.leading_dimension();
  size_of(Dim::words) = layout.words();
  size_of(Dim::tiles) = layout.row_tiles();

  // A tensor is given where the rows need it, and not elsewhere.
  const auto given = [&](const char* name, const epx_tensor* tensor, bool is_needed, const char* why) {
    if ((tensor != nullptr) == is_needed) return is_needed;
    if (is_needed) refuse("{} is NULL; it is required where {}", name, why);
    refuse("{} is given; it must be NULL unless {}", name, why);
  };
  if (given("format.scales", format_->scales, comes_quantised, "rows come quantised"))
    tensors.scales = in<const std::byte>("format.scales", format_->scales, Type::scales, {Dim::T, Dim::S});
  if (given("format.row_scales", format_->row_scales, comes_quantised && format.has_row_scale(),
            "rows come quantised with scaling nv"))
    tensors.row_scales = in<const float>("format.row_scales", format_->row_scales, Type::float32, {Dim::T});
  if (format_->encode_scale != nullptr &&
      given("format.encode_scale", format_->encode_scale, !comes_quantised && format.has_row_scale(),
            "rows are quantised with scaling nv"))
    tensors.encode_scale = in<const float>("format.encode_scale", format_->encode_scale, Type::float32, {Dim::number_1});
  if (given("format.recv_scales", format_->recv_scales, arrives_quantised, "rows arrive quantised"))
    tensors.recv_scales = recv_scales();
  else if (format_->scale_layout != EPX_SCALES_ROWS)
    refuse("format.scale_layout is {}, but rows arrive without scales: it must be EPX_SCALES_ROWS (0)",
           static_cast<int>(format_->scale_layout));
  if (given("format.recv_row_scales", format_->recv_row_scales, arrives_quantised && format.has_row_scale(),
            "rows arrive quantised with scaling nv"))
    tensors.recv_row_scales = out<float>("format.recv_row_scales", format_->recv_row_scales, Type::float32, {Dim::N});
  return tensors;
}

void ArgumentChecker::sum_format(const epx_row_format* given) {
  if (given == nullptr) return;
  format(given);
  if (given->scaling != EPX_SCALING_BLOCK128 && given->scaling != EPX_SCALING_MX)
    refuse("format.scaling is {}; sums travel with scaling block128 or mx", name_of(given->scaling));
  if (context_.shape.precision != EPX_COMBINE_WIRE)
    refuse(
        "the call has a row format, and the group's combine_precision is {}; sums travel quantised in precision wire alone",
        name_of(context_.shape.precision));
}

// Checks the received scales in their layout.
std::byte* ArgumentChecker::recv_scales() {
  const char* const name = "format.recv_scales";
  const epx_tensor* const tensor = format_->recv_scales;
  require_scale_layout(call_.format, format_->scale_layout, fmt::format("{}: format.scale_layout", function_));
  switch (format_->scale_layout) {
  case EPX_SCALES_ROWS:
    break;
  case EPX_SCALES_COLUMNS:
    return out<std::byte>(name, tensor, Type::scales, {Dim::S, Dim::ld});
  case EPX_SCALES_PACKED:
    return out<std::byte>(name, tensor, Type::int32, {Dim::words, Dim::ld});
  case EPX_SCALES_TILES:
    if (is_rank_major_) refuse("format.scale_layout is tiles, which the rank-major layout does not have");
    if (call_.alignment % ScaleLayout::kTileRows != 0)
      refuse("format.scale_layout is tiles; layer.alignment is {}, it must be a multiple of {}", call_.alignment,
             ScaleLayout::kTileRows);
    return out<std::byte>(name, tensor, Type::scales, {Dim::tiles, Dim::words, Dim::number_512});
  }
  return out<std::byte>(name, tensor, Type::scales, {Dim::N, Dim::S});
}

int64_t ArgumentChecker::zone_stride(int64_t stride) const {
  require_zone_stride(context_, call_.alignment, stride, function_);
  return stride;
}

void ArgumentChecker::both_or_neither(const char* a, const void* given_a, const char* b, const void* given_b) const {
  if ((given_a == nullptr) != (given_b == nullptr))
    refuse("{} is {} and {} is {}; give both or neither", a, given_a == nullptr ? "NULL" : "given", b,
           given_b == nullptr ? "NULL" : "given");
}

void ArgumentChecker::rank_major_staging() const {
  const GroupShape& shape = context_.shape;
  const int64_t rows = slots_per_source(shape, size_of(Dim::M));
  if (shape.num_ranks * rows * call_.top_k > shape.max_recv_tokens)
    refuse("M is {}; P * min(M, max_tokens_per_rank) * K = {} * {} * {} exceeds max_recv_tokens_per_rank, {}",
           size_of(Dim::M), shape.num_ranks, rows, call_.top_k, shape.max_recv_tokens);
}

// The sums of rank-major calls are those of precision wire.
void ArgumentChecker::rank_major_sums() const {
  if (context_.shape.precision == EPX_COMBINE_EXACT)
    refuse("the group's combine_precision is exact, whose sums do not depend on the number of ranks; those of rows that "
           "each rank has summed do");
}

void ArgumentChecker::no_overlap() const {
  for (size_t i = 0; i < num_spans_; ++i) {
    for (size_t j = 0; j < num_spans_; ++j) {
      const Span& out = spans_[i];
      const Span& other = spans_[j];
      if (i == j || out.direction != Direction::out) continue;
      if (out.begin < other.begin + other.bytes && other.begin < out.begin + out.bytes)
        refuse("{} overlaps {}", out.name, other.name);
    }
  }
}

MovementCall ArgumentChecker::movement() const {
  MovementCall call = call_;
  call.num_tokens = size_of(Dim::T);
  call.hidden = static_cast<int>(size_of(Dim::H));
  call.dtype = rows_dtype_;
  call.recv_dtype = recv_dtype_;
  call.recv_rows = size_of(Dim::N);
  if (!is_rank_major_) return call;
  call.rows_per_source = size_of(Dim::M);
  call.slots_per_source = slots_per_source(context_.shape, call.rows_per_source);
  call.recv_rows = context_.shape.num_ranks * call.rows_per_source;
  return call;
}

void ArgumentChecker::refuse_size(const char* name, const epx_tensor& tensor) const {
  refuse("{} has sizes [{}] of {}, which are more than 2^63 - 1 bytes", name,
         fmt::join(tensor.sizes, tensor.sizes + tensor.ndim, ", "), epx::name_of(tensor.dtype));
}

void ArgumentChecker::add_span(const char* name, const void* data, int64_t bytes, Direction direction) {
  if (static_cast<uintptr_t>(bytes) > UINTPTR_MAX - reinterpret_cast<uintptr_t>(data))
    refuse("{} has {} bytes at {}, which is more than there are addresses", name, bytes, fmt::ptr(data));
  if (bytes > 0)
    spans_.at(num_spans_++) = {name, reinterpret_cast<uintptr_t>(data), static_cast<uintptr_t>(bytes), direction};
}

int require_layer(const GroupContext& context, const epx_layer& layer, const char* function) {
  if (layer.top_k < 1 || layer.top_k > context.shape.max_top_k)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{}: layer.top_k is {}; it must be 1..{} (max_top_k)", function, layer.top_k,
         context.shape.max_top_k);
  if (layer.alignment < 0 || layer.alignment > context.shape.max_alignment)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{}: layer.alignment is {}; it must be 0..{} (max_alignment)", function,
         layer.alignment, context.shape.max_alignment);
  return effective_alignment(layer.alignment);
}

void require_zone_stride(const GroupContext& context, int alignment, int64_t stride, const char* function) {
  const GroupShape& shape = context.shape;
  const int64_t zones = (shape.num_experts + shape.num_ranks - 1) / shape.num_ranks; // of the rank that has the most
  if (stride < 0 || stride > shape.max_recv_tokens / zones)
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "{}: zone_stride is {}; it must be 0..{}, since {} zones of it have to fit max_recv_tokens_per_rank, {}", function,
         stride, shape.max_recv_tokens / zones, zones, shape.max_recv_tokens);
  if (stride % alignment != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{}: zone_stride is {}; it must be a multiple of layer.alignment, {}", function,
         stride, alignment);
}

} // namespace epx
