// SPDX-License-Identifier: Apache-2.0
// Arithmetic on byte counts and row counts that throws when it overflows.
#pragma once

#include <cstdint>

namespace epx {

// Throws INVALID_ARGUMENT with the message "WHAT needs A OPERATOR B, which is more than 2^63 - 1".
[[noreturn]] void fail_too_large(const char* what, int64_t a, char operation, int64_t b);

inline int64_t checked_mul(int64_t a, int64_t b, const char* what) {
  int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) fail_too_large(what, a, '*', b);
  return result;
}

inline int64_t checked_add(int64_t a, int64_t b, const char* what) {
  int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) fail_too_large(what, a, '+', b);
  return result;
}

// `multiple` must be positive, here and below.
constexpr int64_t round_down(int64_t value, int64_t multiple) {
  return value / multiple * multiple;
}

inline int64_t checked_round_up(int64_t value, int64_t multiple, const char* what) {
  return round_down(checked_add(value, multiple - 1, what), multiple);
}

} // namespace epx
