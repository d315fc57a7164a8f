// SPDX-License-Identifier: Apache-2.0
// Keeps owners of memory that a device may still use where releasing it would wait for the device.
#pragma once

#include <atomic>
#include <new>
#include <type_traits>
#include <utility>

namespace epx {

// No destructor of `owner` runs, not even when the process exits; where there is no memory for a list entry, it runs now. Any
// thread may call this.
template <typename Owner>
void keep_until_exit(Owner&& owner) noexcept {
  static_assert(!std::is_lvalue_reference_v<Owner> && std::is_nothrow_move_constructible_v<Owner>);
  struct Kept {
    Owner owner;
    Kept* next;
  };
  static std::atomic<Kept*> last{nullptr}; // a list, from which leak checkers reach what is kept
  Kept* const kept = new (std::nothrow) Kept{std::move(owner), nullptr};
  if (kept == nullptr) {
    [[maybe_unused]] const Owner released(std::move(owner));
    return;
  }
  kept->next = last.load();
  while (!last.compare_exchange_weak(kept->next, kept)) {
  }
}

} // namespace epx
