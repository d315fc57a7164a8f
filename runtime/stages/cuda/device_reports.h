// SPDX-License-Identifier: Apache-2.0
// Reads what kernels have left in the status record, and formats it for the status board.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>

#include "runtime/group_context.h"
#include "runtime/stages/cuda/protocol/device_group.h"
#include "runtime/stages/cuda/rank_board.h"
#include "runtime/stages/reports.h"
#include "runtime/status_board.h"

namespace epx::cuda {

// What the ranks and the calls of a node are in reports. In a group of one node they are the group's.
struct NodeNames {
  int first_rank = 0;                           // of the node, in the group
  std::function<uint64_t(uint64_t)> group_call; // from the sequence number of a node's call; none: the same
  // T of that call of the group; none: of the node's call. A leg has the tokens of one chunk.
  std::function<int64_t(uint64_t)> num_tokens;
  const GroupContext* group = nullptr; // to which indices and handle memory belong; NULL: the reader's
};

// Formats the events and the failure, each once.
class RecordReader {
public:
  RecordReader(const GroupContext& context, StatusRecord& record, RankBoard& board, StatusBoard& status)
      : context_(context), record_(record), board_(board), status_(status) {}

  void set_names(const NodeNames& names) { names_ = names; }
  int name_of_rank(int rank) const { return names_.first_rank + rank; }
  uint64_t name_of_call(uint64_t sequence) const { return names_.group_call ? names_.group_call(sequence) : sequence; }
  AbortRecord named(AbortRecord abort_record) const;

  // Hands new events, and the failure if a kernel or a host has reported one, to the status board. Throws the failure. `call`
  // is the one without a kernel that this rank makes.
  void read(std::optional<CallName> call = {});

private:
  void read_events();
  void tell_peers(const FailureRecord& failure);
  Event format(const EventRecord& event) const;
  Failure format(const FailureRecord& failure) const;
  Failure format_abort(uint64_t word, std::optional<CallName> call) const;
  Failure format_abort_record(const FailureRecord& record, CallName call) const;
  bool is_sound_abort_record(uint64_t word) const;
  CulpritKernel kernel_of(int rank, uint64_t sequence) const;
  const GroupContext& group() const { return names_.group != nullptr ? *names_.group : context_; }

  const GroupContext& context_;
  StatusRecord& record_;
  RankBoard& board_;
  StatusBoard& status_;
  NodeNames names_;
  std::mutex mutex_;
  EventCounts counted_{}; // already handed to the status board
  uint64_t next_event_ = 0;
};

} // namespace epx::cuda
