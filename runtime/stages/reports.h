// SPDX-License-Identifier: Apache-2.0
// A group's reports get their sentences here, the same ones whether host code or a kernel finds the cause.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "runtime/group_context.h"
#include "runtime/layout/handle_memory.h"
#include "runtime/layout/slices.h"
#include "runtime/status_board.h"

namespace epx {

// A CallName names the call that a report is about.
struct CallName {
  epx_operation operation;
  uint64_t sequence;
};

// ---- Recoverable errors: the group counts them and continues ----

Event bad_index_event(CallName call, int64_t bad, int64_t first_value, int64_t token, int64_t k, int num_experts);

struct Overflow {
  int64_t demand, dropped, rows_needed, zone_stride;
};
Event overflow_event(CallName call, const Overflow& overflow, int rank, int64_t max_recv_tokens);

// recv_rows is N, and in dispatch_rank_major M; rows_in_use is then the largest number of tokens that a rank has for this one.
Event too_few_rows_event(CallName call, int64_t dropped, int64_t recv_rows, int64_t rows_in_use);

// The handle memory of a call must have been prepared for these arguments.
struct HandleUse {
  int32_t top_k;
  int32_t alignment; // effective
  int64_t num_tokens;
  int64_t rows_per_source;
};
// Returns why this rank cannot use the handle memory in this call; "" when it can.
std::string why_unusable(const HandleHeader& header, const HandleUse& use, const GroupContext& context);
// Returns the reason where the header is right and the body's checksum is wrong.
std::string why_body_unusable();
Event unusable_handle_event(CallName call, const std::string& why);
Event plan_mismatch_event(CallName call, uint64_t own_plan, uint64_t their_plan, int mismatched_rank);

// A slice of ragged_all_to_all, as this rank sees it.
struct SeenSlice {
  int64_t slice; // i of its author; where that is a peer, j = slice % (K / P) tells which of its slices to this rank
  bool is_own;   // this rank is its author
  SliceFault fault;
  SliceRecord record;
};
// Those that did not move: how many, and the first.
struct BadSlices {
  int64_t count;
  SeenSlice first;

  void add(const SeenSlice& slice) {
    if (slice.fault != SliceFault::none && count++ == 0) first = slice;
  }
};
Event bad_slices_event(CallName call, const BadSlices& bad, int rank, int64_t slices_per_rank);

// ---- Sticky errors: they end the group ----

// Returns the first agreed field in which the call descriptors of two ranks differ; none when they agree.
std::optional<Failure> find_disagreement(CallName call, const CallDescriptor& first, int first_rank,
                                         const CallDescriptor& other, int other_rank);
// Returns the first agreed field in which the ranks' call descriptors [P] differ; none when they agree. The first descriptor is
// that of first_rank.
std::optional<Failure> find_disagreement(CallName call, std::span<const CallDescriptor> descriptors, int first_rank = 0);

// Reports a call that some ranks capture in a graph and others do not, where rows travel in other sizes then.
Failure capture_failure(CallName call, int capturing_rank, int eager_rank);

// CulpritKernel says what is known of the kernel by which a culprit should have arrived; a call on the host has none.
enum class CulpritKernel { none, unknown, launched };

struct TimeOut {
  epx_phase phase;
  std::vector<int> missing;
  int culprit;
  uint64_t culprit_arrived_at; // the last call that the culprit had reached
  int64_t suspended_ms = 0;    // this process was suspended for so long while it waited, which is not counted
  CulpritKernel kernel = CulpritKernel::none;
};
Failure timeout_failure(CallName call, const TimeOut& timeout, int64_t timeout_ms);

// Reports that a call without a kernel has failed as `why` says, which ends the group. It has no culprit that is known.
Failure host_call_failure(CallName call, epx_status status, const std::string& why);

// Returns the end of such a sentence: why the culprit's kernel, although launched, may not have arrived.
std::string kernel_words(CulpritKernel kernel, int culprit, epx_operation operation);

// Reports that this rank's kernel could not be launched.
Failure launch_failure(CallName call, int rank, const std::string& why);

// Reports the abort record, which is sound, that a peer or this rank itself has stored.
Failure abort_failure(CallName call, const AbortRecord& abort_record, int rank, uint64_t culprit_arrived_at);

// Reports that transfers between nodes have failed in the call `where`, and no rank is to blame: the connection between
// `reporter` and `peer` (-1: a rank that is not known) has broken (SYSTEM), or transfers of `reporter` do not end (TIMEOUT).
Failure network_failure(CallName call, epx_status status, CallName where, int reporter, int peer);

// Reports that `culprit` hangs in the call `where`, in a kernel that waits for no peer. `rank` is this rank.
Failure hang_failure(CallName call, CallName where, int culprit, int rank);

// Reports that `reporter` has ended the group in the call `where`, and no rank is known to be the cause.
Failure end_failure(CallName call, epx_status status, CallName where, int reporter);

// Reports a word in the window of `rank` that no peer can have stored. `what` says which word, and its value.
Failure damage_failure(CallName call, int rank, const std::string& what);
std::string abort_record_damage(uint64_t word);

} // namespace epx
