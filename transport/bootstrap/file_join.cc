// SPDX-License-Identifier: Apache-2.0
#include "transport/bootstrap/file_join.h"

#include <algorithm>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "base/names.h"
#include "base/printable.h"
#include "transport/bootstrap/file_liveness.h"
#include "transport/bootstrap/file_pace.h"
#include "transport/bootstrap/rendezvous_names.h"
#include "transport/interrupt.h"

namespace epx {
namespace {

Message rejection(const Participant& participant, int rank, const std::string& nonce, const std::string& sentence) {
  return {MessageKind::kReject, rank, participant.num_ranks, EPX_ERROR_MISMATCH, nonce, sentence, {}};
}

std::string claimed_twice(const Participant& participant, int rank, int other_num_ranks) {
  std::string sentence = fmt::format("job '{}': two processes claim rank {}", participant.job_id, rank);
  if (other_num_ranks != participant.num_ranks)
    sentence += fmt::format(", one with num_ranks {}, the other with num_ranks {}", participant.num_ranks, other_num_ranks);
  return sentence;
}

} // namespace

// ---- Claim --------------------------------------------------------------------------------------------------------------

Claim::Claim(RendezvousDirectory& directory, const Participant& participant)
    : directory_(directory), participant_(participant) {
  say_hello();
}

Claim::~Claim() {
  try {
    const std::optional<Message> hello = read_message(directory_, hello_name(participant_.rank), MessageKind::kHello);
    if (hello && hello->nonce == participant_.nonce) directory_.remove(hello_name(participant_.rank));
    directory_.remove(reject_name(participant_.rank, participant_.nonce));
  } catch (...) { // the file that stays behind has no effect
  }
}

void Claim::say_hello() {
  write_message(directory_, hello_name(participant_.rank),
                {MessageKind::kHello, participant_.rank, participant_.num_ranks, EPX_SUCCESS, participant_.nonce, "", {}});
}

void Claim::check() {
  if (const std::optional<Message> no =
          read_message(directory_, reject_name(participant_.rank, participant_.nonce), MessageKind::kReject))
    throw StatusError(no->status == EPX_SUCCESS ? EPX_ERROR_MISMATCH : no->status, printable(no->body));
  const std::optional<Message> hello = read_message(directory_, hello_name(participant_.rank), MessageKind::kHello);
  if (!hello) {
    say_hello();
  } else if (hello->nonce != participant_.nonce) {
    const std::string sentence = claimed_twice(participant_, participant_.rank, hello->num_ranks);
    write_message(directory_, reject_name(participant_.rank, hello->nonce),
                  rejection(participant_, participant_.rank, hello->nonce, sentence));
    fail(EPX_ERROR_MISMATCH, "{}", sentence);
  }
}

// ---- join ---------------------------------------------------------------------------------------------------------------

std::string join(RendezvousDirectory& directory, const Participant& participant, SuspensionAwareDeadline& deadline,
                 Attendance& attendance) {
  const std::string welcome_file = welcome_name(participant.rank, participant.nonce);
  Claim claim(directory, participant);
  Every look_around(listing_interval(participant.num_ranks));
  for (PollingPace pace = polling_pace(participant.num_ranks);; pace.sleep(deadline, is_interrupted)) {
    const bool last_look = deadline.passed();
    if (look_around.due() || last_look) {
      attendance.note(directory.list());
    } else {
      directory.refresh();
    }
    claim.check();
    const std::optional<Message> welcome = read_message(directory, welcome_file, MessageKind::kWelcome);
    // Rank 0 may withdraw the welcome; whichever rank removes the file decides.
    if (welcome && directory.remove(welcome_file)) return welcome->nonce;
    if (is_interrupted())
      fail(EPX_ERROR_ABORTED, "job '{}': rank {} was interrupted while it waited for rank 0", participant.job_id,
           participant.rank);
    if (last_look) break;
  }
  std::vector<int> missing{0}; // a live rank 0 would have welcomed this rank
  for (int rank = 1; rank < participant.num_ranks; ++rank)
    if (rank != participant.rank && !attendance.has_come(rank)) missing.push_back(rank);
  fail(EPX_ERROR_TIMEOUT, "job '{}': rank {} waited {} ms for the others to come; {} of {} never came", participant.job_id,
       participant.rank, deadline.timeout().count(), name_ranks(missing), participant.num_ranks);
}

// ---- JoinServer ----------------------------------------------------------------------------------------------------------

JoinServer::JoinServer(RendezvousDirectory& directory, const Participant& participant, std::string session)
    : directory_(directory), participant_(participant), session_(std::move(session)), claim_(directory, participant),
      peers_(static_cast<size_t>(participant.num_ranks)) {}

std::optional<Message> JoinServer::hello_of(int rank, const RendezvousDirectory::Names& names) const {
  if (!names.contains(hello_name(rank))) return std::nullopt;
  return read_message(directory_, hello_name(rank), MessageKind::kHello);
}

void JoinServer::serve(const RendezvousDirectory::Names& names) {
  claim_.check();
  look_for_mismatched(names);
  for (int rank = 1; rank < participant_.num_ranks; ++rank)
    serve_peer(rank, names);
  for (const std::string& name : names) {
    const std::optional<int> rank = rank_of_hello(name);
    if (!rank || *rank < participant_.num_ranks) continue;
    if (const std::optional<Message> hello = hello_of(*rank, names)) reject_mismatched(*rank, *hello);
  }
}

void JoinServer::serve_peer(int rank, const RendezvousDirectory::Names& names) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  const std::optional<Message> hello = hello_of(rank, names);
  if (peer.state == State::kWelcomed) {
    if (!names.contains(welcome_name(rank, peer.nonce)))
      peer.state = State::kJoined;
    else if (!hello || hello->nonce != peer.nonce)
      withdraw_welcome(rank, peer); // the hello was a dead job's, or the process has left
  }
  if (!hello) return;
  if (peer.state == State::kAbsent) {
    if (hello->num_ranks != participant_.num_ranks) return reject_mismatched(rank, *hello);
    write_message(directory_, welcome_name(rank, hello->nonce),
                  {MessageKind::kWelcome, rank, participant_.num_ranks, EPX_SUCCESS, session_, "", {}});
    peer = {State::kWelcomed, hello->nonce};
  } else if (peer.state == State::kJoined && hello->nonce != peer.nonce) {
    reject(rank, *hello, claimed_twice(participant_, rank, hello->num_ranks));
  }
}

void JoinServer::withdraw_welcome(int rank, Peer& peer) const noexcept {
  peer.state = directory_.remove(welcome_name(rank, peer.nonce)) ? State::kAbsent : State::kJoined;
}

void JoinServer::reject_mismatched(int rank, const Message& hello) {
  const std::string sentence = fmt::format("job '{}': rank 0 has num_ranks {}, and rank {} has num_ranks {}",
                                           participant_.job_id, participant_.num_ranks, rank, hello.num_ranks);
  const std::string file = reject(rank, hello, sentence);
  if (!file.empty()) mismatched_.push_back({rank, hello.nonce, file, sentence});
}

void JoinServer::look_for_mismatched(const RendezvousDirectory::Names& names) const {
  for (const Mismatched& mismatched : mismatched_)
    if (!names.contains(mismatched.rejection)) fail(EPX_ERROR_MISMATCH, "{}", mismatched.sentence);
}

// Returns the name of the rejection's file, or "" when this process had been rejected before.
std::string JoinServer::reject(int rank, const Message& hello, const std::string& sentence) {
  std::string name = reject_name(rank, hello.nonce);
  if (rejections_.contains(name)) return "";
  write_message(directory_, name, rejection(participant_, rank, hello.nonce, sentence));
  rejections_.insert(name);
  return name;
}

void JoinServer::close() noexcept {
  for (int rank = 1; rank < participant_.num_ranks; ++rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (peer.state != State::kWelcomed) continue;
    withdraw_welcome(rank, peer);
    if (peer.state == State::kAbsent) forget_hello(rank, peer.nonce);
  }
  for (const Mismatched& mismatched : mismatched_)
    forget_hello(mismatched.rank, mismatched.nonce);
  mismatched_.clear();
}

// Removes a hello whose process did not take its welcome. A rank that was only slow writes it again. A hello that another host
// wrote stays.
void JoinServer::forget_hello(int rank, const std::string& nonce) const noexcept {
  try {
    const std::optional<Message> hello = read_message(directory_, hello_name(rank), MessageKind::kHello);
    if (hello && hello->nonce == nonce && hello->origin == directory_.origin()) directory_.remove(hello_name(rank));
  } catch (...) { // the hello stays, and has no effect
  }
}

} // namespace epx
