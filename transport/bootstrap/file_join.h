// How processes that know nothing but a directory become the ranks of one session: each claims its rank, rank 0 lets it in.
#pragma once

#include <chrono>
#include <set>
#include <string>
#include <vector>

#include "base/suspension_aware_deadline.h"
#include "transport/bootstrap/file_liveness.h"
#include "transport/bootstrap/file_messages.h"
#include "transport/bootstrap/rendezvous_directory.h"

namespace epx {

struct Participant {
  std::string job_id;
  int rank = 0;
  int num_ranks = 1;
  std::string nonce; // of this process (or thread)
};

// This process's hello, while it stands.
class Claim {
public:
  Claim(RendezvousDirectory& directory, const Participant& participant);
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  // Throws MISMATCH when another process claims the same rank, and lets that one know; throws the reason when this one has
  // been rejected. A hello that has disappeared is written again, so that anybody may clear away one that looks dead.
  void check();

private:
  void say_hello();

  RendezvousDirectory& directory_;
  const Participant& participant_;
};

// Every rank but 0: waits until rank 0 has let this one in, and returns the session. Notes who has come meanwhile.
std::string join(RendezvousDirectory& directory, const Participant& participant, SuspensionAwareDeadline& deadline,
                 Attendance& attendance);

// Rank 0: lets ranks in while it waits for all of them.
class JoinServer {
public:
  JoinServer(RendezvousDirectory& directory, const Participant& participant, std::string session);
  ~JoinServer() { close(); }
  JoinServer(const JoinServer&) = delete;
  JoinServer& operator=(const JoinServer&) = delete;

  // Looks at everybody who is at the door; `names` is the directory as it is now. Throws MISMATCH when rank 0 is claimed
  // twice, or a live process believes in another number of ranks.
  void serve(const RendezvousDirectory::Names& names);

  // Lets nobody in any more: from here on joined() does not change.
  void close() noexcept;

  // `rank` has taken its welcome: it is alive, and knows the session.
  bool joined(int rank) const { return peers_[static_cast<size_t>(rank)].state == State::kJoined; }

  // Files for processes that were rejected; each removes its own when it reads it.
  const std::set<std::string>& rejections() const { return rejections_; }

private:
  enum class State { kAbsent, kWelcomed, kJoined };
  struct Peer {
    State state = State::kAbsent;
    std::string nonce;
  };
  struct Mismatched { // of a job with another number of ranks: alive if it takes the rejection, else a dead job's leftover
    int rank;
    std::string nonce;
    std::string rejection;
    std::string sentence;
  };

  std::optional<Message> hello_of(int rank, const RendezvousDirectory::Names& names) const;
  void serve_peer(int rank, const RendezvousDirectory::Names& names);
  void look_for_mismatched(const RendezvousDirectory::Names& names) const;
  void reject_mismatched(int rank, const Message& hello);
  void withdraw_welcome(int rank, Peer& peer) const noexcept;
  std::string reject(int rank, const Message& hello, const std::string& sentence);
  void forget_hello(int rank, const std::string& nonce) const noexcept;

  RendezvousDirectory& directory_;
  const Participant& participant_;
  std::string session_;
  Claim claim_;
  std::vector<Peer> peers_; // [num_ranks]
  std::vector<Mismatched> mismatched_;
  std::set<std::string> rejections_;
};

} // namespace epx
