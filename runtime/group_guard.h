// SPDX-License-Identifier: Apache-2.0
// A GroupGuard lets only the process that created a group use it, one thread at a time.
#pragma once

#include <atomic>

#include <unistd.h>

#include "base/error.h"
#include "base/home_process.h"

namespace epx {

class GroupGuard {
public:
  // A child of fork() has the group's memory, some of it shared with its parent, and would take part in the parent's calls.
  bool is_own_process() const noexcept { return creator_.is_here(); }
  void require_own_process(const char* function) const {
    if (!is_own_process())
      fail(
          EPX_ERROR_INVALID_ARGUMENT,
          "{}: process {} created the group, and this is process {}, forked from it: only the process that created a group "
          "may use it; create another one here",
          function, creator_.id(), ::getpid());
  }

  // A Call marks a call in progress, and throws when another thread has one. Functions that any thread may call at any time
  // make none.
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
  std::atomic<const char*> in_progress_{nullptr}; // the function's name
};

} // namespace epx
