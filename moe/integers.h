// SPDX-License-Identifier: Apache-2.0
// Indices and counts of either width, for host and device.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "epx/epx.h"

namespace epx::moe {

// An array of INT32 or INT64, as the caller has it.
class Integers {
public:
  Integers() = default;
  explicit Integers(const epx_tensor* tensor)
      : data_(tensor != nullptr ? tensor->data : nullptr), is_64_(tensor != nullptr && tensor->dtype == EPX_INT64) {}
  explicit Integers(int32_t* data) : data_(data) {}

  EPX_HOST_DEVICE int64_t operator[](int64_t i) const {
    return is_64_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }
  EPX_HOST_DEVICE void set(int64_t i, int64_t value) const {
    if (is_64_)
      static_cast<int64_t*>(data_)[i] = value;
    else
      static_cast<int32_t*>(data_)[i] = static_cast<int32_t>(value);
  }

private:
  void* data_ = nullptr;
  bool is_64_ = false;
};

} // namespace epx::moe
