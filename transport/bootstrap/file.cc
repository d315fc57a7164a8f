#include "transport/bootstrap/file.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/home_process.h"
#include "base/names.h"
#include "base/suspension_aware_deadline.h"
#include "transport/bootstrap/bootstrap_callback.h"
#include "transport/bootstrap/file_join.h"
#include "transport/bootstrap/file_liveness.h"
#include "transport/bootstrap/file_messages.h"
#include "transport/bootstrap/rendezvous_directory.h"
#include "transport/bootstrap/rendezvous_names.h"

namespace epx {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

constexpr auto kFirstSleep = 200us;
constexpr auto kLongestSleep = 5ms;

// epx.h promises that a rank returns within 100 ms + 10 % after its deadline. It waits this long for the verdict of rank 0, which
// comes at once from one that lives, and a third longer when rank 0 is known to be at it; the rest is left to the machine.
milliseconds answer_time(milliseconds timeout) {
  return std::min<milliseconds>(60ms + timeout * 6 / 100, 2s);
}

// How long rank 0 waits for bad news to be read before it clears it away.
milliseconds linger_time(milliseconds timeout) {
  return std::min<milliseconds>(40ms + timeout / 25, 250ms);
}

// No file of a live job is as old as this: each wait for one ends earlier, as long as jobs of the same id are run alike.
std::chrono::seconds leftover_age(milliseconds timeout) {
  constexpr milliseconds kLongest = 365 * 24h; // doubles without overflow
  return std::max<std::chrono::seconds>(10min, std::chrono::ceil<std::chrono::seconds>(2 * std::min(timeout, kLongest)));
}

std::string who_waited(int rank, const SuspensionAwareDeadline& deadline) {
  return fmt::format("rank {} waited {} ms for the others to come", rank, deadline.timeout().count());
}

// One rank's end of a session: a row of all-gathers in which rank 0 collects and answers. The first is the meeting itself.
class FileSession {
public:
  FileSession(const std::string& directory, Participant participant);
  ~FileSession();
  FileSession(const FileSession&) = delete;
  FileSession& operator=(const FileSession&) = delete;

  bool is_own_process() const { return creator_.is_here(); }
  void meet(milliseconds timeout);
  void all_gather(const void* send, void* recv, size_t bytes_per_rank, milliseconds timeout);

private:
  // How far a rank's part of this round has come, as rank 0 sees it.
  enum class Part { kAbsent, kPresent, kTaken, kAnswered, kGone };

  std::string run_round(const std::string& mine, milliseconds timeout);
  std::string lead(const std::string& mine, SuspensionAwareDeadline& deadline, JoinServer* join_server);
  void wait_for_parts(SuspensionAwareDeadline& deadline, JoinServer* join_server, std::vector<Part>& parts);
  void look_for_quitters(const RendezvousDirectory::Names& names, std::vector<Part>& parts);
  std::string take_parts(const std::string& mine, std::vector<Part>& parts);
  void answer(int rank, epx_status status, const std::string& body);
  void report_failure(const Error& error, const JoinServer* join_server, std::vector<Part>& parts);
  [[noreturn]] void fail_too_late(const std::string& who_waited, const std::vector<Part>& parts) const;
  [[noreturn]] void fail_incomplete(const std::vector<Part>& parts) const;
  std::string follow(const std::string& mine, SuspensionAwareDeadline& deadline);
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
  std::optional<AliveFile> alive_; // unless this rank is alone
  std::string session_;
  uint64_t round_ = 0;
  milliseconds linger_time_{0};   // for `to_read_`
  std::optional<Error> failure_;  // of an earlier round; the ranks are no longer in step
  std::set<std::string> to_read_; // files for other ranks that may never be read
};

FileSession::FileSession(const std::string& directory, Participant participant)
    : participant_(std::move(participant)), directory_(directory, participant_.job_id, participant_.nonce),
      attendance_(directory_) {
  remove_files_of_dead_jobs(directory_);
}

FileSession::~FileSession() {
  try {
    if (failure_ && !to_read_.empty()) {
      // A plain deadline, since the session has failed already: a suspension need not prolong this.
      const Deadline deadline(linger_time_);
      for (PollingPace pace(kFirstSleep, kLongestSleep); !deadline.passed(); pace.sleep(deadline)) {
        const RendezvousDirectory::Names names = directory_.list();
        if (std::none_of(to_read_.begin(), to_read_.end(), [&](const auto& file) { return names.contains(file); })) break;
      }
    }
  } catch (...) { // what cannot be listed can still be removed
  }
  for (const std::string& file : to_read_)
    directory_.remove(file);
  if (failure_ && !session_.empty()) {
    directory_.remove(in_file(participant_.rank));
    directory_.remove(out_file(participant_.rank));
  }
  // Whoever claimed this rank too may have been late to say so.
  directory_.remove(reject_name(participant_.rank, participant_.nonce));
  alive_.reset();
  if (directory_.leave()) return;
  remove_files_of_dead_jobs(directory_); // of ranks that died in this job, if nobody else is left to do it
  directory_.leave();
}

void FileSession::meet(milliseconds timeout) {
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
  } catch (const Error& error) {
    failure_ = error;
    throw;
  }
  ++round_;
}

void FileSession::all_gather(const void* send, void* recv, size_t bytes_per_rank, milliseconds timeout) {
  if (timeout.count() <= 0) fail(EPX_ERROR_INVALID_ARGUMENT, "timeout_ms is {}; it must be > 0", timeout.count());
  if (bytes_per_rank > 0 && (send == nullptr || recv == nullptr))
    fail(EPX_ERROR_INVALID_ARGUMENT, "send or recv is NULL, and bytes_per_rank is {}", bytes_per_rank);
  if (failure_) throw Error(*failure_);
  linger_time_ = linger_time(timeout);
  const std::string mine(static_cast<const char*>(send), bytes_per_rank);
  std::string all;
  try {
    all = run_round(mine, timeout);
  } catch (const Error& error) {
    failure_ = error;
    throw;
  } catch (const std::exception& error) { // out of memory, for instance; where it has left the round is unknown
    failure_ = Error(EPX_ERROR_INTERNAL, fmt::format("{}: {}", what(), error.what()));
    throw;
  }
  ++round_;
  if (!all.empty()) std::memcpy(recv, all.data(), all.size());
}

std::string FileSession::run_round(const std::string& mine, milliseconds timeout) {
  SuspensionAwareDeadline deadline(timeout);
  if (participant_.num_ranks == 1) return mine;
  alive_->keep();
  if (participant_.rank == 0) return lead(mine, deadline, nullptr);
  return follow(mine, deadline);
}

void FileSession::hand_in(const std::string& mine) {
  write_message(directory_, in_file(participant_.rank),
                {MessageKind::kIn, participant_.rank, participant_.num_ranks, EPX_SUCCESS, session_, mine, {}});
}

// ---- Rank 0 -------------------------------------------------------------------------------------------------------------

std::string FileSession::lead(const std::string& mine, SuspensionAwareDeadline& deadline, JoinServer* join_server) {
  std::vector<Part> parts(static_cast<size_t>(participant_.num_ranks), Part::kAbsent);
  std::string all;
  try {
    hand_in(""); // so that ranks that give up know that rank 0 has come; its data nobody reads
    parts[0] = Part::kTaken;
    wait_for_parts(deadline, join_server, parts);
    if (join_server != nullptr) join_server->close();
    all = take_parts(mine, parts);
    for (int rank = 1; rank < participant_.num_ranks; ++rank) {
      answer(rank, EPX_SUCCESS, all);
      parts[static_cast<size_t>(rank)] = Part::kAnswered;
    }
    directory_.remove(in_file(0));
  } catch (const Error& error) {
    if (join_server != nullptr) join_server->close();
    report_failure(error, join_server, parts);
    directory_.remove(in_file(0));
    if (join_server != nullptr) to_read_.insert(join_server->rejections().begin(), join_server->rejections().end());
    throw;
  }
  if (join_server != nullptr) to_read_.insert(join_server->rejections().begin(), join_server->rejections().end());
  return all;
}

void FileSession::wait_for_parts(SuspensionAwareDeadline& deadline, JoinServer* join_server, std::vector<Part>& parts) {
  for (PollingPace pace(kFirstSleep, kLongestSleep);; pace.sleep(deadline)) {
    const bool last_look = deadline.passed();
    const RendezvousDirectory::Names names = directory_.list();
    for (int rank = 1; rank < participant_.num_ranks; ++rank) {
      Part& part = parts[static_cast<size_t>(rank)];
      if (names.contains(in_file(rank)))
        part = Part::kPresent;
      else if (part == Part::kPresent)
        part = Part::kGone;
    }
    if (std::find(parts.begin(), parts.end(), Part::kGone) != parts.end()) fail_incomplete(parts);
    if (std::find(parts.begin(), parts.end(), Part::kAbsent) == parts.end()) return;
    look_for_quitters(names, parts);
    if (join_server != nullptr) join_server->serve(names);
    if (last_look) fail_too_late(who_waited(0, deadline), parts);
  }
}

// A rank whose time is up fails the round for all: better now than at the deadline of rank 0.
void FileSession::look_for_quitters(const RendezvousDirectory::Names& names, std::vector<Part>& parts) {
  for (int rank = 1; rank < participant_.num_ranks; ++rank) {
    if (!names.contains(quit_file(rank))) continue;
    const std::optional<Message> quit = read_message(directory_, quit_file(rank), MessageKind::kQuit);
    if (!quit || quit->status == EPX_SUCCESS || !is_mine(*quit, rank)) continue;
    // It waits for the verdict of rank 0 still, and that knows best who is missing.
    if (parts[static_cast<size_t>(rank)] == Part::kPresent)
      fail_too_late(quit->body.substr(0, quit->body.find(';')), parts);
    // It had left when rank 0 came.
    if (!directory_.remove(quit_file(rank))) continue;
    parts[static_cast<size_t>(rank)] = Part::kGone;
    throw Error(quit->status, fmt::format("{}: {}", what(), quit->body));
  }
}

// Names who never came, not who lost patience with them.
void FileSession::fail_too_late(const std::string& who_waited, const std::vector<Part>& parts) const {
  std::vector<int> missing;
  for (int rank = 0; rank < participant_.num_ranks; ++rank)
    if (parts[static_cast<size_t>(rank)] == Part::kAbsent) missing.push_back(rank);
  fail(EPX_ERROR_TIMEOUT, "{}: {}; {} of {} never came", what(), who_waited, name_ranks(missing), participant_.num_ranks);
}

// The part of a rank has gone, since rank 0 was not quick enough for it.
void FileSession::fail_incomplete(const std::vector<Part>& parts) const {
  std::vector<int> missing;
  std::vector<int> gone;
  for (int rank = 0; rank < participant_.num_ranks; ++rank) {
    const Part part = parts[static_cast<size_t>(rank)];
    if (part == Part::kAbsent) missing.push_back(rank);
    if (part == Part::kGone) gone.push_back(rank);
  }
  if (missing.empty()) fail(EPX_ERROR_TIMEOUT, "{}: {} gave up too soon", what(), name_ranks(gone));
  fail(EPX_ERROR_TIMEOUT, "{}: {} gave up waiting; {} of {} never came", what(), name_ranks(gone), name_ranks(missing),
       participant_.num_ranks);
}

std::string FileSession::take_parts(const std::string& mine, std::vector<Part>& parts) {
  std::vector<std::string> bodies(parts.size());
  bodies[0] = mine;
  for (int rank = 1; rank < participant_.num_ranks; ++rank) {
    const std::optional<Message> message = read_message(directory_, in_file(rank), MessageKind::kIn, SIZE_MAX);
    if (message && is_mine(*message, rank)) bodies[static_cast<size_t>(rank)] = message->body;
    // Removing it is what decides: a rank that finds its part gone knows that it will be answered.
    const bool taken = directory_.remove(in_file(rank));
    parts[static_cast<size_t>(rank)] = taken ? Part::kTaken : Part::kGone;
    if (taken && (!message || !is_mine(*message, rank)))
      fail(EPX_ERROR_SYSTEM, "{}: the file of rank {} is damaged", what(), rank);
  }
  if (std::find(parts.begin(), parts.end(), Part::kGone) != parts.end()) fail_incomplete(parts);
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

// Tells everybody who knows the session and has not given up, the late ones too: they may come yet.
void FileSession::report_failure(const Error& error, const JoinServer* join_server, std::vector<Part>& parts) {
  for (int rank = 1; rank < participant_.num_ranks; ++rank) {
    Part& part = parts[static_cast<size_t>(rank)];
    if (part == Part::kAbsent && join_server != nullptr && !join_server->joined(rank)) continue;
    if (part == Part::kPresent) part = directory_.remove(in_file(rank)) ? Part::kTaken : Part::kGone;
    if (part == Part::kGone || part == Part::kAnswered) continue;
    if (part == Part::kAbsent) to_read_.insert({in_file(rank), out_file(rank)});
    try {
      answer(rank, error.status(), error.message());
    } catch (const Error&) { // then this rank's own deadline has to tell it
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

std::string FileSession::follow(const std::string& mine, SuspensionAwareDeadline& deadline) {
  const size_t answer_bytes = mine.size() * static_cast<size_t>(participant_.num_ranks);
  bool rank_0_has_come = round_ == 0; // it has let this rank in
  hand_in(mine);
  Every look_around(50ms);
  for (PollingPace pace(kFirstSleep, kLongestSleep);; pace.sleep(deadline)) {
    const bool last_look = deadline.passed();
    if (look_around.due() || last_look) {
      const RendezvousDirectory::Names names = directory_.list();
      if (round_ == 0) attendance_.note(names);
      if (names.contains(in_file(0))) rank_0_has_come = true;
    } else {
      directory_.refresh();
    }
    if (const std::optional<Message> message = take_answer()) return open_answer(*message, answer_bytes);
    if (last_look) break;
  }

  // Only rank 0 knows who has come to this round: where it lives it decides now. Where it does not it is the one to be named,
  // whatever else is or is not there: who is waiting for it may be a round behind, or at the door.
  const std::string waited = who_waited(participant_.rank, deadline);
  try {
    write_message(directory_, quit_file(participant_.rank),
                  {MessageKind::kQuit,
                   participant_.rank,
                   participant_.num_ranks,
                   EPX_ERROR_TIMEOUT,
                   session_,
                   fmt::format("{}; {}", waited, why_no_answer(rank_0_has_come)),
                   {}});
  } catch (const Error&) { // rank 0 will see that the part is gone
  }
  const milliseconds answer = answer_time(deadline.timeout());
  SuspensionAwareDeadline decision = deadline.with_grace(answer);
  if (const std::optional<Message> message = wait_for_answer(decision)) return open_answer(*message, answer_bytes);
  if (directory_.remove(in_file(participant_.rank))) {
    if (round_ == 0)
      directory_.remove(quit_file(participant_.rank));
    else
      to_read_.insert(quit_file(participant_.rank)); // for a rank 0 that comes yet
    fail(EPX_ERROR_TIMEOUT, "{}: {}; {}", what(), waited, why_no_answer(rank_0_has_come));
  }

  // Rank 0 has taken this rank's part at the last moment and is about to answer; only its death can prevent that.
  // The later deadline goes on from the polls of `decision`: time since an older poll would pass for a suspension.
  SuspensionAwareDeadline delivery = decision.with_grace(answer / 3);
  if (const std::optional<Message> message = wait_for_answer(delivery)) return open_answer(*message, answer_bytes);
  directory_.remove(quit_file(participant_.rank));
  fail(EPX_ERROR_TIMEOUT, "{}: rank 0 took the data of rank {} and never answered", what(), participant_.rank);
}

std::optional<Message> FileSession::wait_for_answer(SuspensionAwareDeadline& deadline) {
  for (PollingPace pace(kFirstSleep, kLongestSleep);; pace.sleep(deadline)) {
    const bool last_look = deadline.passed();
    directory_.refresh();
    std::optional<Message> message = take_answer();
    if (message || last_look) return message;
  }
}

std::string FileSession::why_no_answer(bool rank_0_has_come) const {
  std::vector<int> missing;
  if (!rank_0_has_come) missing.push_back(0);
  for (int rank = 1; rank < participant_.num_ranks; ++rank) // in later rounds all have come once
    if (round_ == 0 && rank != participant_.rank && !attendance_.has_come(rank)) missing.push_back(rank);
  std::string never_came = fmt::format("{} of {} never came", name_ranks(missing), participant_.num_ranks);
  if (!rank_0_has_come || (!missing.empty() && attendance_.lives(0))) return never_came; // a slow rank 0 is not to blame
  const std::string silent = fmt::format("rank 0 of {} came and does not answer any more", participant_.num_ranks);
  return missing.empty() ? silent : silent + ", and " + never_came;
}

std::string FileSession::open_answer(const Message& message, size_t expected_bytes) const {
  directory_.remove(in_file(participant_.rank)); // still there when rank 0 failed before it saw it
  directory_.remove(quit_file(participant_.rank));
  if (message.status != EPX_SUCCESS) throw Error(message.status, message.body);
  if (message.body.size() != expected_bytes)
    fail(EPX_ERROR_SYSTEM, "{}: rank 0 answered with {} bytes instead of {}", what(), message.body.size(), expected_bytes);
  return message.body;
}

// ---- epx_bootstrap ------------------------------------------------------------------------------------------------------

epx_status all_gather_callback(void* context, const void* send, void* recv, size_t bytes_per_rank, int64_t timeout_ms,
                               char* message, size_t message_bytes) {
  return run_callback(message, message_bytes, [&] {
    static_cast<FileSession*>(context)->all_gather(send, recv, bytes_per_rank, milliseconds(timeout_ms));
  });
}

// In a child of fork() the files are the parent's, which may be in the middle of a session.
void release_callback(void* context) {
  auto* const session = static_cast<FileSession*>(context);
  if (session->is_own_process()) delete session;
}

void check_arguments(const std::string& directory, const std::string& job_id, int rank, int num_ranks,
                     milliseconds timeout) {
  constexpr size_t kMaxJobIdBytes = 64;
  constexpr std::string_view kJobIdCharacters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
  if (directory.empty()) fail(EPX_ERROR_INVALID_ARGUMENT, "directory is empty");
  if (job_id.empty() || job_id.size() > kMaxJobIdBytes)
    fail(EPX_ERROR_INVALID_ARGUMENT, "job_id has {} characters; it must have 1 to {}", job_id.size(), kMaxJobIdBytes);
  if (job_id.find_first_not_of(kJobIdCharacters) != std::string::npos)
    fail(EPX_ERROR_INVALID_ARGUMENT, "job_id is '{}'; only characters of [A-Za-z0-9._-] are allowed", job_id);
  if (num_ranks < 1) fail(EPX_ERROR_INVALID_ARGUMENT, "num_ranks is {}; it must be >= 1", num_ranks);
  if (rank < 0 || rank >= num_ranks)
    fail(EPX_ERROR_INVALID_ARGUMENT, "rank is {}; it must be 0..{} when num_ranks is {}", rank, num_ranks - 1, num_ranks);
  if (timeout.count() <= 0) fail(EPX_ERROR_INVALID_ARGUMENT, "timeout_ms is {}; it must be > 0", timeout.count());
}

} // namespace

epx_bootstrap make_file_bootstrap(const std::string& directory, const std::string& job_id, int rank, int num_ranks,
                                  std::chrono::milliseconds timeout) {
  check_arguments(directory, job_id, rank, num_ranks, timeout);
  auto session = std::make_unique<FileSession>(directory, Participant{job_id, rank, num_ranks, draw_nonce()});
  session->meet(timeout);
  epx_bootstrap bootstrap{};
  bootstrap.struct_size = sizeof(bootstrap);
  bootstrap.rank = rank;
  bootstrap.num_ranks = num_ranks;
  bootstrap.all_gather = all_gather_callback;
  bootstrap.release = release_callback;
  bootstrap.context = session.release();
  return bootstrap;
}

} // namespace epx
