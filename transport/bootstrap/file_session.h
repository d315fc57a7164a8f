// SPDX-License-Identifier: Apache-2.0
// A file rendezvous and the all-gathers that follow it, of one rank.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/home_process.h"
#include "base/suspension_aware_deadline.h"
#include "transport/bootstrap/file_join.h"
#include "transport/bootstrap/file_liveness.h"
#include "transport/bootstrap/file_messages.h"
#include "transport/bootstrap/rendezvous_directory.h"
#include "transport/bootstrap/rendezvous_names.h"

namespace epx {

// FileSession is one rank's end of a session: a sequence of all-gathers in which rank 0 collects and answers. The first of them
// is the rendezvous itself.
class FileSession {
public:
  using milliseconds = std::chrono::milliseconds;

  FileSession(const std::string& directory, Participant participant);
  ~FileSession();
  FileSession(const FileSession&) = delete;
  FileSession& operator=(const FileSession&) = delete;

  bool is_own_process() const { return creator_.is_here(); }
  void rendezvous(milliseconds timeout);
  void all_gather(const void* send, void* recv, size_t bytes_per_rank, milliseconds timeout);

private:
  // Rank 0 keeps this state of every rank's contribution to the current round.
  enum class Contribution { kAbsent, kPresent, kTaken, kAnswered, kGone };

  std::string run_round(const std::string& mine, milliseconds timeout);
  std::string lead(const std::string& mine, SuspensionAwareDeadline& deadline, JoinServer* join_server);
  void wait_for_contributions(SuspensionAwareDeadline& deadline, JoinServer* join_server,
                              std::vector<Contribution>& contributions);
  void look_for_quitters(const RendezvousDirectory::Names& names, std::vector<Contribution>& contributions);
  std::string take_contributions(const std::string& mine, std::vector<Contribution>& contributions);
  void answer(int rank, epx_status status, const std::string& body);
  void remove_messages() noexcept;
  void report_failure(const StatusError& error, const JoinServer* join_server, std::vector<Contribution>& contributions);
  [[noreturn]] void fail_too_late(const std::string& who_waited, const std::vector<Contribution>& contributions) const;
  [[noreturn]] void fail_incomplete(const std::vector<Contribution>& contributions) const;
  std::string follow(const std::string& mine, SuspensionAwareDeadline& deadline);
  std::optional<Message> hand_in_and_poll(const std::string& mine, SuspensionAwareDeadline& deadline,
                                          bool& rank_0_has_come);
  void report_to_rank_0(const StatusError& error) noexcept;
  std::optional<Message> take_answer() const;
  std::string open_answer(const Message& message, size_t expected_bytes) const;
  std::optional<Message> wait_for_answer(SuspensionAwareDeadline& deadline);
  std::string why_no_answer(bool rank_0_has_come) const;
  void hand_in(const std::string& mine);
  bool is_mine(const Message& message, int rank) const { return message.nonce == session_ && message.rank == rank; }

  std::string in_file(int rank) const { return in_name(round_, rank, session_); }
  std::string quit_file(int rank) const { return quit_name(round_, rank, session_); }
  std::string out_file(int rank) const { return out_name(round_, rank, session_); }
  std::string what() const {
    return round_ == 0 ? fmt::format("job '{}'", participant_.job_id)
                       : fmt::format("job '{}', all-gather {}", participant_.job_id, round_);
  }

  const HomeProcess creator_{};
  Participant participant_;
  RendezvousDirectory directory_;
  Attendance attendance_;
  std::optional<AliveFile> alive_; // empty where this rank is alone
  std::string session_;
  uint64_t round_ = 0;
  milliseconds linger_time_{0};        // for `to_read_`
  std::optional<StatusError> failure_; // that of an earlier round, after which the ranks are no longer in step
  std::set<std::string> to_read_;      // files for other ranks, which may never read them
};

} // namespace epx
