// SPDX-License-Identifier: Apache-2.0
// Ends waits of the host early: epx_interrupt() those of the whole process, a thread's check function (epx_set_interrupt_check)
// those of the thread. Loops that wait for peers in a caller's thread ask at every poll, beside their deadline; threads of the
// library never do.
#pragma once

#include <cstdint>
#include <string_view>

namespace epx {

// A thread enters a call that may wait: it hears of interrupts from here on.
void begin_waiting_call() noexcept;

// Returns whether the waits of the calling thread's call are to end. It stays true until take_interrupt(), so that every wait
// of the call ends, also the one in which the rank tells its peers.
bool is_interrupted() noexcept;

// Returns whether is_interrupted() has returned true in this call.
bool was_interrupted() noexcept;

// Returns whether the calling thread is in its check function: so it is in a call, whatever else it calls meanwhile.
bool is_in_interrupt_check() noexcept;

// Throws ABORTED if is_interrupted(). `what` begins the sentence: who waited for what.
void require_not_interrupted(std::string_view what);

// Returns is_interrupted(), and forgets the interrupt: the thread's next call waits again.
bool take_interrupt() noexcept;

void interrupt() noexcept; // async-signal-safe

void set_interrupt_check(int32_t (*check)(void)) noexcept; // of the calling thread; NULL: none

} // namespace epx
