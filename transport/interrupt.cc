// SPDX-License-Identifier: Apache-2.0
#include "transport/interrupt.h"

#include <atomic>
#include <chrono>

#include "base/deadline.h"
#include "base/error.h"

namespace epx {
namespace {

std::atomic<uint64_t> num_interrupts{0};
static_assert(std::atomic<uint64_t>::is_always_lock_free); // or a signal handler could not count

// A check of Python takes the interpreter's lock, so it is not made at every poll.
constexpr std::chrono::milliseconds kCheckInterval{20};

struct ThreadState {
  uint64_t seen = num_interrupts.load(); // of those that came before this thread's first call it does not hear
  int32_t (*check)(void) = nullptr;
  Every check_is_due{kCheckInterval};
  bool was_told = false; // by the check
  bool is_in_check = false;
  bool was_heard = false; // in this call
};

ThreadState& this_thread() noexcept {
  static thread_local ThreadState state;
  return state;
}

} // namespace

void begin_waiting_call() noexcept {
  this_thread().was_heard = false;
}

bool is_interrupted() noexcept {
  ThreadState& state = this_thread();
  // A signal handler of an interpreter, which the check has run, may itself make a call that waits.
  if (state.check != nullptr && !state.was_told && !state.is_in_check && state.check_is_due.due()) {
    state.is_in_check = true;
    const bool is_told = state.check() != 0;
    state.is_in_check = false;
    state.was_told = state.was_told || is_told;
  }
  if (!state.was_told && num_interrupts.load(std::memory_order_relaxed) == state.seen) return false;
  state.was_heard = true;
  return true;
}

bool was_interrupted() noexcept {
  return this_thread().was_heard;
}

bool is_in_interrupt_check() noexcept {
  return this_thread().is_in_check;
}

void require_not_interrupted(std::string_view what) {
  if (is_interrupted()) fail(EPX_ERROR_ABORTED, "{}: interrupted", what);
}

bool take_interrupt() noexcept {
  const bool was_pending = is_interrupted();
  ThreadState& state = this_thread();
  state.seen = num_interrupts.load();
  state.was_told = false;
  state.was_heard = false;
  return was_pending;
}

void interrupt() noexcept {
  num_interrupts.fetch_add(1);
}

void set_interrupt_check(int32_t (*check)(void)) noexcept {
  this_thread().check = check;
}

} // namespace epx
