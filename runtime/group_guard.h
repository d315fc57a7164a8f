// SPDX-License-Identifier: Apache-2.0
// A GroupGuard lets only the process that created a group use it, one thread at a time, and until the group is destroyed.
#pragma once

#include <atomic>

#include <unistd.h>

#include "base/deadline.h"
#include "base/error.h"
#include "base/home_process.h"

namespace epx {

class GroupGuard {
public:
  // A child of fork() has the group's memory, some of it shared with its parent, and would take part in the parent's calls.
  bool is_own_process() const noexcept { return creator_.is_here(); }

  // From now on every Use is refused. Returns false where the guard was closed before.
  bool close() noexcept { return !is_closed_.exchange(true); }

  // Returns true once no Use is left, and false when some are at the deadline.
  bool wait_until_unused(const Deadline& deadline) const {
    for (PollingPace pace(std::chrono::microseconds(20), std::chrono::milliseconds(2)); num_uses_.load() > 0;
         pace.sleep(deadline))
      if (deadline.passed()) return false;
    return true;
  }

  // Has the last Use that ends free the group, where nobody waits for it: see must_free().
  void free_when_unused() noexcept { is_abandoned_.store(true); }

  // Returns true for one caller after free_when_unused(), when no Use is left.
  bool must_free() noexcept { return is_abandoned_.load() && num_uses_.load() == 0 && is_abandoned_.exchange(false); }

  // While a Use lives the group does too. Any number of threads may have one at any time.
  class Use {
  public:
    Use(GroupGuard& guard, const char* function) : guard_(guard) {
      if (!guard.is_own_process())
        fail(EPX_ERROR_INVALID_ARGUMENT,
             "{}: process {} created the group, and this is process {}, forked from it: only the process that created a "
             "group may use it; create another one here",
             function, guard.creator_.id(), ::getpid());
      // Counted first: either close() is seen here, or its thread sees this use.
      guard.num_uses_.fetch_add(1);
      if (!guard.is_closed_.load()) return;
      guard.num_uses_.fetch_sub(1);
      fail(EPX_ERROR_ABORTED, "{}: the group has been destroyed", function);
    }
    ~Use() { guard_.num_uses_.fetch_sub(1); } // the last access: the group may be gone afterwards
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

  private:
    GroupGuard& guard_;
  };

  // A Call marks a call of the group's sequence, and throws when another thread has one. Functions that any thread may call at
  // any time make none.
  class Call {
  public:
    Call(GroupGuard& guard, const char* function) : in_progress_(guard.in_progress_) {
      const char* other = nullptr;
      if (!in_progress_.compare_exchange_strong(other, function, std::memory_order_acquire, std::memory_order_relaxed))
        fail(EPX_ERROR_INVALID_ARGUMENT,
             "{}: another thread is in {} of this group; a group is used by one thread at a time, calls of several threads "
             "need an order or a group each",
             function, other);
    }
    ~Call() { in_progress_.store(nullptr, std::memory_order_release); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

  private:
    std::atomic<const char*>& in_progress_;
  };

private:
  const HomeProcess creator_{};
  std::atomic<bool> is_closed_{false};
  std::atomic<bool> is_abandoned_{false};
  std::atomic<int> num_uses_{0};
  std::atomic<const char*> in_progress_{nullptr}; // the function's name
};

} // namespace epx
