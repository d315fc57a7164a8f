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
  uint64_t seen = num_interrupts.load(); // of those that came before this thread's first wait it does not hear
  int32_t (*check)(void) = nullptr;
  Every check_is_due{kCheckInterval};
  bool was_told = false; // by the check
};

ThreadState& this_thread() noexcept {
  static thread_local ThreadState state;
  return state;
}

} // namespace

bool is_interrupted() noexcept {
  ThreadState& state = this_thread();
  if (state.was_told || num_interrupts.load(std::memory_order_relaxed) != state.seen) return true;
  if (state.check != nullptr && state.check_is_due.due()) state.was_told = state.check() != 0;
  return state.was_told;
}

void require_not_interrupted(std::string_view what) {
  if (is_interrupted()) fail(EPX_ERROR_ABORTED, "{}: interrupted", what);
}

bool take_interrupt() noexcept {
  const bool was_interrupted = is_interrupted();
  ThreadState& state = this_thread();
  state.seen = num_interrupts.load();
  state.was_told = false;
  return was_interrupted;
}

void interrupt() noexcept {
  num_interrupts.fetch_add(1);
}

void set_interrupt_check(int32_t (*check)(void)) noexcept {
  this_thread().check = check;
}

} // namespace epx
