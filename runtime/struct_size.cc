// SPDX-License-Identifier: Apache-2.0
#include "runtime/struct_size.h"

#include "base/error.h"

namespace epx {

void require_fixed_size(const char* name, size_t given, size_t expected) {
  if (given != expected)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{}.struct_size is {}; it is {} in every version: set it to sizeof({})", name, given,
         expected, name);
}

void require_struct_size(const GrowingStruct& type, size_t given) {
  if (given < type.first_size || given > kMaxStructSize || given % kStructSizeStep != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{}.struct_size is {}; it must be a multiple of {}, {}..{}: set it to sizeof({})",
         type.name, given, kStructSizeStep, type.first_size, kMaxStructSize, type.name);
}

void require_zero_beyond(const GrowingStruct& type, const void* address, size_t given, size_t known) {
  const auto* const bytes = static_cast<const std::byte*>(address);
  for (size_t i = known; i < given; ++i) {
    if (bytes[i] != std::byte{0})
      fail(EPX_ERROR_INVALID_ARGUMENT,
           "{}.struct_size is {}, of which this library knows {} bytes, but byte {} is not 0: zero the struct before "
           "setting "
           "fields, and set none that is newer than the library that is loaded",
           type.name, given, known, i);
  }
}

} // namespace epx
