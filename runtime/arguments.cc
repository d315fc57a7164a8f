// SPDX-License-Identifier: Apache-2.0
#include "runtime/arguments.h"

#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "base/dtypes.h"
#include "base/error.h"
#include "base/names.h"
#include "runtime/layout/multi_node_handle.h"
#include "runtime/layout/slots.h"

namespace epx {
namespace {

constexpr uintptr_t kHandleMemAlignment = 16; // bytes

bool is_aligned(const void* pointer, uintptr_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

// A tensor must have each dimension with this value; messages call it by this name.
struct Dim {
  const char* symbol;
  int64_t value;
};
constexpr int64_t kAnySize = -1;

enum class Direction { kIn, kOut };

// Checks the arguments of one call: each tensor by itself, then that no output overlaps anything.
class Checker {
public:
  // Checks args of this type.
  template <typename ArgsStruct>
  Checker(const GroupContext& context, const ArgsStruct&)
      : context_(context), function_(OperationOf<ArgsStruct>::kFunction) {}

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail(EPX_ERROR_INVALID_ARGUMENT, "{}: {}", function_, fmt::format(format, std::forward<Args>(args)...));
  }

  template <typename... Args>
  [[noreturn]] void refuse_as_unsupported(fmt::format_string<Args...> format, Args&&... args) const {
    fail(EPX_ERROR_UNSUPPORTED, "{}: {}", function_, fmt::format(format, std::forward<Args>(args)...));
  }

  // Checks the fields that every args struct has. Returns the effective alignment.
  template <typename ArgsStruct>
  int common(const ArgsStruct& args, Direction handle_direction) {
    const int alignment = require_layer(context_, args.layer, function_);
    if (args.handle_mem == nullptr) refuse("handle_mem is NULL");
    if (!is_aligned(args.handle_mem, kHandleMemAlignment))
      refuse("handle_mem is not aligned to {} bytes", kHandleMemAlignment);
    const int64_t needed = handle_mem_bytes(context_.shape, context_.window_access, args.layer.top_k);
    if (args.handle_mem_bytes < static_cast<size_t>(needed))
      refuse("handle_mem_bytes is {}; top_k {} needs {} (epx_handle_mem_size)", args.handle_mem_bytes, args.layer.top_k,
             needed);
    if (args.stream != nullptr && context_.window_access == WindowAccess::by_host)
      refuse("stream is {}; the host transport has no streams, pass NULL", fmt::ptr(args.stream));
    add_span("handle_mem", args.handle_mem, needed, handle_direction);
    return alignment;
  }

  // Checks a required tensor, which has one of `dtypes` and exactly these dimensions (kAnySize: any). allow_sidecar is true
  // only for tensors that may have a sidecar.
  void tensor(const epx_tensor* tensor, const char* name, std::initializer_list<epx_dtype> dtypes,
              std::initializer_list<Dim> dims, Direction direction, bool allow_sidecar = false) {
    if (tensor == nullptr) refuse("{} is NULL; it is required", name);
    bool dtype_fits = false;
    std::string wanted;
    for (const epx_dtype dtype : dtypes) {
      dtype_fits |= tensor->dtype == dtype;
      wanted += (wanted.empty() ? "" : " or ") + std::string(name_of(dtype));
    }
    if (!dtype_fits)
      refuse("{} has dtype {} ({}); it must be {}", name, static_cast<int>(tensor->dtype), name_of(tensor->dtype), wanted);
    if (tensor->ndim != static_cast<int32_t>(dims.size()))
      refuse("{} has {} dimensions (ndim); it must have {}: {}", name, tensor->ndim, dims.size(), describe(dims));
    int64_t elements = 1;
    size_t axis = 0;
    for (const Dim& dim : dims) {
      const int64_t size = tensor->sizes[axis];
      if (size < 0) refuse("{} has sizes[{}] = {}; sizes are not negative", name, axis, size);
      if (dim.value != kAnySize && size != dim.value)
        refuse("{} has sizes[{}] = {}; it must be {} = {}, shape {}", name, axis, size, dim.symbol, dim.value,
               describe(dims));
      if (__builtin_mul_overflow(elements, size, &elements)) refuse_size(*tensor, name);
      ++axis;
    }
    const int64_t last_size = tensor->sizes[axis - 1];
    const std::optional<int64_t> bytes =
        checked_bytes_of_rows(tensor->dtype, elements == 0 ? 0 : elements / last_size, last_size);
    if (!bytes) refuse_size(*tensor, name);
    if (*bytes > 0 && tensor->data == nullptr) refuse("{} has {} elements, but its data is NULL", name, elements);
    if (!is_aligned(tensor->data, static_cast<uintptr_t>(single_element_bytes(tensor->dtype))))
      refuse("{} has data at {}, which is not aligned to its {} bytes per element", name, fmt::ptr(tensor->data),
             single_element_bytes(tensor->dtype));
    if (tensor->reserved[0] != 0 || tensor->reserved[1] != 0) refuse("{} has a reserved field that is not 0", name);
    if (tensor->sidecar_row_bytes < 0)
      refuse("{} has sidecar_row_bytes = {}; it is not negative", name, tensor->sidecar_row_bytes);
    if (!allow_sidecar && (tensor->sidecar != nullptr || tensor->sidecar_row_bytes != 0))
      refuse("{} has a sidecar of {} bytes per row; sidecars belong to the tokens of dispatch", name,
             tensor->sidecar_row_bytes);
    add_span(name, tensor->data, *bytes, direction);
  }

  // The rows of a tensor are all its dimensions but the last.
  void sidecar(const epx_tensor& tensor, const char* name, Direction direction) {
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

  // Checks rows of tokens, [rows, H], whose dtype and H must fit the group.
  void token_rows(const epx_tensor* rows, const char* name, const char* rows_symbol, Direction direction,
                  bool allow_sidecar = false) {
    tensor(rows, name, {EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16}, {{rows_symbol, kAnySize}, {"H", kAnySize}}, direction,
           allow_sidecar);
    row_limits(*rows, name, 1);
  }

  // Checks the rows of a rank-major tensor, [P, M, H].
  void rank_major_rows(const epx_tensor* rows, const char* name, Direction direction, bool allow_sidecar = false) {
    tensor(rows, name, {EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16},
           {{"P", context_.shape.num_ranks}, {"M", kAnySize}, {"H", kAnySize}}, direction, allow_sidecar);
    row_limits(*rows, name, 2);
    recv_rows(*rows, name);
  }

  // Checks what the rank-major calls have in common beside the fields of all. Returns what `common` does.
  template <typename ArgsStruct>
  int rank_major_common(const ArgsStruct& args, Direction handle_direction) {
    const GroupShape& shape = context_.shape;
    if (shape.num_nodes() > 1)
      refuse_as_unsupported(
          "the group has {} nodes, between which rank-major rows do not travel: each rank would need {} bytes of "
          "staging for them, P * max_tokens_per_rank = {} * {} rows of {} bytes",
          shape.num_nodes(), shape.num_ranks * int64_t{shape.max_tokens_per_rank} * context_.layout.row_stride,
          shape.num_ranks, shape.max_tokens_per_rank, context_.layout.row_stride);
    const int alignment = common(args, handle_direction);
    if (alignment != 1)
      refuse("layer.alignment is {}; the rank-major layout has no zones, so it must be 0 or 1", args.layer.alignment);
    return alignment;
  }

  // The rows of a rank-major call pass through staging whose size is R.
  void rank_major_staging(int64_t rows_per_source, int top_k) const {
    const GroupShape& shape = context_.shape;
    const int64_t rows = slots_per_source(shape, rows_per_source);
    if (shape.num_ranks * rows * top_k > shape.max_recv_tokens)
      refuse("M is {}; P * min(M, max_tokens_per_rank) * K = {} * {} * {} exceeds max_recv_tokens_per_rank, {}",
             rows_per_source, shape.num_ranks, rows, top_k, shape.max_recv_tokens);
  }

  // The sums of rank-major calls are those of precision wire.
  void rank_major_sums() const {
    if (context_.shape.precision == EPX_COMBINE_EXACT)
      refuse("the group's combine_precision is exact, whose sums do not depend on the number of ranks; those of rows that "
             "each rank has summed do");
  }

  // Receive rows have float32 weights, given or not: both must have a number of bytes that can be represented.
  void recv_rows(const epx_tensor& rows, const char* name) const {
    constexpr int64_t kMaxRows = std::numeric_limits<int64_t>::max() / static_cast<int64_t>(sizeof(float));
    if (num_rows(rows) > kMaxRows)
      refuse("{} has {} rows; their float32 weights would take more than 2^63 - 1 bytes, {} rows are the most", name,
             rows.ndim == 2 ? fmt::format("N = sizes[0] = {}", rows.sizes[0]) : std::to_string(num_rows(rows)), kMaxRows);
  }

  void num_tokens(const char* name, int64_t tokens) const {
    if (tokens > context_.shape.max_tokens_per_rank)
      refuse("{} has T = sizes[0] = {} tokens; the group's max_tokens_per_rank is {}", name, tokens,
             context_.shape.max_tokens_per_rank);
  }

  // Checks that two arguments are given both or neither.
  void both_or_neither(const char* a, const void* given_a, const char* b, const void* given_b) const {
    if ((given_a == nullptr) != (given_b == nullptr))
      refuse("{} is {} and {} is {}; give both or neither", a, given_a == nullptr ? "NULL" : "given", b,
             given_b == nullptr ? "NULL" : "given");
  }

  // Checks, after all else, that no output overlaps any other tensor.
  void no_overlap() const {
    for (size_t i = 0; i < num_spans_; ++i) {
      for (size_t j = 0; j < num_spans_; ++j) {
        const Span& out = spans_[i];
        const Span& other = spans_[j];
        if (i == j || out.direction != Direction::kOut) continue;
        if (out.begin < other.begin + other.bytes && other.begin < out.begin + out.bytes)
          refuse("{} overlaps {}", out.name, other.name);
      }
    }
  }

private:
  static int64_t num_rows(const epx_tensor& tensor) {
    int64_t rows = 1;
    for (int32_t axis = 0; axis + 1 < tensor.ndim; ++axis)
      rows *= tensor.sizes[axis];
    return rows;
  }

  // Checks that rows with H elements in dimension `axis` fit the group.
  void row_limits(const epx_tensor& rows, const char* name, int axis) const {
    const GroupShape& shape = context_.shape;
    if (row_bytes(rows.dtype, shape.hidden_dim) > row_bytes(shape.max_token_dtype, shape.hidden_dim))
      refuse("{} has dtype {}, which is wider than the group's max_token_dtype {}", name, name_of(rows.dtype),
             name_of(shape.max_token_dtype));
    if (rows.sizes[axis] < 1 || rows.sizes[axis] > shape.hidden_dim)
      refuse("{} has H = sizes[{}] = {}; it must be 1..{} (hidden_dim)", name, axis, rows.sizes[axis], shape.hidden_dim);
  }

  struct Span {
    const char* name;
    uintptr_t begin;
    uintptr_t bytes;
    Direction direction;
  };

  [[noreturn]] void refuse_size(const epx_tensor& tensor, const char* name) const {
    refuse("{} has sizes [{}] of {}, which are more than 2^63 - 1 bytes", name,
           fmt::join(tensor.sizes, tensor.sizes + tensor.ndim, ", "), name_of(tensor.dtype));
  }

  void add_span(const char* name, const void* data, int64_t bytes, Direction direction) {
    if (static_cast<uintptr_t>(bytes) > UINTPTR_MAX - reinterpret_cast<uintptr_t>(data))
      refuse("{} has {} bytes at {}, which is more than there are addresses", name, bytes, fmt::ptr(data));
    if (bytes > 0)
      spans_.at(num_spans_++) = {name, reinterpret_cast<uintptr_t>(data), static_cast<uintptr_t>(bytes), direction};
  }

  static std::string describe(std::initializer_list<Dim> dims) {
    std::string text;
    for (const Dim& dim : dims)
      text += (text.empty() ? "[" : ", ") + std::string(dim.symbol);
    return text + "]";
  }

  const GroupContext& context_;
  const char* function_;
  std::array<Span, 16> spans_{};
  size_t num_spans_ = 0;
};

void* data_of(const epx_tensor* tensor) {
  return tensor == nullptr ? nullptr : tensor->data;
}

// Returns the typed data of a tensor. A given tensor without elements may have NULL data, which must not look like "not given".
template <typename T>
T* pointer_of(const epx_tensor* tensor) {
  alignas(16) static std::array<std::byte, 16> empty{};
  if (tensor == nullptr) return nullptr;
  return reinterpret_cast<T*>(tensor->data != nullptr ? tensor->data : empty.data());
}

template <typename ArgsStruct>
MovementCall movement(const ArgsStruct& args, int alignment, const epx_tensor& token_side, const epx_tensor& slot_side) {
  return {args.stream,
          OperationOf<ArgsStruct>::kNumber,
          args.layer.top_k,
          alignment,
          static_cast<const std::byte*>(args.handle_mem),
          token_side.sizes[0],
          slot_side.sizes[0],
          static_cast<int>(token_side.sizes[1]),
          token_side.dtype,
          static_cast<const std::byte*>(args.handle_mem),
          kExpertMajor,
          0};
}

template <typename ArgsStruct>
MovementCall rank_major_movement(const GroupContext& context, const ArgsStruct& args, const epx_tensor& token_side,
                                 const epx_tensor& row_side) {
  MovementCall call = movement(args, 1, token_side, row_side);
  call.recv_rows = row_side.sizes[0] * row_side.sizes[1];
  call.rows_per_source = row_side.sizes[1];
  call.slots_per_source = slots_per_source(context.shape, row_side.sizes[1]);
  return call;
}

// Checks the tensors that prepare reads and writes.
template <typename ArgsStruct>
void check_plan_tensors(Checker& checker, const GroupContext& context, const ArgsStruct& args) {
  const GroupShape& shape = context.shape;
  const ExpertBlocks experts{shape.num_experts, shape.num_ranks};
  const int64_t num_local_experts = experts.num_local_experts(context.rank);
  const Dim top_k{"K", args.layer.top_k};

  checker.tensor(args.topk_idx, "topk_idx", {EPX_INT32, EPX_INT64}, {{"T", kAnySize}, top_k}, Direction::kIn);
  const int64_t num_tokens = args.topk_idx->sizes[0];
  checker.num_tokens("topk_idx", num_tokens);
  checker.tensor(args.counts, "counts", {EPX_INT32, EPX_INT64}, {{"E_l", num_local_experts}}, Direction::kOut);
  const epx_dtype count_dtype = args.counts->dtype;
  checker.tensor(args.offsets, "offsets", {count_dtype}, {{"E_l + 1", num_local_experts + 1}}, Direction::kOut);
  if (args.global_counts != nullptr)
    checker.tensor(args.global_counts, "global_counts", {count_dtype}, {{"P", shape.num_ranks}, {"E", shape.num_experts}},
                   Direction::kOut);
  if (args.info != nullptr) checker.tensor(args.info, "info", {EPX_INT64}, {{"5", 5}}, Direction::kOut);
  if (args.slot != nullptr) checker.tensor(args.slot, "slot", {EPX_INT32}, {{"T", num_tokens}, top_k}, Direction::kOut);
  if (args.slot_origin != nullptr)
    checker.tensor(args.slot_origin, "slot_origin", {EPX_INT32}, {{"R", shape.max_recv_tokens}, {"3", 3}}, Direction::kOut);
}

template <typename ArgsStruct>
PrepareCall prepare_call(const ArgsStruct& args, int alignment) {
  PrepareCall call{};
  call.stream = args.stream;
  call.top_k = args.layer.top_k;
  call.alignment = alignment;
  call.handle_mem = static_cast<std::byte*>(args.handle_mem);
  call.num_tokens = args.topk_idx->sizes[0];
  call.topk_idx = data_of(args.topk_idx);
  call.topk_idx_is_64 = args.topk_idx->dtype == EPX_INT64;
  call.counts = data_of(args.counts);
  call.offsets = data_of(args.offsets);
  call.global_counts = data_of(args.global_counts);
  call.counts_are_64 = args.counts->dtype == EPX_INT64;
  call.info = pointer_of<int64_t>(args.info);
  call.slot = pointer_of<int32_t>(args.slot);
  call.slot_origin = pointer_of<int32_t>(args.slot_origin);
  return call;
}

// Checks what dispatch reads and writes besides the handle memory.
template <typename ArgsStruct>
void check_row_tensors(Checker& checker, const ArgsStruct& args) {
  checker.token_rows(args.tokens, "tokens", "T", Direction::kIn, true);
  const epx_tensor& tokens = *args.tokens;
  checker.num_tokens("tokens", tokens.sizes[0]);
  checker.tensor(args.recv_tokens, "recv_tokens", {tokens.dtype}, {{"N", kAnySize}, {"H", tokens.sizes[1]}},
                 Direction::kOut, true);
  const epx_tensor& recv_tokens = *args.recv_tokens;
  checker.recv_rows(recv_tokens, "recv_tokens");
  checker.sidecar(tokens, "the sidecar of tokens", Direction::kIn);
  checker.sidecar(recv_tokens, "the sidecar of recv_tokens", Direction::kOut);
  if (tokens.sidecar_row_bytes != recv_tokens.sidecar_row_bytes)
    checker.refuse("tokens has sidecar_row_bytes = {}, recv_tokens has {}; they must be equal", tokens.sidecar_row_bytes,
                   recv_tokens.sidecar_row_bytes);
  checker.both_or_neither("topk_weights", args.topk_weights, "recv_weights", args.recv_weights);
  if (args.topk_weights != nullptr) {
    checker.tensor(args.topk_weights, "topk_weights", {EPX_FLOAT32}, {{"T", tokens.sizes[0]}, {"K", args.layer.top_k}},
                   Direction::kIn);
    checker.tensor(args.recv_weights, "recv_weights", {EPX_FLOAT32}, {{"N", recv_tokens.sizes[0]}}, Direction::kOut);
  }
  if (args.pads != EPX_PADS_ZERO && args.pads != EPX_PADS_UNTOUCHED)
    checker.refuse("pads is {}; it must be EPX_PADS_ZERO ({}) or EPX_PADS_UNTOUCHED ({})", static_cast<int>(args.pads),
                   static_cast<int>(EPX_PADS_ZERO), static_cast<int>(EPX_PADS_UNTOUCHED));
  if (args.reserved0 != 0) checker.refuse("reserved0 is {}; it must be 0", args.reserved0);
}

template <typename ArgsStruct>
DispatchCall dispatch_call(const ArgsStruct& args, int alignment) {
  const epx_tensor& tokens = *args.tokens;
  const epx_tensor& recv_tokens = *args.recv_tokens;
  DispatchCall call{};
  static_cast<MovementCall&>(call) = movement(args, alignment, tokens, recv_tokens);
  call.tokens = pointer_of<const std::byte>(args.tokens);
  call.sidecar_bytes = tokens.sidecar_row_bytes;
  call.sidecar = static_cast<const std::byte*>(tokens.sidecar);
  call.topk_weights = pointer_of<const float>(args.topk_weights);
  call.recv_tokens = pointer_of<std::byte>(args.recv_tokens);
  call.recv_sidecar = static_cast<std::byte*>(recv_tokens.sidecar);
  call.recv_weights = pointer_of<float>(args.recv_weights);
  call.clears_pads = args.pads == EPX_PADS_ZERO;
  return call;
}

} // namespace

void require_pointer(const char* function, const char* name, const void* pointer) {
  if (pointer == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "{}: {} is NULL", function, name);
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

PrepareCall check(const GroupContext& context, const epx_prepare_args& args) {
  Checker checker(context, args);
  const int alignment = checker.common(args, Direction::kOut);
  check_plan_tensors(checker, context, args);
  checker.no_overlap();
  return prepare_call(args, alignment);
}

DispatchCall check(const GroupContext& context, const epx_dispatch_args& args) {
  Checker checker(context, args);
  const int alignment = checker.common(args, Direction::kIn);
  check_row_tensors(checker, args);
  checker.no_overlap();
  return dispatch_call(args, alignment);
}

PrepareDispatchCall check(const GroupContext& context, const epx_prepare_dispatch_args& args) {
  Checker checker(context, args);
  const int alignment = checker.common(args, Direction::kOut);
  check_plan_tensors(checker, context, args);
  check_row_tensors(checker, args);
  if (args.tokens->sizes[0] != args.topk_idx->sizes[0])
    checker.refuse("tokens has T = sizes[0] = {}; it must be {}, that of topk_idx", args.tokens->sizes[0],
                   args.topk_idx->sizes[0]);
  checker.no_overlap();
  return {prepare_call(args, alignment), dispatch_call(args, alignment)};
}

CombineCall check(const GroupContext& context, const epx_combine_args& args) {
  Checker checker(context, args);
  const int alignment = checker.common(args, Direction::kIn);
  checker.token_rows(args.expert_out, "expert_out", "N", Direction::kIn);
  const epx_tensor& expert_out = *args.expert_out;
  checker.recv_rows(expert_out, "expert_out");
  checker.tensor(args.out, "out", {expert_out.dtype}, {{"T", kAnySize}, {"H", expert_out.sizes[1]}}, Direction::kOut);
  checker.num_tokens("out", args.out->sizes[0]);
  if (args.recv_weights != nullptr)
    checker.tensor(args.recv_weights, "recv_weights", {EPX_FLOAT32}, {{"N", expert_out.sizes[0]}}, Direction::kIn);
  checker.no_overlap();

  CombineCall call{};
  static_cast<MovementCall&>(call) = movement(args, alignment, *args.out, expert_out);
  call.expert_out = pointer_of<const std::byte>(args.expert_out);
  call.recv_weights = pointer_of<const float>(args.recv_weights);
  call.out = pointer_of<std::byte>(args.out);
  return call;
}

CombineBwdCall check(const GroupContext& context, const epx_combine_bwd_args& args) {
  Checker checker(context, args);
  const int alignment = checker.common(args, Direction::kIn);
  checker.token_rows(args.grad_out, "grad_out", "T", Direction::kIn);
  const epx_tensor& grad_out = *args.grad_out;
  checker.num_tokens("grad_out", grad_out.sizes[0]);
  checker.tensor(args.grad_expert_out, "grad_expert_out", {grad_out.dtype}, {{"N", kAnySize}, {"H", grad_out.sizes[1]}},
                 Direction::kOut);
  checker.recv_rows(*args.grad_expert_out, "grad_expert_out");
  const Dim rows{"N", args.grad_expert_out->sizes[0]};
  checker.both_or_neither("expert_out", args.expert_out, "grad_recv_weights", args.grad_recv_weights);
  if (args.expert_out != nullptr) {
    checker.tensor(args.expert_out, "expert_out", {grad_out.dtype}, {rows, {"H", grad_out.sizes[1]}}, Direction::kIn);
    checker.tensor(args.grad_recv_weights, "grad_recv_weights", {EPX_FLOAT32}, {rows}, Direction::kOut);
  }
  if (args.recv_weights != nullptr)
    checker.tensor(args.recv_weights, "recv_weights", {EPX_FLOAT32}, {rows}, Direction::kIn);
  checker.no_overlap();

  CombineBwdCall call{};
  static_cast<MovementCall&>(call) = movement(args, alignment, grad_out, *args.grad_expert_out);
  call.grad_out = pointer_of<const std::byte>(args.grad_out);
  call.expert_out = pointer_of<const std::byte>(args.expert_out);
  call.recv_weights = pointer_of<const float>(args.recv_weights);
  call.grad_expert_out = pointer_of<std::byte>(args.grad_expert_out);
  call.grad_recv_weights = pointer_of<float>(args.grad_recv_weights);
  return call;
}

DispatchBwdCall check(const GroupContext& context, const epx_dispatch_bwd_args& args) {
  Checker checker(context, args);
  const int alignment = checker.common(args, Direction::kIn);
  checker.token_rows(args.grad_recv, "grad_recv", "N", Direction::kIn);
  const epx_tensor& grad_recv = *args.grad_recv;
  checker.recv_rows(grad_recv, "grad_recv");
  checker.tensor(args.grad_tokens, "grad_tokens", {grad_recv.dtype}, {{"T", kAnySize}, {"H", grad_recv.sizes[1]}},
                 Direction::kOut);
  const epx_tensor& grad_tokens = *args.grad_tokens;
  checker.num_tokens("grad_tokens", grad_tokens.sizes[0]);
  checker.both_or_neither("grad_recv_weights", args.grad_recv_weights, "grad_topk_weights", args.grad_topk_weights);
  if (args.grad_recv_weights != nullptr) {
    checker.tensor(args.grad_recv_weights, "grad_recv_weights", {EPX_FLOAT32}, {{"N", grad_recv.sizes[0]}}, Direction::kIn);
    checker.tensor(args.grad_topk_weights, "grad_topk_weights", {EPX_FLOAT32},
                   {{"T", grad_tokens.sizes[0]}, {"K", args.layer.top_k}}, Direction::kOut);
  }
  checker.no_overlap();

  DispatchBwdCall call{};
  static_cast<MovementCall&>(call) = movement(args, alignment, grad_tokens, grad_recv);
  call.grad_recv = pointer_of<const std::byte>(args.grad_recv);
  call.grad_recv_weights = pointer_of<const float>(args.grad_recv_weights);
  call.grad_tokens = pointer_of<std::byte>(args.grad_tokens);
  call.grad_topk_weights = pointer_of<float>(args.grad_topk_weights);
  return call;
}

DispatchRankMajorCall check(const GroupContext& context, const epx_dispatch_rank_major_args& args) {
  Checker checker(context, args);
  checker.rank_major_common(args, Direction::kOut);
  checker.token_rows(args.tokens, "tokens", "T", Direction::kIn, true);
  const epx_tensor& tokens = *args.tokens;
  const Dim num_tokens{"T", tokens.sizes[0]}, top_k{"K", args.layer.top_k}, num_ranks{"P", context.shape.num_ranks};
  checker.num_tokens("tokens", tokens.sizes[0]);
  checker.tensor(args.topk_idx, "topk_idx", {EPX_INT32, EPX_INT64}, {num_tokens, top_k}, Direction::kIn);
  checker.rank_major_rows(args.recv_tokens, "recv_tokens", Direction::kOut, true);
  const epx_tensor& recv_tokens = *args.recv_tokens;
  const Dim rows{"M", recv_tokens.sizes[1]};
  if (recv_tokens.dtype != tokens.dtype)
    checker.refuse("recv_tokens has dtype {}; it must be {}, that of tokens", name_of(recv_tokens.dtype),
                   name_of(tokens.dtype));
  if (recv_tokens.sizes[2] != tokens.sizes[1])
    checker.refuse("recv_tokens has H = sizes[2] = {}; it must be {}, that of tokens", recv_tokens.sizes[2],
                   tokens.sizes[1]);
  checker.rank_major_staging(recv_tokens.sizes[1], args.layer.top_k);
  checker.sidecar(tokens, "the sidecar of tokens", Direction::kIn);
  checker.sidecar(recv_tokens, "the sidecar of recv_tokens", Direction::kOut);
  if (tokens.sidecar_row_bytes != recv_tokens.sidecar_row_bytes)
    checker.refuse("tokens has sidecar_row_bytes = {}, recv_tokens has {}; they must be equal", tokens.sidecar_row_bytes,
                   recv_tokens.sidecar_row_bytes);
  checker.tensor(args.recv_topk_idx, "recv_topk_idx", {EPX_INT32, EPX_INT64}, {num_ranks, rows, top_k}, Direction::kOut);
  checker.both_or_neither("topk_weights", args.topk_weights, "recv_weights", args.recv_weights);
  if (args.topk_weights != nullptr) {
    checker.tensor(args.topk_weights, "topk_weights", {EPX_FLOAT32}, {num_tokens, top_k}, Direction::kIn);
    checker.tensor(args.recv_weights, "recv_weights", {EPX_FLOAT32}, {num_ranks, rows, top_k}, Direction::kOut);
  }
  checker.tensor(args.counts, "counts", {EPX_INT32, EPX_INT64}, {num_ranks}, Direction::kOut);
  checker.no_overlap();

  DispatchRankMajorCall call{};
  static_cast<MovementCall&>(call) = rank_major_movement(context, args, tokens, recv_tokens);
  call.tokens = pointer_of<const std::byte>(args.tokens);
  call.sidecar_bytes = tokens.sidecar_row_bytes;
  call.sidecar = static_cast<const std::byte*>(tokens.sidecar);
  call.topk_weights = pointer_of<const float>(args.topk_weights);
  call.recv_tokens = pointer_of<std::byte>(args.recv_tokens);
  call.recv_sidecar = static_cast<std::byte*>(recv_tokens.sidecar);
  call.recv_weights = pointer_of<float>(args.recv_weights);
  call.plan = static_cast<std::byte*>(args.handle_mem);
  call.topk_idx = data_of(args.topk_idx);
  call.topk_idx_is_64 = args.topk_idx->dtype == EPX_INT64;
  call.recv_topk_idx = data_of(args.recv_topk_idx);
  call.recv_topk_idx_is_64 = args.recv_topk_idx->dtype == EPX_INT64;
  call.counts = data_of(args.counts);
  call.counts_are_64 = args.counts->dtype == EPX_INT64;
  return call;
}

CombineCall check(const GroupContext& context, const epx_combine_rank_major_args& args) {
  Checker checker(context, args);
  checker.rank_major_common(args, Direction::kIn);
  checker.rank_major_sums();
  checker.rank_major_rows(args.expert_out, "expert_out", Direction::kIn);
  const epx_tensor& expert_out = *args.expert_out;
  checker.rank_major_staging(expert_out.sizes[1], args.layer.top_k);
  checker.tensor(args.out, "out", {expert_out.dtype}, {{"T", kAnySize}, {"H", expert_out.sizes[2]}}, Direction::kOut);
  checker.num_tokens("out", args.out->sizes[0]);
  checker.no_overlap();

  CombineCall call{};
  static_cast<MovementCall&>(call) = rank_major_movement(context, args, *args.out, expert_out);
  call.expert_out = pointer_of<const std::byte>(args.expert_out);
  call.out = pointer_of<std::byte>(args.out);
  return call;
}

CombineBwdCall check(const GroupContext& context, const epx_combine_rank_major_bwd_args& args) {
  Checker checker(context, args);
  checker.rank_major_common(args, Direction::kIn);
  checker.token_rows(args.grad_out, "grad_out", "T", Direction::kIn);
  const epx_tensor& grad_out = *args.grad_out;
  checker.num_tokens("grad_out", grad_out.sizes[0]);
  checker.tensor(args.grad_expert_out, "grad_expert_out", {grad_out.dtype},
                 {{"P", context.shape.num_ranks}, {"M", kAnySize}, {"H", grad_out.sizes[1]}}, Direction::kOut);
  checker.recv_rows(*args.grad_expert_out, "grad_expert_out");
  checker.rank_major_staging(args.grad_expert_out->sizes[1], args.layer.top_k);
  checker.no_overlap();

  CombineBwdCall call{};
  static_cast<MovementCall&>(call) = rank_major_movement(context, args, grad_out, *args.grad_expert_out);
  call.grad_out = pointer_of<const std::byte>(args.grad_out);
  call.grad_expert_out = pointer_of<std::byte>(args.grad_expert_out);
  return call;
}

DispatchBwdCall check(const GroupContext& context, const epx_dispatch_rank_major_bwd_args& args) {
  Checker checker(context, args);
  checker.rank_major_common(args, Direction::kIn);
  checker.rank_major_sums();
  checker.rank_major_rows(args.grad_recv, "grad_recv", Direction::kIn);
  const epx_tensor& grad_recv = *args.grad_recv;
  checker.rank_major_staging(grad_recv.sizes[1], args.layer.top_k);
  checker.tensor(args.grad_tokens, "grad_tokens", {grad_recv.dtype}, {{"T", kAnySize}, {"H", grad_recv.sizes[2]}},
                 Direction::kOut);
  const epx_tensor& grad_tokens = *args.grad_tokens;
  checker.num_tokens("grad_tokens", grad_tokens.sizes[0]);
  checker.both_or_neither("grad_recv_weights", args.grad_recv_weights, "grad_topk_weights", args.grad_topk_weights);
  if (args.grad_recv_weights != nullptr) {
    const Dim top_k{"K", args.layer.top_k};
    checker.tensor(args.grad_recv_weights, "grad_recv_weights", {EPX_FLOAT32},
                   {{"P", context.shape.num_ranks}, {"M", grad_recv.sizes[1]}, top_k}, Direction::kIn);
    checker.tensor(args.grad_topk_weights, "grad_topk_weights", {EPX_FLOAT32}, {{"T", grad_tokens.sizes[0]}, top_k},
                   Direction::kOut);
  }
  checker.no_overlap();

  DispatchBwdCall call{};
  static_cast<MovementCall&>(call) = rank_major_movement(context, args, grad_tokens, grad_recv);
  call.grad_recv = pointer_of<const std::byte>(args.grad_recv);
  call.grad_recv_weights = pointer_of<const float>(args.grad_recv_weights);
  call.grad_tokens = pointer_of<std::byte>(args.grad_tokens);
  call.grad_topk_weights = pointer_of<float>(args.grad_topk_weights);
  return call;
}

} // namespace epx
