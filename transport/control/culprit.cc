// SPDX-License-Identifier: Apache-2.0
#include "transport/control/culprit.h"

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
  }
  return "has failed for an unknown cause";
}

std::optional<Verdict> find_culprit(std::span<const RankState> states, const TimeoutReport& report,
                                    std::chrono::milliseconds min_silence) {
  const auto num_ranks = static_cast<int>(states.size());
  const auto state_of = [&](int rank) -> const RankState& { return states[static_cast<size_t>(rank)]; };
  int silent = -1;
  int least_far = -1;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (rank == report.rank) continue;
    const RankState& state = state_of(rank);
    if (state.has_died) return Verdict{rank, Cause::died, report.operation, report.sequence};
    if (!state.has_left && state.silence > min_silence && (silent < 0 || state.silence > state_of(silent).silence))
      silent = rank;
    const bool may_be_late = report.missing >= 0 || !state.is_in_call;
    if (may_be_late && (least_far < 0 || state.sequence < state_of(least_far).sequence)) least_far = rank;
  }
  if (silent >= 0) return Verdict{silent, Cause::silent, report.operation, report.sequence};
  const bool all_have_come = least_far < 0 || state_of(least_far).sequence >= report.sequence;
  if (all_have_come && report.missing < 0) return std::nullopt;
  return Verdict{all_have_come ? report.missing : least_far, Cause::late, report.operation, report.sequence};
}

} // namespace epx
