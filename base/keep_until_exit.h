// SPDX-License-Identifier: Apache-2.0
// Keeps owners of memory that a device may still use where releasing it would wait for the device.
#pragma once

#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

namespace epx {

// No destructor of `owner` runs, not even when the process exits. Any thread may call this.
template <typename Owner>
void keep_until_exit(Owner&& owner) {
  static_assert(!std::is_lvalue_reference_v<Owner>);
  static auto& kept = *new std::vector<std::unique_ptr<Owner>>;
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  kept.push_back(std::make_unique<Owner>(std::forward<Owner>(owner)));
}

} // namespace epx
