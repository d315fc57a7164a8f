// SPDX-License-Identifier: Apache-2.0
// The growth of the C API's structs (docs/api.md, "How this API grows"): what a caller of an older or a newer epx passes
// becomes what this library knows, and the other way round.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/operations.h"
#include "epx/epx.h"

namespace epx {

inline constexpr size_t kStructSizeStep = 8;   // bytes: sizes are multiples of it
inline constexpr size_t kMaxStructSize = 4096; // bytes: a struct_size beyond it was never set

struct GrowingStruct {
  const char* name = nullptr;
  size_t first_size = 0; // bytes in the first version that has the struct: no caller's is smaller
};

// The structs that may grow, with their sizes in the first version that had them.
template <typename Struct>
inline constexpr GrowingStruct kGrowingStruct = {};
template <>
inline constexpr GrowingStruct kGrowingStruct<epx_group_info> = {"epx_group_info", 88};
template <>
inline constexpr GrowingStruct kGrowingStruct<epx_memory_plan> = {"epx_memory_plan", 104};
template <>
inline constexpr GrowingStruct kGrowingStruct<epx_group_report> = {"epx_group_report", 1480};
template <>
inline constexpr GrowingStruct kGrowingStruct<epx_load_report> = {"epx_load_report", 48};
#define EPX_GROWING_ARGS(NUMBER, name, first_bytes, ...)                                                                   \
  template <>                                                                                                              \
  inline constexpr GrowingStruct kGrowingStruct<epx_##name##_args> = {"epx_" #name "_args", first_bytes};
EPX_OPERATIONS(EPX_GROWING_ARGS)
#undef EPX_GROWING_ARGS

// The structs that never grow, since what fills them in, or reads them as a part of another one, is not told their size.
static_assert(sizeof(epx_group_config) == 128 && sizeof(epx_bootstrap) == 64 && sizeof(epx_tensor) == 80 &&
              sizeof(epx_layer) == 8 && sizeof(epx_row_format) == 96);

// A field that is added in padding would not change sizeof, and callers do not zero padding.
template <typename Struct>
constexpr bool has_no_padding() {
  if constexpr (std::is_same_v<Struct, epx_group_report>) // has had a hole in front of event_counts since 0.1
    return offsetof(epx_group_report, message) + sizeof(epx_group_report::message) == sizeof(epx_group_report);
  else
    return std::has_unique_object_representations_v<Struct>;
}

template <typename Struct>
constexpr void assert_rules_of_growth() {
  constexpr size_t kFirst = kGrowingStruct<Struct>.first_size;
  static_assert(kFirst != 0, "the struct is not in the table");
  static_assert(kFirst % kStructSizeStep == 0 && sizeof(Struct) % kStructSizeStep == 0);
  static_assert(kFirst <= sizeof(Struct) && sizeof(Struct) <= kMaxStructSize);
  static_assert(std::is_trivially_copyable_v<Struct> && has_no_padding<Struct>());
}

// Throws unless a struct that never grows has its size.
void require_fixed_size(const char* name, size_t given, size_t expected);

// Throws unless `given` may be the struct_size of such a struct, of this version of epx or another one.
void require_struct_size(const GrowingStruct& type, size_t given);

// Throws when one of the bytes [known, given) of a caller's struct is not 0.
void require_zero_beyond(const GrowingStruct& type, const void* address, size_t given, size_t known);

// The args of a call. What an older caller's struct does not have is 0; of a newer caller's, what this library does not know
// has to be 0.
template <typename Args>
Args read_args(const Args* given) {
  assert_rules_of_growth<Args>();
  const size_t bytes = given->struct_size;
  require_struct_size(kGrowingStruct<Args>, bytes);
  require_zero_beyond(kGrowingStruct<Args>, given, bytes, sizeof(Args));
  Args args{};
  std::memcpy(&args, given, std::min(bytes, sizeof(Args)));
  return args;
}

// Fills in a caller's output with what values_of() returns: as many bytes as both know, and 0 in the caller's rest. struct_size
// stays as the caller set it. values_of is not called when that is refused.
template <typename Struct, typename ValuesOf>
void write_output(Struct* out, const ValuesOf& values_of) {
  assert_rules_of_growth<Struct>();
  const size_t bytes = out->struct_size;
  require_struct_size(kGrowingStruct<Struct>, bytes);
  Struct values = values_of();
  values.struct_size = bytes;
  std::memcpy(out, &values, std::min(bytes, sizeof(Struct)));
  if (bytes > sizeof(Struct)) std::memset(reinterpret_cast<std::byte*>(out) + sizeof(Struct), 0, bytes - sizeof(Struct));
}

} // namespace epx
