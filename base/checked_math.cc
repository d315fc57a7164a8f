// SPDX-License-Identifier: Apache-2.0
#include "base/checked_math.h"

#include "base/error.h"

namespace epx {

void fail_too_large(const char* what, int64_t a, char operation, int64_t b) {
  fail(EPX_ERROR_INVALID_ARGUMENT, "{} needs {} {} {}, which is more than 2^63 - 1", what, a, operation, b);
}

} // namespace epx
