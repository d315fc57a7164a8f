// SPDX-License-Identifier: Apache-2.0
#include "transport/control/culprit.h"

#include <unordered_map>

namespace epx {

const char* describe(Cause cause) {
  switch (cause) {
  case Cause::died:
    return "has died";
  case Cause::silent:
    return "sends no heartbeats any more";
  case Cause::late:
    return "has come too late";
  case Cause::failed:
    return "has ended the group";
  case Cause::hangs:
    return "hangs in a kernel that waits for no peer";
  case Cause::network:
    return "has found that the network between the nodes has failed";
  case Cause::out_of_sequence:
    return "makes another call";
  }
  return "has failed for an unknown cause";
}

std::optional<Verdict> find_culprit(std::span<const RankState> states, const WaitReport& report,
                                    std::chrono::milliseconds min_silence) {
  const auto num_ranks = static_cast<int>(states.size());
  const auto state_of = [&](int rank) -> const RankState& { return states[static_cast<size_t>(rank)]; };
  const auto may_be_late = [&](const RankState& state) {
    if (report.kind == ReportKind::connection) return state.has_left;
    return report.kind == ReportKind::last || report.missing >= 0 || !state.is_in_call;
  };
  int silent = -1;
  int least_far = -1;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (rank == report.rank) continue;
    const RankState& state = state_of(rank);
    if (state.has_died) return Verdict{rank, Cause::died, report.operation, report.sequence};
    if (!state.has_left && state.silence > min_silence && (silent < 0 || state.silence > state_of(silent).silence))
      silent = rank;
    if (may_be_late(state) && (least_far < 0 || state.sequence < state_of(least_far).sequence)) least_far = rank;
  }
  if (silent >= 0) return Verdict{silent, Cause::silent, report.operation, report.sequence};
  if (least_far >= 0 && state_of(least_far).sequence < report.sequence)
    return Verdict{least_far, Cause::late, report.operation, report.sequence};
  if (report.missing < 0 || report.kind != ReportKind::timeout) return std::nullopt;
  return Verdict{report.missing, Cause::late, report.operation, report.sequence}; // it has come, and hangs within the call
}

Verdict blame_network(const WaitReport& report) {
  const epx_status status = report.kind == ReportKind::connection ? EPX_ERROR_SYSTEM : EPX_ERROR_TIMEOUT;
  return {-1, Cause::network, report.operation, report.sequence, status, report.rank, report.missing};
}

std::optional<Verdict> find_other_operation(std::span<const RankState> states) {
  std::unordered_map<uint64_t, int> first_ranks; // by the call that they have begun
  for (int rank = 0; rank < static_cast<int>(states.size()); ++rank) {
    const RankState& state = states[static_cast<size_t>(rank)];
    if (state.operation == EPX_OP_NONE) continue;
    const int first = first_ranks.try_emplace(state.sequence, rank).first->second;
    const epx_operation operation = states[static_cast<size_t>(first)].operation;
    if (operation == state.operation) continue;
    return Verdict{-1,   Cause::out_of_sequence, operation, state.sequence, EPX_ERROR_OUT_OF_SEQUENCE, first,
                   rank, state.operation};
  }
  return std::nullopt;
}

} // namespace epx
