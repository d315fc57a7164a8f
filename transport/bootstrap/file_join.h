// SPDX-License-Identifier: Apache-2.0
// Processes that know nothing but a directory join one session: each claims its rank, and rank 0, the join server, welcomes it.
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
  std::string nonce; // drawn by this process (or thread)
};

// A Claim keeps this process's hello in the directory for as long as the object lives.
class Claim {
public:
  Claim(RendezvousDirectory& directory, const Participant& participant);
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  // Throws MISMATCH when another process claims the same rank, and rejects that process too; throws the reason when this
  // process has been rejected. A hello that has disappeared is written again, so that any rank may remove one that looks dead.
  void check();

private:
  void say_hello();

  RendezvousDirectory& directory_;
  const Participant& participant_;
};

// Every rank but 0 calls this. It waits until rank 0 has welcomed this rank, returns the session, and notes in `attendance`
// which ranks come meanwhile.
std::string join(RendezvousDirectory& directory, const Participant& participant, SuspensionAwareDeadline& deadline,
                 Attendance& attendance);

// Rank 0 runs the join server: it welcomes ranks while it waits for all of them.
class JoinServer {
public:
  JoinServer(RendezvousDirectory& directory, const Participant& participant, std::string session);
  ~JoinServer() { close(); }
  JoinServer(const JoinServer&) = delete;
  JoinServer& operator=(const JoinServer&) = delete;

  // Answers every hello; `names` lists the directory as it is now. Throws MISMATCH when rank 0 is claimed twice, or when a live
  // process passes another number of ranks.
  void serve(const RendezvousDirectory::Names& names);

  // Welcomes no more peers: joined() does not change afterwards.
  void close() noexcept;

  // Returns whether `rank` has taken its welcome: then it is alive, and knows the session.
  bool joined(int rank) const { return peers_[static_cast<size_t>(rank)].state == State::kJoined; }

  // Names the files for processes that were rejected; each process removes its own when it reads it.
  const std::set<std::string>& rejections() const { return rejections_; }

private:
  enum class State { kAbsent, kWelcomed, kJoined };
  struct Peer {
    State state = State::kAbsent;
    std::string nonce;
  };
  struct
      Mismatched { // a process with another num_ranks: it lives if it takes the rejection, else a dead job has left its hello
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
