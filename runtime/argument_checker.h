// SPDX-License-Identifier: Apache-2.0
// The checks that the arguments of all operations have in common. An operation describes its tensors to an ArgumentChecker one
// by one: name, dtype, dimensions, required or not. What is refused throws, with the operation and the argument in the sentence.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "base/operations.h"
#include "epx/epx.h"
#include "runtime/group_context.h"
#include "runtime/stages/stages.h"

namespace epx {

// The dimensions of tensors. K, P, E, R, E_l and the numbers follow from the group and the layer. T, N, M and H are free: the
// first tensor of a call that has one decides what it is, and the others must have the same.
enum class Dim { T, N, M, H, K, P, E, R, E_l, E_l_and_1, number_1, number_3, number_5, number_512, S, ld, words, tiles };
constexpr std::array<const char*, 18> kDimNames = {"T",           "N",
                                                   "M",           "H",
                                                   "K",           "P",
                                                   "E",           "R",
                                                   "E_l",         "E_l + 1",
                                                   "1",           "3",
                                                   "5",           "512",
                                                   "S",           "N rounded up to 4",
                                                   "ceil(S / 4)", "ceil(N / 128)"};

// The dtypes of tensors. like_rows and like_counts: that of the tensor of `rows` or `counts` before it. sent_rows and
// received_rows: those of a scatter, whose format decides which it may be. wide_rows: rows that are computed with, of a dtype of
// their own.
// any: those of elements of any kind.
enum class Type {
  rows,
  any,
  like_any,
  like_rows,
  wide_rows,
  sent_rows,
  received_rows,
  scales,
  indices,
  counts,
  like_counts,
  float32,
  int32,
  int64
};

enum class Direction { in, out };

class ArgumentChecker {
public:
  // Checks the fields that every args struct has. The context must outlive the checker.
  template <typename ArgsStruct>
  ArgumentChecker(const GroupContext& context, const ArgsStruct& args, Direction handle_direction,
                  bool is_rank_major = false)
      : context_(context), function_(OperationOf<ArgsStruct>::kFunction), is_rank_major_(is_rank_major) {
    call_.operation = OperationOf<ArgsStruct>::kNumber;
    call_.stream = args.stream;
    call_.handle_mem = call_.checked_header = static_cast<const std::byte*>(args.handle_mem);
    common(args.layer, args.handle_mem_bytes, handle_direction);
  }

  // Of a call without a layer and handle memory.
  ArgumentChecker(const GroupContext& context, const epx_ragged_all_to_all_args& args);

  // Check a tensor and return its data, which is not NULL where the tensor is given, unless T is void. Messages call it `name`.
  template <typename T = void>
  T* in(const char* name, const epx_tensor* tensor, Type type, std::initializer_list<Dim> dims,
        bool may_have_sidecar = false) {
    check(name, tensor, type, dims, Direction::in, may_have_sidecar);
    return data_of<T>(tensor);
  }
  template <typename T = void>
  T* out(const char* name, const epx_tensor* tensor, Type type, std::initializer_list<Dim> dims,
         bool may_have_sidecar = false) {
    check(name, tensor, type, dims, Direction::out, may_have_sidecar);
    return data_of<T>(tensor);
  }
  // The same for tensors that may be NULL.
  template <typename T = void>
  T* optional_in(const char* name, const epx_tensor* tensor, Type type, std::initializer_list<Dim> dims) {
    return tensor == nullptr ? nullptr : in<T>(name, tensor, type, dims);
  }
  template <typename T = void>
  T* optional_out(const char* name, const epx_tensor* tensor, Type type, std::initializer_list<Dim> dims) {
    return tensor == nullptr ? nullptr : out<T>(name, tensor, type, dims);
  }

  // Check a tensor whose first dimension is `rows`, and whose others are those of `like`, if that is given.
  std::byte* rows_in(const char* name, const epx_tensor* tensor, Dim rows) {
    check_any_rows(name, tensor, nullptr, nullptr, rows, Direction::in);
    return data_of<std::byte>(tensor);
  }
  std::byte* rows_out(const char* name, const epx_tensor* tensor, const char* like_name, const epx_tensor& like, Dim rows) {
    check_any_rows(name, tensor, like_name, &like, rows, Direction::out);
    return data_of<std::byte>(tensor);
  }
  // Of the tensors so far.
  int64_t decided(Dim dim) const { return size_of(dim); }

  // The next tensor that has this free dimension decides it anew.
  void forget(Dim dim) { size_of(dim) = kUnknown; }

  // In front of the tensors of a scatter, the format of its rows, which may be NULL; or of a gather, that of its sums. Behind the
  // tensors that have T, H and the receive rows, the tensors of the format; those of sums are NULL.
  void format(const epx_row_format* format);
  void sum_format(const epx_row_format* format);
  FormatTensors format_tensors();
  void sidecars(const epx_tensor& tokens, const epx_tensor& recv_tokens); // of dispatch
  void both_or_neither(const char* a, const void* given_a, const char* b, const void* given_b) const;
  int64_t zone_stride(int64_t stride) const; // of prepare
  void rank_major_staging() const;           // behind the tensor that has M: rows pass through staging whose size is R
  void rank_major_sums() const;

  // Checks, behind all tensors, that no output overlaps any other one.
  void no_overlap() const;

  // What movements have in common, as the tensors have decided it. A prepare has the fields that are no dimensions of rows.
  MovementCall movement() const;

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail(EPX_ERROR_INVALID_ARGUMENT, "{}: {}", function_, fmt::format(format, std::forward<Args>(args)...));
  }

private:
  static constexpr int64_t kUnknown = -1;

  struct Span {
    const char* name;
    uintptr_t begin;
    uintptr_t bytes;
    Direction direction;
  };

  // A given tensor without elements may have NULL data, which must not look like "not given".
  template <typename T>
  static T* data_of(const epx_tensor* tensor) {
    alignas(16) static std::array<std::byte, 16> empty{};
    if (std::is_void_v<T> || tensor->data != nullptr) return static_cast<T*>(tensor->data);
    return reinterpret_cast<T*>(empty.data());
  }

  void common(const epx_layer& layer, size_t handle_mem_bytes, Direction handle_direction);
  void check(const char* name, const epx_tensor* tensor, Type type, std::initializer_list<Dim> dims, Direction direction,
             bool may_have_sidecar);
  void check_any_rows(const char* name, const epx_tensor* tensor, const char* like_name, const epx_tensor* like, Dim rows,
                      Direction direction);
  void check_memory(const char* name, const epx_tensor& tensor, int64_t bytes, Direction direction, bool may_have_sidecar);
  void check_stream() const;
  void check_dtype(const char* name, const epx_tensor& tensor, Type type);
  std::span<const epx_dtype> row_dtypes(Type type);
  std::byte* recv_scales();
  int64_t check_sizes(const char* name, const epx_tensor& tensor, std::initializer_list<Dim> dims);
  void check_rows(const char* name, const epx_tensor& rows, int axis) const;
  void check_recv_rows(const char* name, const epx_tensor& rows) const;
  void check_sidecar(const char* name, const epx_tensor& tensor, Direction direction);
  void add_span(const char* name, const void* data, int64_t bytes, Direction direction);
  [[noreturn]] void refuse_size(const char* name, const epx_tensor& tensor) const;
  int64_t& size_of(Dim dim) { return sizes_[static_cast<size_t>(dim)]; }
  int64_t size_of(Dim dim) const { return sizes_[static_cast<size_t>(dim)]; }

  const GroupContext& context_;
  const char* function_;
  bool is_rank_major_;
  MovementCall call_{};
  std::array<int64_t, kDimNames.size()> sizes_{};
  const epx_row_format* format_ = nullptr;
  std::array<epx_dtype, 4> row_dtypes_{}; // what row_dtypes() returns
  epx_dtype rows_dtype_ = EPX_DTYPE_UNSET;
  epx_dtype recv_dtype_ = EPX_DTYPE_UNSET;
  epx_dtype counts_dtype_ = EPX_DTYPE_UNSET;
  std::array<Span, 24> spans_{};
  size_t num_spans_ = 0;
};

// Returns the effective alignment. Throws when the layer does not fit the group.
int require_layer(const GroupContext& context, const epx_layer& layer, const char* function);

// Throws unless zones may be `stride` rows apart, or 0: behind each other. `alignment` is an effective one.
void require_zone_stride(const GroupContext& context, int alignment, int64_t stride, const char* function);

} // namespace epx
