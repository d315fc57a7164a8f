// SPDX-License-Identifier: Apache-2.0
#include "transport/bootstrap/file_session.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/deadline.h"
#include "base/names.h"
#include "base/printable.h"
#include "transport/bootstrap/file_pace.h"
#include "transport/interrupt.h"

namespace epx {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

// epx.h promises that a rank returns within 100 ms + 10 % after its deadline. The rank waits this long for the verdict of rank
// 0, which a live rank 0 gives at once, and a third longer when rank 0 is known to be answering; the rest is left to the
// machine.
milliseconds answer_time(milliseconds timeout) {
  return std::min<milliseconds>(60ms + timeout * 6 / 100, 2s);
}

// After a failure a rank waits this long for the files that report it to be read: rank 0 for its answers and rejections, the
// others for their quit files.
milliseconds linger_time(milliseconds timeout) {
  return std::min<milliseconds>(40ms + timeout / 25, 250ms);
}

// A rank that was interrupted waits no longer than this for rank 0 to tell the others.
constexpr auto kTimeToBeHeard = 100ms;

// No file of a live job but its locked alive files is as old as this: each wait for one ends earlier, as long as jobs of the
// same id use similar timeouts.
std::chrono::seconds leftover_age(milliseconds timeout) {
  constexpr milliseconds kLongest = 365 * 24h; // twice this does not overflow
  return std::max<std::chrono::seconds>(10min, std::chrono::ceil<std::chrono::seconds>(2 * std::min(timeout, kLongest)));
}

std::string who_waited(int rank, const SuspensionAwareDeadline& deadline) {
  return fmt::format("rank {} waited {} ms for the others to come", rank, deadline.timeout().count());
}

std::string who_was_interrupted(int rank) {
  return fmt::format("rank {} was interrupted while it waited for the others to come", rank);
}

} // namespace

FileSession::FileSession(const std::string& directory, Participant participant)
    : participant_(std::move(participant)), directory_(directory, participant_.job_id, participant_.nonce),
      attendance_(directory_) {
  remove_files_of_dead_jobs(directory_);
}

FileSession::~FileSession() {
  try {
    if (failure_ && !to_read_.empty()) {
      // A plain deadline is enough since the session has failed already: a suspension need not prolong this.
      const Deadline deadline(linger_time_);
      for (PollingPace pace = polling_pace(participant_.num_ranks); !deadline.passed(); pace.sleep(deadline)) {
        const RendezvousDirectory::Names names = directory_.list();
        if (std::none_of(to_read_.begin(), to_read_.end(), [&](const auto& file) { return names.contains(file); })) break;
      }
    }
  } catch (...) { // files that cannot be listed can still be removed
  }
  for (const std::string& file : to_read_)
    directory_.remove(file);
  if (!session_.empty()) remove_messages();
  // Another process that claimed this rank may have written its rejection late.
  directory_.remove(reject_name(participant_.rank, participant_.nonce));
  alive_.reset();
  if (directory_.leave()) return;
  remove_files_of_dead_jobs(directory_); // it may be the last live rank that can remove the files of dead ranks of this job
  directory_.leave();
}

// Removes what this rank has written and nobody reads any more, and what others have left for it: a rank that was interrupted
// waits for nobody to read its quit file, nor does rank 0 for its answers.
void FileSession::remove_messages() noexcept {
  if (failure_) directory_.remove(in_file(participant_.rank));
  directory_.remove(out_file(participant_.rank));
  for (int rank = 1; rank < participant_.num_ranks && participant_.rank == 0; ++rank)
    directory_.remove(quit_file(rank));
}

void FileSession::rendezvous(milliseconds timeout) {
  if (participant_.num_ranks == 1) return;
  SuspensionAwareDeadline deadline(timeout);
  linger_time_ = linger_time(timeout);
  try {
    alive_.emplace(directory_, participant_.rank, participant_.num_ranks, participant_.nonce);
    if (participant_.rank == 0) {
      session_ = draw_nonce();
      JoinServer join_server(directory_, participant_, session_);
      lead("", deadline, &join_server);
    } else {
      session_ = join(directory_, participant_, deadline, attendance_);
      follow("", deadline);
    }
    remove_old_files(directory_, alive_->name(), leftover_age(timeout));
  } catch (const StatusError& error) {
    failure_ = error;
    throw;
  }
  ++round_;
}

void FileSession::all_gather(const void* send, void* recv, size_t bytes_per_rank, milliseconds timeout) {
  if (timeout.count() <= 0) fail(EPX_ERROR_INVALID_ARGUMENT, "timeout_ms is {}; it must be > 0", timeout.count());
  if (bytes_per_rank > 0 && (send == nullptr || recv == nullptr))
    fail(EPX_ERROR_INVALID_ARGUMENT, "send or recv is NULL, and bytes_per_rank is {}", bytes_per_rank);
  if (failure_) throw StatusError(*failure_);
  linger_time_ = linger_time(timeout);
  const std::string mine(static_cast<const char*>(send), bytes_per_rank);
  std::string all;
  try {
    all = as_status_error([&] { return run_round(mine, timeout); });
  } catch (const StatusError& error) {
    failure_ = error;
    throw;
  }
  ++round_;
  if (!all.empty()) std::memcpy(recv, all.data(), all.size());
}

std::string FileSession::run_round(const std::string& mine, milliseconds timeout) {
  SuspensionAwareDeadline deadline(timeout);
  if (participant_.num_ranks == 1) return mine;
  if (participant_.rank == 0) return lead(mine, deadline, nullptr);
  return follow(mine, deadline);
}

void FileSession::hand_in(const std::string& mine) {
  write_message(directory_, in_file(participant_.rank),
                {MessageKind::kIn, participant_.rank, participant_.num_ranks, EPX_SUCCESS, session_, mine, {}});
}

// ---- Rank 0 -------------------------------------------------------------------------------------------------------------

std::string FileSession::lead(const std::string& mine, SuspensionAwareDeadline& deadline, JoinServer* join_server) {
  std::vector<Contribution> contributions(static_cast<size_t>(participant_.num_ranks), Contribution::kAbsent);
  std::string all;
  try {
    as_status_error([&] {
      alive_->keep();
      hand_in(""); // ranks that give up see by it that rank 0 has come; nobody reads its data
      contributions[0] = Contribution::kTaken;
      wait_for_contributions(deadline, join_server, contributions);
      if (join_server != nullptr) join_server->close();
      all = take_contributions(mine, contributions);
      for (int rank = 1; rank < participant_.num_ranks; ++rank) {
        answer(rank, EPX_SUCCESS, all);
        contributions[static_cast<size_t>(rank)] = Contribution::kAnswered;
      }
      directory_.remove(in_file(0));
    });
  } catch (const StatusError& error) {
    if (join_server != nullptr) join_server->close();
    report_failure(error, join_server, contributions);
    directory_.remove(in_file(0));
    if (join_server != nullptr) to_read_.insert(join_server->rejections().begin(), join_server->rejections().end());
    throw;
  }
  if (join_server != nullptr) to_read_.insert(join_server->rejections().begin(), join_server->rejections().end());
  return all;
}

void FileSession::wait_for_contributions(SuspensionAwareDeadline& deadline, JoinServer* join_server,
                                         std::vector<Contribution>& contributions) {
  for (PollingPace pace = polling_pace(1);; pace.sleep(deadline)) {
    const bool last_look = deadline.passed();
    const RendezvousDirectory::Names names = directory_.list();
    for (int rank = 1; rank < participant_.num_ranks; ++rank) {
      Contribution& contribution = contributions[static_cast<size_t>(rank)];
      if (names.contains(in_file(rank)))
        contribution = Contribution::kPresent;
      else if (contribution == Contribution::kPresent)
        contribution = Contribution::kGone;
    }
    if (std::find(contributions.begin(), contributions.end(), Contribution::kGone) != contributions.end())
      fail_incomplete(contributions);
    if (std::find(contributions.begin(), contributions.end(), Contribution::kAbsent) == contributions.end()) return;
    look_for_quitters(names, contributions);
    if (join_server != nullptr) join_server->serve(names);
    if (is_interrupted()) fail(EPX_ERROR_ABORTED, "{}: {}", what(), who_was_interrupted(0));
    if (last_look) fail_too_late(who_waited(0, deadline), contributions);
  }
}

// A rank that has given up fails the round for all ranks at once instead of at the deadline of rank 0.
void FileSession::look_for_quitters(const RendezvousDirectory::Names& names, std::vector<Contribution>& contributions) {
  for (int rank = 1; rank < participant_.num_ranks; ++rank) {
    if (!names.contains(quit_file(rank))) continue;
    const std::optional<Message> quit = read_message(directory_, quit_file(rank), MessageKind::kQuit);
    if (!quit || quit->status == EPX_SUCCESS || !is_mine(*quit, rank)) continue;
    Contribution& contribution = contributions[static_cast<size_t>(rank)];
    // A rank whose deadline has passed still waits for the verdict of rank 0, which knows best who is missing.
    if (contribution == Contribution::kPresent && quit->status == EPX_ERROR_TIMEOUT)
      fail_too_late(printable(quit->body.substr(0, quit->body.find(';'))), contributions);
    if (contribution != Contribution::kPresent) { // the rank had left when rank 0 came, or has failed
      if (!directory_.remove(quit_file(rank))) continue;
      contribution = Contribution::kGone;
    }
    throw StatusError(quit->status, fmt::format("{}: {}", what(), printable(quit->body)));
  }
}

// The error names the ranks that never came, not the rank whose deadline passed first.
void FileSession::fail_too_late(const std::string& who_waited, const std::vector<Contribution>& contributions) const {
  std::vector<int> missing;
  for (int rank = 0; rank < participant_.num_ranks; ++rank)
    if (contributions[static_cast<size_t>(rank)] == Contribution::kAbsent) missing.push_back(rank);
  fail(EPX_ERROR_TIMEOUT, "{}: {}; {} of {} never came", what(), who_waited, name_ranks(missing), participant_.num_ranks);
}

// A rank has withdrawn its contribution because rank 0 did not take it before the rank's deadline.
void FileSession::fail_incomplete(const std::vector<Contribution>& contributions) const {
  std::vector<int> missing;
  std::vector<int> gone;
  for (int rank = 0; rank < participant_.num_ranks; ++rank) {
    const Contribution contribution = contributions[static_cast<size_t>(rank)];
    if (contribution == Contribution::kAbsent) missing.push_back(rank);
    if (contribution == Contribution::kGone) gone.push_back(rank);
  }
  if (missing.empty()) fail(EPX_ERROR_TIMEOUT, "{}: {} gave up too soon", what(), name_ranks(gone));
  fail(EPX_ERROR_TIMEOUT, "{}: {} gave up waiting; {} of {} never came", what(), name_ranks(gone), name_ranks(missing),
       participant_.num_ranks);
}

std::string FileSession::take_contributions(const std::string& mine, std::vector<Contribution>& contributions) {
  std::vector<std::string> bodies(contributions.size());
  bodies[0] = mine;
  for (int rank = 1; rank < participant_.num_ranks; ++rank) {
    const std::optional<Message> message = read_message(directory_, in_file(rank), MessageKind::kIn, SIZE_MAX);
    if (message && is_mine(*message, rank)) bodies[static_cast<size_t>(rank)] = message->body;
    // The removal decides: a rank that finds its contribution removed knows that rank 0 will answer.
    const bool taken = directory_.remove(in_file(rank));
    contributions[static_cast<size_t>(rank)] = taken ? Contribution::kTaken : Contribution::kGone;
    if (taken && (!message || !is_mine(*message, rank)))
      fail(EPX_ERROR_SYSTEM, "{}: the file of rank {} is damaged", what(), rank);
  }
  if (std::find(contributions.begin(), contributions.end(), Contribution::kGone) != contributions.end())
    fail_incomplete(contributions);
  std::string all;
  for (int rank = 0; rank < participant_.num_ranks; ++rank) {
    const std::string& body = bodies[static_cast<size_t>(rank)];
    if (body.size() != mine.size())
      fail(EPX_ERROR_MISMATCH, "{}: rank 0 passes {} bytes per rank, and rank {} passes {}", what(), mine.size(), rank,
           body.size());
    all += body;
  }
  return all;
}

void FileSession::answer(int rank, epx_status status, const std::string& body) {
  write_message(directory_, out_file(rank), {MessageKind::kOut, rank, participant_.num_ranks, status, session_, body, {}});
}

// Reports the failure to every rank that knows the session and has not given up, also to late ones, which may come yet.
void FileSession::report_failure(const StatusError& error, const JoinServer* join_server,
                                 std::vector<Contribution>& contributions) {
  directory_.release_spare();
  for (int rank = 1; rank < participant_.num_ranks; ++rank) {
    Contribution& contribution = contributions[static_cast<size_t>(rank)];
    if (contribution == Contribution::kAbsent && join_server != nullptr && !join_server->joined(rank)) continue;
    if (contribution == Contribution::kPresent)
      contribution = directory_.remove(in_file(rank)) ? Contribution::kTaken : Contribution::kGone;
    if (contribution == Contribution::kGone || contribution == Contribution::kAnswered) continue;
    // After an interrupt the answer stays: the rank may come long afterwards, and removes it in any case.
    const bool stays = error.status() == EPX_ERROR_ABORTED && round_ > 0;
    if (contribution == Contribution::kAbsent && !stays) to_read_.insert({in_file(rank), out_file(rank)});
    try {
      answer(rank, error.status(), error.message());
    } catch (const StatusError&) { // then that rank fails by its own deadline
    }
  }
}

// ---- The other ranks ----------------------------------------------------------------------------------------------------

std::optional<Message> FileSession::take_answer() const {
  std::optional<std::string> bytes = directory_.read(out_file(participant_.rank), SIZE_MAX);
  if (!bytes) return std::nullopt;
  directory_.remove(out_file(participant_.rank));
  std::optional<Message> message = decode(*bytes, MessageKind::kOut);
  if (!message || !is_mine(*message, participant_.rank))
    fail(EPX_ERROR_SYSTEM, "{}: the file from rank 0 is damaged", what());
  return message;
}

// Returns no message when rank 0 has not answered by the deadline or an interrupt.
std::optional<Message> FileSession::hand_in_and_poll(const std::string& mine, SuspensionAwareDeadline& deadline,
                                                     bool& rank_0_has_come) {
  alive_->keep();
  hand_in(mine);
  Every look_around(listing_interval(participant_.num_ranks));
  for (PollingPace pace = polling_pace(participant_.num_ranks);; pace.sleep(deadline, is_interrupted)) {
    const bool last_look = deadline.passed();
    if (round_ == 0 && (look_around.due() || last_look))
      attendance_.note(directory_.list());
    else
      directory_.refresh();
    if (!rank_0_has_come) rank_0_has_come = directory_.contains(in_file(0));
    std::optional<Message> message = take_answer();
    if (message || last_look || is_interrupted()) return message;
  }
}

// Reports the failure of this rank. Where rank 0 has taken the rank's data of this round already, it is in the next one.
void FileSession::report_to_rank_0(const StatusError& error) noexcept {
  directory_.release_spare();
  try {
    for (const uint64_t round : {round_, round_ + 1}) {
      const std::string file = quit_name(round, participant_.rank, session_);
      to_read_.insert(file);
      write_message(directory_, file,
                    {MessageKind::kQuit,
                     participant_.rank,
                     participant_.num_ranks,
                     error.status(),
                     session_,
                     fmt::format("rank {}: {}", participant_.rank, error.message()),
                     {}});
    }
  } catch (...) { // the others find out by their timeout
  }
}

std::string FileSession::follow(const std::string& mine, SuspensionAwareDeadline& deadline) {
  const size_t answer_bytes = mine.size() * static_cast<size_t>(participant_.num_ranks);
  bool rank_0_has_come = round_ == 0; // rank 0 has welcomed this rank
  std::optional<Message> first_answer;
  try {
    first_answer = as_status_error([&] { return hand_in_and_poll(mine, deadline, rank_0_has_come); });
  } catch (const StatusError& error) {
    report_to_rank_0(error);
    throw;
  }
  if (first_answer) return open_answer(*first_answer, answer_bytes);
  const bool was_interrupted = is_interrupted();

  // Only rank 0 knows who has come to this round: if it lives, it decides now. If it does not, it is the rank to name,
  // whatever files there are: a rank that waits for it may be a round behind, or may not have joined yet.
  const epx_status status = was_interrupted ? EPX_ERROR_ABORTED : EPX_ERROR_TIMEOUT;
  const std::string why =
      was_interrupted ? who_was_interrupted(participant_.rank)
                      : fmt::format("{}; {}", who_waited(participant_.rank, deadline), why_no_answer(rank_0_has_come));
  try {
    write_message(directory_, quit_file(participant_.rank),
                  {MessageKind::kQuit, participant_.rank, participant_.num_ranks, status, session_, why, {}});
  } catch (const StatusError&) { // rank 0 will see that the contribution has been removed
  }
  const milliseconds answer = answer_time(deadline.timeout());
  SuspensionAwareDeadline decision =
      was_interrupted ? SuspensionAwareDeadline(kTimeToBeHeard) : deadline.with_grace(answer);
  if (const std::optional<Message> message = wait_for_answer(decision)) return open_answer(*message, answer_bytes);
  if (directory_.remove(in_file(participant_.rank))) {
    if (was_interrupted) fail(status, "{}: {}", what(), why); // the quit file stays until rank 0 has read it
    if (round_ == 0)
      directory_.remove(quit_file(participant_.rank));
    else
      to_read_.insert(quit_file(participant_.rank)); // rank 0 may come yet and read it
    fail(status, "{}: {}", what(), why);
  }

  // Rank 0 has taken this rank's contribution at the last moment and is about to answer; only its death can prevent that.
  // The later deadline continues from the polls of `decision`: time since an older poll would look like a suspension.
  SuspensionAwareDeadline delivery = decision.with_grace(answer / 3);
  if (const std::optional<Message> message = wait_for_answer(delivery)) return open_answer(*message, answer_bytes);
  directory_.remove(quit_file(participant_.rank));
  fail(EPX_ERROR_TIMEOUT, "{}: rank 0 took the data of rank {} and never answered", what(), participant_.rank);
}

std::optional<Message> FileSession::wait_for_answer(SuspensionAwareDeadline& deadline) {
  for (PollingPace pace = polling_pace(participant_.num_ranks);; pace.sleep(deadline)) {
    const bool last_look = deadline.passed();
    directory_.refresh();
    std::optional<Message> message = take_answer();
    if (message || last_look) return message;
  }
}

std::string FileSession::why_no_answer(bool rank_0_has_come) const {
  std::vector<int> missing;
  if (!rank_0_has_come) missing.push_back(0);
  const bool rank_0_lives = rank_0_has_come && attendance_.lives(0);
  for (int rank = 1; rank < participant_.num_ranks; ++rank) {
    if (rank == participant_.rank) continue;
    // In later rounds every rank has come once. A slow rank 0 may not have told yet which one has died since.
    const bool is_missing = round_ == 0 ? !attendance_.has_come(rank) : rank_0_lives && !attendance_.lives(rank);
    if (is_missing) missing.push_back(rank);
  }
  std::string never_came = fmt::format("{} of {} never came", name_ranks(missing), participant_.num_ranks);
  if (!rank_0_has_come || (!missing.empty() && rank_0_lives)) return never_came; // a slow rank 0 is not to blame
  const std::string silent = fmt::format("rank 0 of {} came and does not answer any more", participant_.num_ranks);
  return missing.empty() ? silent : silent + ", and " + never_came;
}

std::string FileSession::open_answer(const Message& message, size_t expected_bytes) const {
  directory_.remove(in_file(participant_.rank)); // it is still there when rank 0 failed before it saw it
  directory_.remove(quit_file(participant_.rank));
  if (message.status != EPX_SUCCESS) throw StatusError(message.status, printable(message.body));
  if (message.body.size() != expected_bytes)
    fail(EPX_ERROR_SYSTEM, "{}: rank 0 answered with {} bytes instead of {}", what(), message.body.size(), expected_bytes);
  return message.body;
}

} // namespace epx
