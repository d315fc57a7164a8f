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
  static_assert(alignof(Kept) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
  void* const memory = ::operator new(sizeof(Kept), std::nothrow);
  if (memory == nullptr) {
    [[maybe_unused]] const Owner released(std::forward<Owner>(owner));
    return;
  }
  Kept* const kept = new (memory) Kept{std::forward<Owner>(owner), last.load()};
  while (!last.compare_exchange_weak(kept->next, kept)) {
  }
}

} // namespace epx
