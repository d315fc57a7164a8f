// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/reports.h"

#include <array>
#include <bit>

#include <fmt/format.h>

#include "base/names.h"

namespace epx {
namespace {

// Ranks must agree on these fields of a call; `format` formats a value for messages.
struct CallField {
  const char* name;
  int64_t (*value)(const CallDescriptor&);
  std::string (*format)(int64_t value) = [](int64_t value) { return std::to_string(value); };
};

std::string format_dtype(int64_t value) {
  return name_of(static_cast<epx_dtype>(value));
}

std::string format_weights(int64_t value) {
  if (value == 0) return "none";
  if (value == 1) return "weights";
  return value == 2 ? "weight gradients" : "weights and weight gradients";
}

std::string format_row_spacing(int64_t value) {
  return value == EPX_ROWS_COMPACT ? "EPX_ROWS_COMPACT" : "EPX_ROWS_STRIDED";
}

std::string format_direction(int64_t value) {
  return value == EPX_SLICES_TRANSPOSED ? "EPX_SLICES_TRANSPOSED" : "EPX_SLICES_FORWARD";
}

constexpr bool has_slices(const CallDescriptor& descriptor) {
  return descriptor.operation == EPX_OP_RAGGED_ALL_TO_ALL;
}

constexpr bool makes_zones(const CallDescriptor& descriptor) {
  return descriptor.operation == EPX_OP_PREPARE || descriptor.operation == EPX_OP_PREPARE_DISPATCH;
}

constexpr std::array kCallFields = {
    CallField{"K, the number of slices,",
              [](const CallDescriptor& descriptor) -> int64_t { return has_slices(descriptor) ? descriptor.subject : 0; }},
    CallField{"the number of bytes of a row",
              [](const CallDescriptor& descriptor) -> int64_t { return has_slices(descriptor) ? descriptor.hidden : 0; }},
    CallField{
        "direction",
        [](const CallDescriptor& descriptor) -> int64_t { return has_slices(descriptor) ? descriptor.row_spacing : 0; },
        format_direction},
    CallField{"top_k", [](const CallDescriptor& descriptor) -> int64_t { return descriptor.top_k; }},
    CallField{"alignment", [](const CallDescriptor& descriptor) -> int64_t { return descriptor.alignment; }},
    CallField{"hidden size",
              [](const CallDescriptor& descriptor) -> int64_t { return has_slices(descriptor) ? 0 : descriptor.hidden; }},
    CallField{"dtype", [](const CallDescriptor& descriptor) -> int64_t { return descriptor.dtype; }, format_dtype},
    CallField{"dtype of the receive rows",
              [](const CallDescriptor& descriptor) -> int64_t { return descriptor.recv_dtype; }, format_dtype},
    CallField{"format.scaling", [](const CallDescriptor& descriptor) -> int64_t { return descriptor.scaling; },
              [](int64_t value) { return std::string(name_of(static_cast<epx_scaling>(value))); }},
    CallField{"format.dtype", [](const CallDescriptor& descriptor) -> int64_t { return descriptor.element_dtype; },
              format_dtype},
    CallField{"dtype of the scales", [](const CallDescriptor& descriptor) -> int64_t { return descriptor.scale_dtype; },
              format_dtype},
    CallField{"format.amax_floor", [](const CallDescriptor& descriptor) -> int64_t { return descriptor.amax_floor; },
              [](int64_t value) { return fmt::format("{}", std::bit_cast<float>(static_cast<uint32_t>(value))); }},
    CallField{"choice of weights", [](const CallDescriptor& descriptor) -> int64_t { return descriptor.weights; },
              format_weights},
    CallField{"sidecar_row_bytes", [](const CallDescriptor& descriptor) -> int64_t { return descriptor.sidecar_bytes; }},
    CallField{"zone_stride",
              [](const CallDescriptor& descriptor) -> int64_t { return makes_zones(descriptor) ? descriptor.subject : 0; }},
    CallField{"M, the rows for each source rank,",
              [](const CallDescriptor& descriptor) -> int64_t {
                return makes_zones(descriptor) || has_slices(descriptor) ? 0 : descriptor.subject;
              }},
    CallField{
        "row_spacing",
        [](const CallDescriptor& descriptor) -> int64_t { return has_slices(descriptor) ? 0 : descriptor.row_spacing; },
        format_row_spacing},
};

// Returns "dispatch (call 7)"; "dispatch" where the host does not know the number.
std::string format(CallName call) {
  if (call.sequence == 0) return name_of(call.operation);
  return fmt::format("{} (call {})", name_of(call.operation), call.sequence);
}

Failure failure_of(CallName call, epx_status status) {
  Failure failure;
  failure.status = status;
  failure.operation = call.operation;
  failure.sequence = call.sequence;
  return failure;
}

} // namespace

Event bad_index_event(CallName call, int64_t bad, int64_t first_value, int64_t token, int64_t k, int num_experts) {
  return {EPX_EVENT_BAD_INDEX, call.operation, call.sequence, static_cast<uint64_t>(bad),
          fmt::format("{}: {} bad entries in topk_idx, the first is {} at token {}, k {}; indices are -1 or 0..{}; these "
                      "routes were treated as masked",
                      format(call), bad, first_value, token, k, num_experts - 1)};
}

Event overflow_event(CallName call, const Overflow& overflow, int rank, int64_t max_recv_tokens) {
  const std::string why =
      overflow.zone_stride > 0
          ? fmt::format("an expert of this rank has more routes than zone_stride, {}", overflow.zone_stride)
          : fmt::format("{} rows would be needed, max_recv_tokens_per_rank is {}", overflow.rows_needed, max_recv_tokens);
  return {EPX_EVENT_OVERFLOW, call.operation, call.sequence, static_cast<uint64_t>(overflow.dropped),
          fmt::format("{}: {} of {} routes to this rank, {}, were dropped: {}", format(call), overflow.dropped,
                      overflow.demand, rank, why)};
}

Event too_few_rows_event(CallName call, int64_t dropped, int64_t recv_rows, int64_t rows_in_use) {
  if (call.operation == EPX_OP_DISPATCH_RANK_MAJOR)
    return {EPX_EVENT_TOO_FEW_ROWS, call.operation, call.sequence, static_cast<uint64_t>(dropped),
            fmt::format(
                "{}: the receive tensors have M = {} rows for each rank, and one has {} tokens for this rank: {} routes "
                "were dropped",
                format(call), recv_rows, rows_in_use, dropped)};
  return {EPX_EVENT_TOO_FEW_ROWS, call.operation, call.sequence, static_cast<uint64_t>(dropped),
          fmt::format("{}: the receive tensors have {} rows, {} are in use: {} routes were dropped", format(call),
                      recv_rows, rows_in_use, dropped)};
}

Event bad_slices_event(CallName call, const BadSlices& bad, int rank, int64_t slices_per_rank) {
  const SeenSlice& first = bad.first;
  const SliceRecord& record = first.record;
  const auto peer = static_cast<int>(first.slice / slices_per_rank);
  const std::string name = first.is_own ? fmt::format("slice {}, which goes to rank {},", first.slice, peer)
                                        : fmt::format("slice {} of rank {}, which goes to this rank,",
                                                      rank * slices_per_rank + first.slice % slices_per_rank, peer);
  const auto size = [](int32_t told) { return told < 0 ? std::string("no number of rows") : fmt::format("{} rows", told); };
  std::string why;
  switch (first.fault) {
  case SliceFault::leaves_author:
    why = first.is_own ? "leaves this rank's tensor, with its entries of send_sizes and input_offsets"
                       : "leaves that rank's tensor";
    break;
  case SliceFault::leaves_peer:
    why = fmt::format("leaves the tensor of {}: it has {}, and {}",
                      first.is_own ? fmt::format("rank {}", peer) : std::string("this rank"), size(record.size),
                      record.output_offset == kNoOffset ? std::string("its entry of output_offsets is no row")
                                                        : fmt::format("begins at row {}", record.output_offset));
    break;
  default:
    why = fmt::format("has {} in send_sizes and {} in recv_sizes of {}", size(record.size), size(record.recv_size),
                      first.is_own ? fmt::format("rank {}", peer) : std::string("this rank"));
    break;
  }
  return {
      EPX_EVENT_BAD_SLICE, call.operation, call.sequence, static_cast<uint64_t>(bad.count),
      fmt::format("{}: {} slices from or to this rank did not move; the first, {} {}", format(call), bad.count, name, why)};
}

std::string why_unusable(const HandleHeader& header, const HandleUse& use, const GroupContext& context) {
  if (header.magic != kHandleMagic)
    return fmt::format("the handle memory was not filled in by {}",
                       use.rows_per_source == kExpertMajor ? "epx_prepare" : "epx_dispatch_rank_major");
  const char* const damaged = "the header of the handle memory is damaged";
  if (header.checksum != header_checksum(header)) return damaged;
  if (header.group_id != context.group_id)
    return fmt::format("the handle memory belongs to group {:016x}, this group is {:016x}", header.group_id,
                       context.group_id);
  if (header.rank != context.rank)
    return fmt::format("the handle memory belongs to rank {}, this is rank {}", header.rank, context.rank);
  if ((header.rows_per_source == kExpertMajor) != (use.rows_per_source == kExpertMajor))
    return header.rows_per_source == kExpertMajor
               ? "the handle memory was filled in by epx_prepare, not by epx_dispatch_rank_major"
               : "the handle memory was filled in by epx_dispatch_rank_major, not by epx_prepare";
  if (header.rows_per_source != use.rows_per_source)
    return fmt::format("the handle memory was filled in with M = {}, the call passes M = {}", header.rows_per_source,
                       use.rows_per_source);
  if (header.top_k != use.top_k || header.alignment != use.alignment)
    return fmt::format(
        "the handle memory was prepared for top_k {} and alignment {}, the call passes top_k {} and alignment {}",
        header.top_k, header.alignment, use.top_k, use.alignment);
  if (header.num_tokens != use.num_tokens)
    return fmt::format("the handle memory was prepared for {} tokens, the call passes {}", header.num_tokens,
                       use.num_tokens);
  if (!counts_fit(header, context.shape, context.layout.ll_tokens)) return damaged;
  return "";
}

std::string why_body_unusable() {
  return "the handle memory is damaged: what is behind its header is not what prepare stored there";
}

Event unusable_handle_event(CallName call, const std::string& why) {
  return {EPX_EVENT_HANDLE_MISMATCH, call.operation, call.sequence, 1,
          fmt::format("{}: {}; this rank took part without routes", format(call), why)};
}

Event plan_mismatch_event(CallName call, uint64_t own_plan, uint64_t their_plan, int mismatched_rank) {
  return {
      EPX_EVENT_HANDLE_MISMATCH, call.operation, call.sequence, 1,
      fmt::format("{}: the handle memory was prepared in call {} here and in call {} on rank {}; routes between such ranks "
                  "were dropped",
                  format(call), own_plan, their_plan, mismatched_rank)};
}

std::optional<Failure> find_disagreement(CallName call, const CallDescriptor& first, int first_rank,
                                         const CallDescriptor& other, int other_rank) {
  Failure failure = failure_of(call, EPX_ERROR_OUT_OF_SEQUENCE);
  if (other.operation != first.operation) {
    failure.message =
        fmt::format("call {} is {} on rank {} and {} on rank {}: all ranks must make the same calls in the same order",
                    call.sequence, name_of(static_cast<epx_operation>(first.operation)), first_rank,
                    name_of(static_cast<epx_operation>(other.operation)), other_rank);
    return failure;
  }
  if (other.subject != first.subject && first.operation == EPX_OP_MEM_FREE) {
    failure.message = fmt::format("{}: rank {} frees its allocation number {}, rank {} number {}", format(call), first_rank,
                                  first.subject, other_rank, other.subject);
    return failure;
  }
  for (const CallField& field : kCallFields) {
    if (field.value(other) == field.value(first)) continue;
    failure.status = EPX_ERROR_MISMATCH;
    failure.message =
        fmt::format("{}: {} differs between ranks: rank {} passes {}, rank {} passes {}", format(call), field.name,
                    first_rank, field.format(field.value(first)), other_rank, field.format(field.value(other)));
    return failure;
  }
  return std::nullopt;
}

std::optional<Failure> find_disagreement(CallName call, std::span<const CallDescriptor> descriptors, int first_rank) {
  for (size_t i = 1; i < descriptors.size(); ++i)
    if (auto failure =
            find_disagreement(call, descriptors.front(), first_rank, descriptors[i], first_rank + static_cast<int>(i)))
      return failure;
  return std::nullopt;
}

Failure capture_failure(CallName call, int capturing_rank, int eager_rank) {
  Failure failure = failure_of(call, EPX_ERROR_MISMATCH);
  failure.message =
      fmt::format("{}: rank {} captures it in a CUDA graph, and rank {} does not: in a group of several nodes "
                  "all ranks capture a call, or none",
                  format(call), capturing_rank, eager_rank);
  return failure;
}

Failure timeout_failure(CallName call, const TimeOut& timeout, int64_t timeout_ms) {
  Failure failure = failure_of(call, EPX_ERROR_TIMEOUT);
  failure.phase = timeout.phase;
  failure.missing = timeout.missing;
  failure.culprit = timeout.culprit;
  failure.expected = call.sequence;
  failure.seen = timeout.culprit_arrived_at;
  failure.message = fmt::format(
      "{} timed out after {} ms in phase {}: waited for {}; rank {} is the cause, the last call it arrived at is {}",
      format(call), timeout_ms, name_of(timeout.phase), name_ranks(timeout.missing), timeout.culprit,
      timeout.culprit_arrived_at);
  if (timeout.suspended_ms > 0)
    failure.message +=
        fmt::format("; this process was suspended for {} ms meanwhile, which do not count", timeout.suspended_ms);
  if (timeout.phase == EPX_PHASE_ARRIVE) // the culprit may have arrived since
    failure.message += kernel_words(timeout.kernel, timeout.culprit, call.operation);
  return failure;
}

Failure host_call_failure(CallName call, epx_status status, const std::string& why) {
  Failure failure = failure_of(call, status);
  failure.phase = status == EPX_ERROR_TIMEOUT ? EPX_PHASE_ARRIVE : EPX_PHASE_NONE;
  failure.message =
      status == EPX_ERROR_OUT_OF_SEQUENCE ? why : fmt::format("{}: {}, which ends the group", format(call), why);
  return failure;
}

std::string kernel_words(CulpritKernel kernel, int culprit, epx_operation operation) {
  constexpr const char* kHeld =
      "kernels of other libraries that wait for peers may hold its SMs (see \"Beside other kernels\" "
      "in docs/api.md)";
  switch (kernel) {
  case CulpritKernel::none:
    break;
  case CulpritKernel::unknown:
    return fmt::format("; if rank {} launched its kernel of {} in time, a possible cause is that it could not begin: {}",
                       culprit, name_of(operation), kHeld);
  case CulpritKernel::launched:
    return fmt::format("; rank {} launched its kernel of {}, but it never began: {}", culprit, name_of(operation), kHeld);
  }
  return "";
}

Failure launch_failure(CallName call, int rank, const std::string& why) {
  Failure failure = failure_of(call, EPX_ERROR_SYSTEM);
  failure.culprit = rank;
  failure.message = fmt::format("{}: the kernel of this rank, {}, could not be launched, which ends the group: {}",
                                format(call), rank, why);
  return failure;
}

Failure abort_failure(CallName call, const AbortRecord& abort_record, int rank, uint64_t culprit_arrived_at) {
  Failure failure = failure_of(call, abort_record.status);
  failure.culprit = abort_record.culprit;
  const bool is_self = abort_record.culprit == rank;
  const std::string who = is_self ? "this rank" : fmt::format("rank {}", abort_record.culprit);
  const std::string where = format({abort_record.operation, abort_record.sequence});
  if (abort_record.status == EPX_ERROR_ABORTED) {
    const std::string what = abort_record.operation == EPX_OP_NONE ? "aborted the group"
                             : is_self                             ? "was interrupted while it waited for its peers"
                                                                   : fmt::format("was interrupted in {}", where);
    failure.message = fmt::format("{}{} {}", call.operation == EPX_OP_NONE ? "" : format(call) + ": ", // in no call
                                  who, what);
  } else if (abort_record.status == EPX_ERROR_INTERNAL) {
    failure.message = fmt::format("{}: rank {} found in {} that the control words of its window are damaged", format(call),
                                  abort_record.culprit, where);
  } else if (abort_record.status == EPX_ERROR_SYSTEM) {
    failure.message = fmt::format("{}: {} could not launch its kernel of {}", format(call), who, where);
  } else if (abort_record.status == EPX_ERROR_OUT_OF_SEQUENCE) {
    failure.message = fmt::format(
        "{}: two calls of this group overlapped on the device of {}: {} began while another one was in progress; "
        "the calls of a CUDA graph are ordered by the caller: order them by stream or event",
        format(call), who, where);
  } else if (abort_record.operation == EPX_OP_NONE && is_self) {
    failure.message = fmt::format(
        "{}: this rank, {}, was taken for dead: its control connection ended or brought no heartbeats", format(call), rank);
  } else if (abort_record.operation == EPX_OP_NONE) {
    failure.message = fmt::format(
        "{}: rank {} has died or is stopped: its control connection ended or brings no heartbeats; its last call "
        "was {}",
        format(call), abort_record.culprit, abort_record.sequence);
  } else if (is_self) {
    failure.message =
        fmt::format("{}: this rank, {}, came too late: its peers gave up waiting for it in {}", format(call), rank, where);
  } else {
    failure.message =
        fmt::format("{}: a peer gave up waiting for rank {} in {}", format(call), abort_record.culprit, where);
  }
  failure.expected = abort_record.sequence;
  failure.seen = culprit_arrived_at;
  return failure;
}

Failure network_failure(CallName call, epx_status status, CallName where, int reporter, int peer) {
  Failure failure = failure_of(call, status);
  const std::string other = peer >= 0 ? fmt::format("rank {}", peer) : "a rank of another node";
  failure.message =
      status == EPX_ERROR_SYSTEM
          ? fmt::format("{}: the connection between rank {} and {} broke in {}, and no rank is known to have died: the "
                        "network between the nodes has failed",
                        format(call), reporter, other, format(where))
          : fmt::format(
                "{}: transfers between rank {} and other nodes do not end in {}, though all ranks have made that call: "
                "the network between the nodes may have failed",
                format(call), reporter, format(where));
  return failure;
}

Failure hang_failure(CallName call, CallName where, int culprit, int rank) {
  Failure failure = failure_of(call, EPX_ERROR_TIMEOUT);
  failure.culprit = culprit;
  failure.message =
      fmt::format("{}: {} hangs in {}, in a kernel that waits for no peer", format(call),
                  culprit == rank ? fmt::format("this rank, {},", rank) : fmt::format("rank {}", culprit), format(where));
  failure.expected = where.sequence;
  return failure;
}

Failure end_failure(CallName call, epx_status status, CallName where, int reporter) {
  Failure failure = failure_of(call, status);
  failure.message =
      fmt::format("{}: rank {} has ended the group with {} in {}, as its own report says; no rank is known to be "
                  "the cause",
                  format(call), reporter, name_of(status), format(where));
  return failure;
}

Failure damage_failure(CallName call, int rank, const std::string& what) {
  Failure failure = failure_of(call, EPX_ERROR_INTERNAL);
  failure.culprit = rank;
  failure.message =
      fmt::format("{}: the control words of the window of rank {} are damaged: {}; something else has written "
                  "to the group's shared memory",
                  format(call), rank, what);
  return failure;
}

std::string abort_record_damage(uint64_t word) {
  const AbortRecord abort_record = unpack_abort_record(word);
  return fmt::format("its abort record {:#018x} says status {}, operation {}, rank {}", word, name_of(abort_record.status),
                     name_of(abort_record.operation), abort_record.culprit);
}

} // namespace epx
