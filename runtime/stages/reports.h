// What a group reports, in words: the same sentences whoever finds the cause, host code or a kernel.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "runtime/group_context.h"
#include "runtime/layout/handle_memory.h"
#include "runtime/status_board.h"

namespace epx {

// The call that a report is about.
struct CallName {
  epx_operation operation;
  uint64_t sequence;
};

// ---- Events that a group lives on with ----

Event bad_index_event(CallName call, int64_t bad, int64_t first_value, int64_t token, int64_t k, int num_experts);

struct Overflow {
  int64_t demand, dropped, rows_needed;
};
Event overflow_event(CallName call, const Overflow& overflow, int rank, int64_t max_recv_tokens);

Event too_few_rows_event(CallName call, int64_t dropped, int64_t recv_rows, int64_t rows_in_use);

// What a call passes that its handle memory must have been prepared for.
struct HandleUse {
  int32_t top_k;
  int32_t alignment; // effective
  int64_t num_tokens;
};
// Why this rank cannot use the handle memory in this call; "" when it can.
std::string why_unusable(const HandleHeader& header, const HandleUse& use, const GroupContext& context);
// The same where the header is right and the body's checksum is wrong.
std::string why_body_unusable();
Event unusable_handle_event(CallName call, const std::string& why);
Event plan_mismatch_event(CallName call, uint64_t own_plan, uint64_t their_plan, int stranger);

// ---- Failures that it does not ----

// The first disagreement among what the ranks offer, [P]; none when they agree.
std::optional<Failure> find_disagreement(CallName call, std::span<const CallDescriptor> descriptors);

// What is known of the kernel by which a culprit should have arrived; a call on the host has none.
enum class CulpritKernel { none, unknown, launched };

struct TimeOut {
  epx_phase phase;
  std::vector<int> missing;
  int culprit;
  uint64_t culprit_arrived_at; // last call that the culprit had reached
  int64_t suspended_ms = 0;    // this process was suspended for so long while it waited; that is not counted
  CulpritKernel kernel = CulpritKernel::none;
};
Failure timeout_failure(CallName call, const TimeOut& timeout, int64_t timeout_ms);

// The end of such a sentence: why the culprit's kernel, although launched, may not have arrived.
std::string kernel_words(CulpritKernel kernel, int culprit, epx_operation operation);

// This rank's kernel could not be launched.
Failure launch_failure(CallName call, int rank, const std::string& why);

// A peer, or this rank itself, left a poison record, which is sound.
Failure abort_failure(CallName call, const AbortRecord& abort_record, int rank, uint64_t culprit_arrived_at);

// What peers store in the window of `rank` cannot have come from them. `what` says which word, and its value.
Failure damage_failure(CallName call, int rank, const std::string& what);
std::string abort_record_damage(uint64_t word);

} // namespace epx
