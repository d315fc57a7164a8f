#include "transport/bootstrap/file_meeting.h"

#include <algorithm>
#include <utility>

#include "runtime/base/deadline.h"
#include "runtime/base/error.h"
#include "runtime/base/names.h"
#include "transport/bootstrap/file_liveness.h"
#include "transport/bootstrap/rendezvous_names.h"

namespace epx {
namespace {

using namespace std::chrono_literals;

Letter rejection(const Party& party, int rank, const std::string& nonce, const std::string& sentence) {
  return {LetterKind::kReject, rank, party.num_ranks, EPX_ERROR_MISMATCH, nonce, sentence, {}};
}

std::string claimed_twice(const Party& party, int rank, int other_num_ranks) {
  std::string sentence = fmt::format("job '{}': two processes claim rank {}", party.job_id, rank);
  if (other_num_ranks != party.num_ranks)
    sentence += fmt::format(", one with num_ranks {}, the other with num_ranks {}", party.num_ranks, other_num_ranks);
  return sentence;
}

} // namespace

// ---- Claim --------------------------------------------------------------------------------------------------------------

Claim::Claim(RendezvousDirectory& directory, const Party& party) : directory_(directory), party_(party) {
  say_hello();
}

Claim::~Claim() {
  try {
    const std::optional<Letter> hello = read_letter(directory_, hello_name(party_.rank), LetterKind::kHello);
    if (hello && hello->nonce == party_.nonce) directory_.remove(hello_name(party_.rank));
    directory_.remove(reject_name(party_.rank, party_.nonce));
  } catch (...) { // a file stays behind that means nothing to anybody
  }
}

void Claim::say_hello() {
  write_letter(directory_, hello_name(party_.rank),
               {LetterKind::kHello, party_.rank, party_.num_ranks, EPX_SUCCESS, party_.nonce, "", {}});
}

void Claim::check() {
  if (const std::optional<Letter> no = read_letter(directory_, reject_name(party_.rank, party_.nonce), LetterKind::kReject))
    throw Error(no->status == EPX_SUCCESS ? EPX_ERROR_MISMATCH : no->status, no->body);
  const std::optional<Letter> hello = read_letter(directory_, hello_name(party_.rank), LetterKind::kHello);
  if (!hello) {
    say_hello();
  } else if (hello->nonce != party_.nonce) {
    const std::string sentence = claimed_twice(party_, party_.rank, hello->num_ranks);
    write_letter(directory_, reject_name(party_.rank, hello->nonce),
                 rejection(party_, party_.rank, hello->nonce, sentence));
    fail(EPX_ERROR_MISMATCH, "{}", sentence);
  }
}

// ---- join ---------------------------------------------------------------------------------------------------------------

std::string join(RendezvousDirectory& directory, const Party& party, SuspensionAwareDeadline& deadline,
                 Attendance& attendance) {
  const std::string welcome_file = welcome_name(party.rank, party.nonce);
  Claim claim(directory, party);
  Every look_around(50ms);
  for (PollingPace pace(200us, 5ms);; pace.sleep(deadline)) {
    const bool last_look = deadline.passed();
    if (look_around.due() || last_look) {
      attendance.note(directory.list());
    } else {
      directory.refresh();
    }
    claim.check();
    const std::optional<Letter> welcome = read_letter(directory, welcome_file, LetterKind::kWelcome);
    // Rank 0 may withdraw it. Whoever removes the file has decided.
    if (welcome && directory.remove(welcome_file)) return welcome->nonce;
    if (last_look) break;
  }
  std::vector<int> missing{0}; // a live one would have let this rank in
  for (int rank = 1; rank < party.num_ranks; ++rank)
    if (rank != party.rank && !attendance.has_come(rank)) missing.push_back(rank);
  fail(EPX_ERROR_TIMEOUT, "job '{}': rank {} waited {} ms for the others to come; {} of {} never came", party.job_id,
       party.rank, deadline.timeout().count(), name_ranks(missing), party.num_ranks);
}

// ---- Reception ----------------------------------------------------------------------------------------------------------

Reception::Reception(RendezvousDirectory& directory, const Party& party, std::string session)
    : directory_(directory), party_(party), session_(std::move(session)), claim_(directory, party),
      guests_(static_cast<size_t>(party.num_ranks)) {}

std::optional<Letter> Reception::hello_of(int rank, const RendezvousDirectory::Names& names) const {
  if (!names.contains(hello_name(rank))) return std::nullopt;
  return read_letter(directory_, hello_name(rank), LetterKind::kHello);
}

void Reception::serve(const RendezvousDirectory::Names& names) {
  claim_.check();
  look_for_strangers(names);
  for (int rank = 1; rank < party_.num_ranks; ++rank)
    serve_guest(rank, names);
  for (const std::string& name : names) {
    const std::optional<int> rank = rank_of_hello(name);
    if (!rank || *rank < party_.num_ranks) continue;
    if (const std::optional<Letter> hello = hello_of(*rank, names)) meet_stranger(*rank, *hello);
  }
}

void Reception::serve_guest(int rank, const RendezvousDirectory::Names& names) {
  Guest& guest = guests_[static_cast<size_t>(rank)];
  const std::optional<Letter> hello = hello_of(rank, names);
  if (guest.state == State::kWelcomed) {
    if (!names.contains(welcome_name(rank, guest.nonce)))
      guest.state = State::kJoined;
    else if (!hello || hello->nonce != guest.nonce)
      withdraw_welcome(rank, guest); // it was a dead job's hello, or the process has left
  }
  if (!hello) return;
  if (guest.state == State::kAbsent) {
    if (hello->num_ranks != party_.num_ranks) return meet_stranger(rank, *hello);
    write_letter(directory_, welcome_name(rank, hello->nonce),
                 {LetterKind::kWelcome, rank, party_.num_ranks, EPX_SUCCESS, session_, "", {}});
    guest = {State::kWelcomed, hello->nonce};
  } else if (guest.state == State::kJoined && hello->nonce != guest.nonce) {
    reject(rank, *hello, claimed_twice(party_, rank, hello->num_ranks));
  }
}

void Reception::withdraw_welcome(int rank, Guest& guest) const noexcept {
  guest.state = directory_.remove(welcome_name(rank, guest.nonce)) ? State::kAbsent : State::kJoined;
}

void Reception::meet_stranger(int rank, const Letter& hello) {
  const std::string sentence = fmt::format("job '{}': rank 0 has num_ranks {}, and rank {} has num_ranks {}", party_.job_id,
                                           party_.num_ranks, rank, hello.num_ranks);
  const std::string file = reject(rank, hello, sentence);
  if (!file.empty()) strangers_.push_back({rank, hello.nonce, file, sentence});
}

void Reception::look_for_strangers(const RendezvousDirectory::Names& names) const {
  for (const Stranger& stranger : strangers_)
    if (!names.contains(stranger.rejection)) fail(EPX_ERROR_MISMATCH, "{}", stranger.sentence);
}

// Returns the name of the file, or "" when this process had been rejected before.
std::string Reception::reject(int rank, const Letter& hello, const std::string& sentence) {
  std::string name = reject_name(rank, hello.nonce);
  if (rejections_.contains(name)) return "";
  write_letter(directory_, name, rejection(party_, rank, hello.nonce, sentence));
  rejections_.insert(name);
  return name;
}

void Reception::close() noexcept {
  for (int rank = 1; rank < party_.num_ranks; ++rank) {
    Guest& guest = guests_[static_cast<size_t>(rank)];
    if (guest.state != State::kWelcomed) continue;
    withdraw_welcome(rank, guest);
    if (guest.state == State::kAbsent) forget_hello(rank, guest.nonce);
  }
  for (const Stranger& stranger : strangers_)
    forget_hello(stranger.rank, stranger.nonce);
  strangers_.clear();
}

// Clears away a hello that nobody stood behind. A rank that was only slow writes it again. What another host wrote stays.
void Reception::forget_hello(int rank, const std::string& nonce) const noexcept {
  try {
    const std::optional<Letter> hello = read_letter(directory_, hello_name(rank), LetterKind::kHello);
    if (hello && hello->nonce == nonce && hello->origin == directory_.origin()) directory_.remove(hello_name(rank));
  } catch (...) { // it stays, and is still nobody's
  }
}

} // namespace epx
