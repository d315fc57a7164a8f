// SPDX-License-Identifier: Apache-2.0
// epx for C++20: a thin layer over epx.h, all of it in this header. Link libepx.
//
// It adds owners (Group, Memory, Bootstrap), views (GroupView, Tensor, ConstTensor), argument structs for designated
// initialisers, and exceptions; it needs no CUDA headers. What a call means is told in epx.h at the C function: shapes,
// dtypes, units, who owns memory, what is collective, what may be captured in a graph, and every status. A function here
// has the name of its C function without epx_ or epx_group_.
//
//   epx::Bootstrap bootstrap = epx::bootstrap_file("/tmp", "my-job", rank, num_ranks, 30s);
//   epx::GroupConfig config;
//   config.num_experts = 32; ...
//   epx::Group group(bootstrap, config);
//   const epx::Layer layer = {.top_k = 4};
//   std::vector<std::byte> handle(group.handle_mem_size(layer));
//   group.prepare({.layer = layer, .handle_mem = handle, .topk_idx = {topk_idx, {T, K}}, .counts = counts,
//                  .offsets = offsets}); // three vectors of int32_t
//
// Conventions, beyond those of epx.h
// - Failures: a function that calls the C API throws Error when the status is not EPX_SUCCESS, unless it is noexcept. What
//   else may throw says so. Whatever allocates may throw std::bad_alloc. A call that throws leaves its arguments as they
//   were.
// - Destructors are local, wait for no peer and throw nothing, so that a rank may leave a scope without the others.
// - Owners can be moved and not copied. A moved-from or default-constructed one is empty: it converts to false, get() is
//   NULL, and its destructor does nothing. release() hands over what is owned to the caller, who frees it through the C
//   API.
// - Views are copied freely, own nothing, and must not be used after what they show is gone.
#ifndef EPX_EPX_HPP_
#define EPX_EPX_HPP_

#include <algorithm>
#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "epx/epx.h"

namespace epx {
// Keeps these names apart from those of a later version of this header in the same process, and from libepx's own.
inline namespace v0 {

// ---- Errors ----------------------------------------------------------------------------------------------------------

// A call that failed. what() is the sentence of epx_last_error(). Visible, so that one shared library catches what another
// threw.
class EPX_API Error : public std::runtime_error {
public:
  // `function` is not copied: pass a string literal.
  Error(epx_status status, const std::string& sentence, const char* function = "")
      : std::runtime_error(sentence), status_(status), function_(function) {}

  epx_status status() const noexcept { return status_; }
  const char* function() const noexcept { return function_; } // that failed, "epx_group_create" for instance; never NULL

private:
  epx_status status_;
  const char* function_;
};

// Throws Error with this thread's epx_last_error() unless `status` is EPX_SUCCESS. For C functions that have no member here
// or in epx_moe.hpp.
inline void require_success(epx_status status, const char* function) {
  if (status != EPX_SUCCESS) throw Error(status, epx_last_error(), function);
}

// What to say of a failure: its what(); for an Error the function and the status come first, "epx_group_create:
// EPX_ERROR_TIMEOUT: ...".
inline std::string describe(const std::exception& failure) {
  const auto* const error = dynamic_cast<const Error*>(&failure);
  if (error == nullptr) return failure.what();
  return std::string(error->function()) + ": " + epx_status_string(error->status()) + ": " + error->what();
}

// ---- Tensors ---------------------------------------------------------------------------------------------------------

// The dtype of tensors whose elements are T. Specialise it for types of your own, before they are first used in a tensor:
//   template <> inline constexpr epx_dtype epx::kDtypeOf<__nv_bfloat16> = EPX_BFLOAT16;
template <typename T>
inline constexpr epx_dtype kDtypeOf = EPX_DTYPE_UNSET;
template <>
inline constexpr epx_dtype kDtypeOf<float> = EPX_FLOAT32;
template <>
inline constexpr epx_dtype kDtypeOf<double> = EPX_FLOAT64;
template <>
inline constexpr epx_dtype kDtypeOf<int32_t> = EPX_INT32;
template <>
inline constexpr epx_dtype kDtypeOf<int64_t> = EPX_INT64;
template <>
inline constexpr epx_dtype kDtypeOf<uint8_t> = EPX_UINT8;

template <typename T>
concept TensorElement = (kDtypeOf<std::remove_cv_t<T>> != EPX_DTYPE_UNSET);

// A contiguous range that outlives the expression (as an lvalue or a span does) and whose elements have a dtype.
template <typename Range>
concept TensorRange = std::ranges::contiguous_range<Range> && std::ranges::sized_range<Range> &&
    std::ranges::borrowed_range<Range> && TensorElement<std::ranges::range_value_t<Range>>;

template <typename Range>
concept WritableTensorRange =
    TensorRange<Range> && !std::is_const_v<std::remove_reference_t<std::ranges::range_reference_t<Range>>>;

// One to four sizes in elements, outermost first; written {T, H} where a Shape is wanted.
class Shape {
public:
  template <std::integral... Sizes>
  constexpr Shape(Sizes... sizes) noexcept
      : ndim_(static_cast<int32_t>(sizeof...(Sizes))), sizes_{static_cast<int64_t>(sizes)...} {
    static_assert(sizeof...(Sizes) >= 1 && sizeof...(Sizes) <= 4, "a tensor has one to four dimensions");
  }

  constexpr int32_t ndim() const noexcept { return ndim_; }
  constexpr std::span<const int64_t> sizes() const noexcept { return {sizes_.data(), static_cast<size_t>(ndim_)}; }

  // "[2, 3]"
  std::string to_string() const {
    std::string text;
    for (const int64_t size : sizes())
      text += (text.empty() ? "[" : ", ") + std::to_string(size);
    return text + "]";
  }

  // The product of the sizes. Throws Error (INVALID_ARGUMENT) when one is negative or an int64_t cannot hold it.
  int64_t num_elements() const {
    int64_t product = 1;
    for (const int64_t size : sizes()) {
      if (size < 0)
        throw Error(EPX_ERROR_INVALID_ARGUMENT, "a tensor of shape " + to_string() + " has a negative size", "epx::Shape");
      if (size > 0 && product > std::numeric_limits<int64_t>::max() / size)
        throw Error(EPX_ERROR_INVALID_ARGUMENT,
                    "a tensor of shape " + to_string() + " has more elements than an int64 can count", "epx::Shape");
      product *= size;
    }
    return product;
  }

private:
  int32_t ndim_;
  std::array<int64_t, 4> sizes_;
};

// A view of memory that calls only read: an epx_tensor that keeps const. Where an argument is optional, or may be NULL in
// epx.h, a default-constructed one means NULL.
class ConstTensor {
public:
  ConstTensor() noexcept = default;

  // As the descriptor says; nothing is checked before a call. With ndim 0 it is a default-constructed one.
  explicit ConstTensor(const epx_tensor& tensor) noexcept : tensor_(tensor) {}

  // Memory of any kind, a GPU's for instance. The caller vouches for its size.
  ConstTensor(const void* data, epx_dtype dtype, Shape shape) noexcept
      : ConstTensor(const_cast<void*>(data), dtype, shape.sizes()) {} // epx_tensor has no const; calls do not write to it

  // The elements of a vector, span or array, which keeps owning them. Throws Error (INVALID_ARGUMENT) when the shape has
  // another number of elements than `data`. Without a shape: one-dimensional.
  template <TensorRange Range>
  ConstTensor(Range&& data, Shape shape)
      : ConstTensor(std::ranges::data(data), kDtypeOf<std::ranges::range_value_t<Range>>, shape) {
    require_size(static_cast<size_t>(std::ranges::size(data)), shape);
  }
  template <TensorRange Range>
  ConstTensor(Range&& data) : ConstTensor(data, Shape(std::ranges::size(data))) {}

  // The same with a sidecar: opaque bytes that travel with each row, [sizes[0], row_bytes].
  [[nodiscard]] ConstTensor with_sidecar(const void* bytes, int64_t row_bytes) const noexcept {
    ConstTensor copy = *this;
    copy.tensor_.sidecar = const_cast<void*>(bytes);
    copy.tensor_.sidecar_row_bytes = row_bytes;
    return copy;
  }

  explicit operator bool() const noexcept { return tensor_.ndim != 0; }

  const epx_tensor* get() const noexcept { return tensor_.ndim != 0 ? &tensor_ : nullptr; }
  const void* data() const noexcept { return tensor_.data; }
  epx_dtype dtype() const noexcept { return tensor_.dtype; }
  int32_t ndim() const noexcept { return tensor_.ndim; }
  int64_t size(int32_t dimension) const noexcept { return tensor_.sizes[dimension]; } // 0 <= dimension < ndim()

protected:
  ConstTensor(void* data, epx_dtype dtype, std::span<const int64_t> sizes) noexcept {
    tensor_.data = data;
    tensor_.dtype = dtype;
    tensor_.ndim = static_cast<int32_t>(sizes.size());
    std::ranges::copy(sizes, tensor_.sizes);
  }

  epx_tensor tensor_ = {};

private:
  static void require_size(size_t elements, const Shape& shape) {
    const int64_t wanted = shape.num_elements();
    if (std::cmp_equal(wanted, elements)) return;
    throw Error(EPX_ERROR_INVALID_ARGUMENT,
                "a tensor of shape " + shape.to_string() + " has " + std::to_string(wanted) +
                    " elements; the memory given has " + std::to_string(elements),
                "epx::Tensor");
  }
};

// A view of memory that calls may write to.
class Tensor : public ConstTensor {
public:
  Tensor() noexcept = default;
  explicit Tensor(const epx_tensor& tensor) noexcept : ConstTensor(tensor) {}
  Tensor(void* data, epx_dtype dtype, Shape shape) noexcept : ConstTensor(data, dtype, shape.sizes()) {}
  template <WritableTensorRange Range>
  Tensor(Range&& data, Shape shape) : ConstTensor(data, shape) {} // throws as ConstTensor's
  template <WritableTensorRange Range>
  Tensor(Range&& data) : ConstTensor(data) {}

  [[nodiscard]] Tensor with_sidecar(void* bytes, int64_t row_bytes) const noexcept {
    Tensor copy = *this;
    copy.tensor_.sidecar = bytes;
    copy.tensor_.sidecar_row_bytes = row_bytes;
    return copy;
  }

  void* data() const noexcept { return tensor_.data; }
};

// ---- Bootstrap -------------------------------------------------------------------------------------------------------

// Owns an epx_bootstrap.
class Bootstrap {
public:
  Bootstrap() noexcept = default;
  explicit Bootstrap(const epx_bootstrap& bootstrap) noexcept : bootstrap_(bootstrap) {} // takes it over
  Bootstrap(Bootstrap&& other) noexcept : bootstrap_(other.release()) {}
  Bootstrap& operator=(Bootstrap&& other) noexcept {
    if (this != &other) {
      epx_bootstrap_free(&bootstrap_);
      bootstrap_ = other.release();
    }
    return *this;
  }
  ~Bootstrap() { epx_bootstrap_free(&bootstrap_); }

  explicit operator bool() const noexcept { return bootstrap_.all_gather != nullptr; }
  operator const epx_bootstrap&() const noexcept { return bootstrap_; } // as Group takes it
  const epx_bootstrap* get() const noexcept { return *this ? &bootstrap_ : nullptr; }
  int32_t rank() const noexcept { return bootstrap_.rank; }
  int32_t num_ranks() const noexcept { return bootstrap_.num_ranks; }

  [[nodiscard]] epx_bootstrap release() noexcept { return std::exchange(bootstrap_, epx_bootstrap{}); }

private:
  epx_bootstrap bootstrap_ = {};
};

// epx_bootstrap_file. Throws Error. (That of MPI is in epx_mpi.hpp, since it needs mpi.h and libepx_mpi.)
[[nodiscard]] inline Bootstrap bootstrap_file(const std::string& directory, const std::string& job_id, int32_t rank,
                                              int32_t num_ranks, std::chrono::milliseconds timeout) {
  epx_bootstrap bootstrap = {};
  require_success(epx_bootstrap_file(directory.c_str(), job_id.c_str(), rank, num_ranks, timeout.count(), &bootstrap),
                  "epx_bootstrap_file");
  return Bootstrap(bootstrap);
}

// A bootstrap that gathers by `all_gather`, a framework's own for instance; a copy of it lives in the bootstrap. It is
// called as
//   all_gather(std::span<const std::byte> send, std::span<std::byte> recv, std::chrono::milliseconds timeout)
// and fills recv with every rank's `send`, in rank order, as epx_bootstrap asks. It may throw: group creation then fails
// with the status of an Error, or SYSTEM for anything else, and a sentence that carries what().
template <std::invocable<std::span<const std::byte>, std::span<std::byte>, std::chrono::milliseconds> AllGather>
[[nodiscard]] Bootstrap bootstrap_from(int32_t rank, int32_t num_ranks, AllGather all_gather) {
  struct Context {
    AllGather all_gather;
    size_t num_ranks;

    static epx_status call(void* self, const void* send, void* recv, size_t bytes_per_rank, int64_t timeout_ms,
                           char* message, size_t message_bytes) noexcept {
      const auto failed = [&](epx_status status, std::string_view why) {
        if (message_bytes > 0) message[why.copy(message, message_bytes - 1)] = '\0';
        return status;
      };
      try {
        Context& context = *static_cast<Context*>(self);
        std::invoke(context.all_gather, std::span(static_cast<const std::byte*>(send), bytes_per_rank),
                    std::span(static_cast<std::byte*>(recv), context.num_ranks * bytes_per_rank),
                    std::chrono::milliseconds(timeout_ms));
        return EPX_SUCCESS;
      } catch (const Error& error) {
        return failed(error.status(), error.what());
      } catch (const std::exception& error) {
        return failed(EPX_ERROR_SYSTEM, error.what());
      } catch (...) {
        return failed(EPX_ERROR_SYSTEM, "the all-gather threw something that is no std::exception");
      }
    }
    static void release(void* self) noexcept { delete static_cast<Context*>(self); }
  };
  epx_bootstrap bootstrap = {};
  bootstrap.struct_size = sizeof(bootstrap);
  bootstrap.rank = rank;
  bootstrap.num_ranks = num_ranks;
  bootstrap.all_gather = Context::call;
  bootstrap.release = Context::release;
  bootstrap.context = new Context{std::move(all_gather), static_cast<size_t>(std::max(num_ranks, 0))};
  return Bootstrap(bootstrap);
}

// ---- Configs and arguments -------------------------------------------------------------------------------------------

// An epx_group_config with its defaults; the required fields are still to be set. The constructor throws Error.
struct GroupConfig : epx_group_config {
  GroupConfig() : epx_group_config() { require_success(epx_group_config_init(this), "epx_group_config_init"); }
};

// epx_group_memory_plan. Throws Error.
[[nodiscard]] inline epx_memory_plan memory_plan(const epx_group_config& config, int32_t num_ranks) {
  epx_memory_plan plan = {};
  plan.struct_size = sizeof(plan);
  require_success(epx_group_memory_plan(&config, num_ranks, &plan), "epx_group_memory_plan");
  return plan;
}

// epx_layer.
struct Layer {
  int32_t top_k = 0;
  int32_t alignment = 0; // rows; 0 means 1

  operator epx_layer() const noexcept { return {top_k, alignment}; }
};

// An epx_row_format, whose tensors are views. A default-constructed one means NULL: rows travel as they are. Set
// scale_layout and the tensors, which are those of the way that the dtypes of the call choose.
struct RowFormat {
  RowFormat() noexcept = default;

  // With the defaults of the scaling. Throws Error.
  explicit RowFormat(epx_scaling of_elements) : scaling(of_elements) {
    epx_row_format defaults;
    require_success(epx_row_format_init(&defaults, of_elements), "epx_row_format_init");
    dtype = defaults.dtype;
    amax_floor = defaults.amax_floor;
  }

  // As the C struct says; nothing is checked before a call.
  explicit RowFormat(const epx_row_format& format) noexcept
      : scaling(format.scaling), dtype(format.dtype), amax_floor(format.amax_floor), scale_layout(format.scale_layout) {
    if (format.scales != nullptr) scales = ConstTensor(*format.scales);
    if (format.row_scales != nullptr) row_scales = ConstTensor(*format.row_scales);
    if (format.encode_scale != nullptr) encode_scale = ConstTensor(*format.encode_scale);
    if (format.recv_scales != nullptr) recv_scales = Tensor(*format.recv_scales);
    if (format.recv_row_scales != nullptr) recv_row_scales = Tensor(*format.recv_row_scales);
  }

  explicit operator bool() const noexcept { return scaling != EPX_SCALING_NONE; }

  // The C struct. It points to the tensors of this one.
  epx_row_format get() const noexcept {
    epx_row_format format = {};
    format.struct_size = sizeof(format);
    format.scaling = scaling;
    format.dtype = dtype;
    format.amax_floor = amax_floor;
    format.scale_layout = scale_layout;
    format.scales = scales.get();
    format.row_scales = row_scales.get();
    format.encode_scale = encode_scale.get();
    format.recv_scales = recv_scales.get();
    format.recv_row_scales = recv_row_scales.get();
    return format;
  }

  // S, the scales of a row of `hidden` elements.
  int64_t num_scales(int64_t hidden) const noexcept {
    const int64_t block = scaling == EPX_SCALING_MX ? 32 : scaling == EPX_SCALING_NV ? 16 : 128;
    return (hidden + block - 1) / block;
  }

  // The shape of recv_scales in scale_layout for N rows. In EPX_SCALES_PACKED its elements are INT32.
  Shape recv_scales_shape(int64_t rows, int64_t hidden) const noexcept {
    const int64_t per_row = num_scales(hidden), words = (per_row + 3) / 4, leading_dimension = (rows + 3) / 4 * 4;
    switch (scale_layout) {
    case EPX_SCALES_COLUMNS:
      return {per_row, leading_dimension};
    case EPX_SCALES_PACKED:
      return {words, leading_dimension};
    case EPX_SCALES_TILES:
      return {(rows + 127) / 128, words, 512};
    case EPX_SCALES_ROWS:
      break;
    }
    return {rows, per_row};
  }

  epx_scaling scaling = EPX_SCALING_NONE;
  epx_dtype dtype = EPX_DTYPE_UNSET; // of the elements that travel
  float amax_floor = 0;
  epx_scale_layout scale_layout = EPX_SCALES_ROWS; // of recv_scales
  ConstTensor scales = {};
  ConstTensor row_scales = {};
  ConstTensor encode_scale = {};
  Tensor recv_scales = {};
  Tensor recv_row_scales = {};
};

// Arguments of the operations: the fields of the C structs, in their order, which designated initialisers keep.
// Tensors are views, so they and the bytes of handle_mem belong to the caller; on GPUs both are the rank's GPU's.
struct PrepareArgs {
  Layer layer = {};
  std::span<std::byte> handle_mem = {}; // [out] handle_mem_size(layer) bytes, aligned to 16
  epx_stream stream = nullptr;
  ConstTensor topk_idx = {};
  Tensor counts = {};
  Tensor offsets = {};
  Tensor global_counts = {}; // optional, as all that follow
  Tensor info = {};
  Tensor slot = {};
  Tensor slot_origin = {};
  int64_t zone_stride = 0;
};

struct DispatchArgs {
  Layer layer = {};
  std::span<const std::byte> handle_mem = {};
  epx_stream stream = nullptr;
  ConstTensor tokens = {};
  ConstTensor topk_weights = {}; // optional
  Tensor recv_tokens = {};
  Tensor recv_weights = {}; // iff topk_weights is given
  epx_pads pads = EPX_PADS_ZERO;
  RowFormat format = {}; // optional
};

struct PrepareDispatchArgs {
  Layer layer = {};
  std::span<std::byte> handle_mem = {}; // [out] as in PrepareArgs
  epx_stream stream = nullptr;
  ConstTensor topk_idx = {};
  Tensor counts = {};
  Tensor offsets = {};
  Tensor global_counts = {}; // optional, as are the next three
  Tensor info = {};
  Tensor slot = {};
  Tensor slot_origin = {};
  ConstTensor tokens = {};
  ConstTensor topk_weights = {}; // optional
  Tensor recv_tokens = {};
  Tensor recv_weights = {}; // iff topk_weights is given
  epx_pads pads = EPX_PADS_ZERO;
  RowFormat format = {}; // optional
  int64_t zone_stride = 0;
};

struct CombineArgs {
  Layer layer = {};
  std::span<const std::byte> handle_mem = {};
  epx_stream stream = nullptr;
  ConstTensor expert_out = {};
  ConstTensor recv_weights = {}; // optional
  Tensor out = {};
  RowFormat format = {}; // optional
};

struct CombineBwdArgs {
  Layer layer = {};
  std::span<const std::byte> handle_mem = {};
  epx_stream stream = nullptr;
  ConstTensor grad_out = {};
  ConstTensor expert_out = {};   // iff grad_recv_weights is wanted
  ConstTensor recv_weights = {}; // optional
  Tensor grad_expert_out = {};
  Tensor grad_recv_weights = {}; // optional
  RowFormat format = {};         // optional
};

struct DispatchBwdArgs {
  Layer layer = {};
  std::span<const std::byte> handle_mem = {};
  epx_stream stream = nullptr;
  ConstTensor grad_recv = {};
  ConstTensor grad_recv_weights = {}; // optional
  Tensor grad_tokens = {};
  Tensor grad_topk_weights = {}; // iff grad_recv_weights is given
  RowFormat format = {};         // optional
};

// The rank-major layout.
struct DispatchRankMajorArgs {
  Layer layer = {};
  std::span<std::byte> handle_mem = {}; // [out] as in PrepareArgs
  epx_stream stream = nullptr;
  ConstTensor tokens = {};
  ConstTensor topk_idx = {};
  ConstTensor topk_weights = {}; // optional
  Tensor recv_tokens = {};
  Tensor recv_topk_idx = {};
  Tensor recv_weights = {}; // iff topk_weights is given
  Tensor counts = {};
  RowFormat format = {}; // optional
  epx_row_spacing row_spacing = EPX_ROWS_STRIDED;
};

struct CombineRankMajorArgs {
  Layer layer = {};
  std::span<const std::byte> handle_mem = {};
  epx_stream stream = nullptr;
  ConstTensor expert_out = {};
  Tensor out = {};
  RowFormat format = {}; // optional
};

struct CombineRankMajorBwdArgs {
  Layer layer = {};
  std::span<const std::byte> handle_mem = {};
  epx_stream stream = nullptr;
  ConstTensor grad_out = {};
  Tensor grad_expert_out = {};
  RowFormat format = {}; // optional
};

struct DispatchRankMajorBwdArgs {
  Layer layer = {};
  std::span<const std::byte> handle_mem = {};
  epx_stream stream = nullptr;
  ConstTensor grad_recv = {};
  ConstTensor grad_recv_weights = {}; // optional
  Tensor grad_tokens = {};
  Tensor grad_topk_weights = {}; // iff grad_recv_weights is given
  RowFormat format = {};         // optional
};

// Slices of rows, which need no layer.
struct RaggedAllToAllArgs {
  epx_stream stream = nullptr;
  ConstTensor operand = {};
  Tensor output = {}; // rows that nothing lands on keep what they have
  ConstTensor input_offsets = {};
  ConstTensor send_sizes = {};
  ConstTensor output_offsets = {};
  ConstTensor recv_sizes = {};
  epx_slice_direction direction = EPX_SLICES_FORWARD;
};

// ---- Memory that peers reach -----------------------------------------------------------------------------------------

// Memory from GroupView::mem_alloc or mem_register. epx_mem_free is a call of all ranks, and leaving a scope is the matter
// of one, so the destructor does not make it: the group keeps the memory, or the registration, until it is destroyed.
// free() ends it earlier, and has to be called by all ranks. Registered memory must not go before its registration does.
class Memory {
public:
  Memory() noexcept = default;
  Memory(epx_group group, void* data, size_t bytes) noexcept // what the C API made
      : group_(group), bytes_(static_cast<std::byte*>(data), bytes) {}
  Memory(Memory&& other) noexcept : group_(std::exchange(other.group_, nullptr)), bytes_(std::exchange(other.bytes_, {})) {}
  Memory& operator=(Memory&& other) noexcept { // as the destructor, does not free what was here
    group_ = std::exchange(other.group_, nullptr);
    bytes_ = std::exchange(other.bytes_, {});
    return *this;
  }
  ~Memory() = default;

  // epx_mem_free, which is collective. The group must live. Does nothing when empty; empty afterwards. Throws Error, and
  // still has the memory only where that is INVALID_ARGUMENT: any other ends the group, and the memory is freed.
  void free() {
    if (group_ == nullptr) return;
    const epx_status status = epx_mem_free(group_, data());
    if (status != EPX_ERROR_INVALID_ARGUMENT) static_cast<void>(release());
    require_success(status, "epx_mem_free");
  }
  [[nodiscard]] std::byte* release() noexcept {
    group_ = nullptr;
    return std::exchange(bytes_, {}).data();
  }

  explicit operator bool() const noexcept { return group_ != nullptr; }
  std::byte* data() const noexcept { return bytes_.data(); }
  size_t size() const noexcept { return bytes_.size(); } // bytes
  std::span<std::byte> bytes() const noexcept { return bytes_; }

  // Seen as elements; bytes at the end that make no whole element are left out.
  template <typename T>
  std::span<T> as() const noexcept {
    static_assert(std::is_trivially_copyable_v<T>);
    return {reinterpret_cast<T*>(data()), size() / sizeof(T)};
  }

private:
  epx_group group_ = nullptr;
  std::span<std::byte> bytes_;
};

// ---- Group -----------------------------------------------------------------------------------------------------------

// A group that something else owns: a Group, or a framework that holds an epx_group. Pass it by value. Every member but
// get, the conversion and abort throws Error; on an empty view too, with INVALID_ARGUMENT.
class GroupView {
public:
  GroupView() noexcept = default;
  GroupView(epx_group group) noexcept : group_(group) {}

  explicit operator bool() const noexcept { return group_ != nullptr; }
  epx_group get() const noexcept { return group_; }

  epx_group_info query() const {
    epx_group_info info = {};
    info.struct_size = sizeof(info);
    require_success(epx_group_query(group_, &info), "epx_group_query");
    return info;
  }

  // Clears the events that it reports, as epx_group_status does. A group that has failed is told by the report's status,
  // not by an exception.
  epx_group_report status() const {
    epx_group_report report = {};
    report.struct_size = sizeof(report);
    require_success(epx_group_status(group_, &report), "epx_group_status");
    return report;
  }

  // From any thread; in a catch clause or a destructor too, where peers shall not wait for this rank until they time out.
  // Does nothing where epx_group_abort refuses: on an empty view, and in a child of fork().
  void abort() const noexcept { static_cast<void>(epx_group_abort(group_)); }

  [[nodiscard]] size_t handle_mem_size(const Layer& layer) const {
    const epx_layer c_layer = layer;
    size_t bytes = 0;
    require_success(epx_handle_mem_size(group_, &c_layer, &bytes), "epx_handle_mem_size");
    return bytes;
  }

  // global_counts is [P, E] of a prepare, in memory of the host.
  [[nodiscard]] epx_load_report load_of_counts(const Layer& layer, const ConstTensor& global_counts,
                                               int64_t zone_stride = 0) const {
    const epx_layer c_layer = layer;
    epx_load_report report = {};
    report.struct_size = sizeof(report);
    require_success(epx_load_of_counts(group_, &c_layer, zone_stride, global_counts.get(), &report), "epx_load_of_counts");
    return report;
  }

  // Collective, as all that follow.
  [[nodiscard]] Memory mem_alloc(size_t bytes) const {
    void* data = nullptr;
    require_success(epx_mem_alloc(group_, bytes, &data), "epx_mem_alloc");
    return {group_, data, bytes};
  }

  [[nodiscard]] Memory mem_register(std::span<std::byte> memory) const {
    require_success(epx_mem_register(group_, memory.data(), memory.size()), "epx_mem_register");
    return {group_, memory.data(), memory.size()};
  }

  // Returns the records of all ranks, in rank order. The size of a Record is the same on all ranks.
  template <typename Record>
  requires std::is_trivially_copyable_v<Record> &&(sizeof(Record) <= EPX_MAX_RECORD_BYTES)
      [[nodiscard]] std::vector<Record> all_gather(const Record& mine) const {
    std::vector<Record> all(static_cast<size_t>(query().num_ranks));
    require_success(epx_group_all_gather(group_, &mine, all.data(), sizeof(Record)), "epx_group_all_gather");
    return all;
  }

  void prepare(const PrepareArgs& args) const {
    auto call = c_args<epx_prepare_args>(args);
    call.topk_idx = args.topk_idx.get();
    call.counts = args.counts.get();
    call.offsets = args.offsets.get();
    call.global_counts = args.global_counts.get();
    call.info = args.info.get();
    call.slot = args.slot.get();
    call.slot_origin = args.slot_origin.get();
    call.zone_stride = args.zone_stride;
    require_success(epx_prepare(group_, &call), "epx_prepare");
  }

  void dispatch(const DispatchArgs& args) const {
    auto call = c_args<epx_dispatch_args>(args);
    call.tokens = args.tokens.get();
    call.topk_weights = args.topk_weights.get();
    call.recv_tokens = args.recv_tokens.get();
    call.recv_weights = args.recv_weights.get();
    call.pads = args.pads;
    const epx_row_format format = args.format.get();
    if (args.format) call.format = &format;
    require_success(epx_dispatch(group_, &call), "epx_dispatch");
  }

  void prepare_dispatch(const PrepareDispatchArgs& args) const {
    auto call = c_args<epx_prepare_dispatch_args>(args);
    call.topk_idx = args.topk_idx.get();
    call.counts = args.counts.get();
    call.offsets = args.offsets.get();
    call.global_counts = args.global_counts.get();
    call.info = args.info.get();
    call.slot = args.slot.get();
    call.slot_origin = args.slot_origin.get();
    call.tokens = args.tokens.get();
    call.topk_weights = args.topk_weights.get();
    call.recv_tokens = args.recv_tokens.get();
    call.recv_weights = args.recv_weights.get();
    call.pads = args.pads;
    const epx_row_format format = args.format.get();
    if (args.format) call.format = &format;
    call.zone_stride = args.zone_stride;
    require_success(epx_prepare_dispatch(group_, &call), "epx_prepare_dispatch");
  }

  void combine(const CombineArgs& args) const {
    auto call = c_args<epx_combine_args>(args);
    call.expert_out = args.expert_out.get();
    call.recv_weights = args.recv_weights.get();
    call.out = args.out.get();
    const epx_row_format format = args.format.get();
    if (args.format) call.format = &format;
    require_success(epx_combine(group_, &call), "epx_combine");
  }

  void combine_bwd(const CombineBwdArgs& args) const {
    auto call = c_args<epx_combine_bwd_args>(args);
    call.grad_out = args.grad_out.get();
    call.expert_out = args.expert_out.get();
    call.recv_weights = args.recv_weights.get();
    call.grad_expert_out = args.grad_expert_out.get();
    call.grad_recv_weights = args.grad_recv_weights.get();
    const epx_row_format format = args.format.get();
    if (args.format) call.format = &format;
    require_success(epx_combine_bwd(group_, &call), "epx_combine_bwd");
  }

  void dispatch_bwd(const DispatchBwdArgs& args) const {
    auto call = c_args<epx_dispatch_bwd_args>(args);
    call.grad_recv = args.grad_recv.get();
    call.grad_recv_weights = args.grad_recv_weights.get();
    call.grad_tokens = args.grad_tokens.get();
    call.grad_topk_weights = args.grad_topk_weights.get();
    const epx_row_format format = args.format.get();
    if (args.format) call.format = &format;
    require_success(epx_dispatch_bwd(group_, &call), "epx_dispatch_bwd");
  }

  void dispatch_rank_major(const DispatchRankMajorArgs& args) const {
    auto call = c_args<epx_dispatch_rank_major_args>(args);
    call.tokens = args.tokens.get();
    call.topk_idx = args.topk_idx.get();
    call.topk_weights = args.topk_weights.get();
    call.recv_tokens = args.recv_tokens.get();
    call.recv_topk_idx = args.recv_topk_idx.get();
    call.recv_weights = args.recv_weights.get();
    call.counts = args.counts.get();
    const epx_row_format format = args.format.get();
    if (args.format) call.format = &format;
    call.row_spacing = args.row_spacing;
    require_success(epx_dispatch_rank_major(group_, &call), "epx_dispatch_rank_major");
  }

  void combine_rank_major(const CombineRankMajorArgs& args) const {
    auto call = c_args<epx_combine_rank_major_args>(args);
    call.expert_out = args.expert_out.get();
    call.out = args.out.get();
    const epx_row_format format = args.format.get();
    if (args.format) call.format = &format;
    require_success(epx_combine_rank_major(group_, &call), "epx_combine_rank_major");
  }

  void combine_rank_major_bwd(const CombineRankMajorBwdArgs& args) const {
    auto call = c_args<epx_combine_rank_major_bwd_args>(args);
    call.grad_out = args.grad_out.get();
    call.grad_expert_out = args.grad_expert_out.get();
    const epx_row_format format = args.format.get();
    if (args.format) call.format = &format;
    require_success(epx_combine_rank_major_bwd(group_, &call), "epx_combine_rank_major_bwd");
  }

  void dispatch_rank_major_bwd(const DispatchRankMajorBwdArgs& args) const {
    auto call = c_args<epx_dispatch_rank_major_bwd_args>(args);
    call.grad_recv = args.grad_recv.get();
    call.grad_recv_weights = args.grad_recv_weights.get();
    call.grad_tokens = args.grad_tokens.get();
    call.grad_topk_weights = args.grad_topk_weights.get();
    const epx_row_format format = args.format.get();
    if (args.format) call.format = &format;
    require_success(epx_dispatch_rank_major_bwd(group_, &call), "epx_dispatch_rank_major_bwd");
  }

  void ragged_all_to_all(const RaggedAllToAllArgs& args) const {
    epx_ragged_all_to_all_args call = {};
    call.struct_size = sizeof(call);
    call.stream = args.stream;
    call.operand = args.operand.get();
    call.output = args.output.get();
    call.input_offsets = args.input_offsets.get();
    call.send_sizes = args.send_sizes.get();
    call.output_offsets = args.output_offsets.get();
    call.recv_sizes = args.recv_sizes.get();
    call.direction = args.direction;
    require_success(epx_ragged_all_to_all(group_, &call), "epx_ragged_all_to_all");
  }

protected:
  epx_group group_ = nullptr;

private:
  // What the args structs of a layer begin with.
  template <typename CArgs, typename Args>
  static CArgs c_args(const Args& args) noexcept {
    CArgs call = {};
    call.struct_size = sizeof(call);
    call.layer = args.layer;
    call.handle_mem = args.handle_mem.data();
    call.handle_mem_bytes = args.handle_mem.size();
    call.stream = args.stream;
    return call;
  }
};

// Owns a group. The destructor is epx_group_destroy: it may wait for this rank's calls on the GPU, but for no peer, and
// ends all Memory of the group. Call abort() first where this rank gives up in the middle and its peers shall hear of it at
// once.
class Group : public GroupView {
public:
  Group() noexcept = default;
  explicit Group(epx_group group) noexcept : GroupView(group) {} // takes it over

  // epx_group_create: collective over the bootstrap, which need not live longer. Throws Error.
  Group(const epx_bootstrap& bootstrap, const epx_group_config& config) {
    require_success(epx_group_create(&bootstrap, &config, &group_), "epx_group_create");
  }

  Group(Group&& other) noexcept : GroupView(other.release()) {}
  Group& operator=(Group&& other) noexcept {
    if (this != &other) {
      reset();
      group_ = other.release();
    }
    return *this;
  }
  ~Group() { reset(); }

  void reset() noexcept { epx_group_destroy(release()); }
  [[nodiscard]] epx_group release() noexcept { return std::exchange(group_, nullptr); }
};

} // namespace v0
} // namespace epx

#endif // EPX_EPX_HPP_
