// SPDX-License-Identifier: Apache-2.0
// The control connection tells the ranks of a group of several nodes, which share no memory, who has died, stopped, or not
// come. Each rank has one TCP connection to rank 0, and one watchdog thread. Rows never use it.
//
//   heartbeat   every rank, several times in timeout_ms: the last call that it has begun
//   report      a rank whose wait has run out
//   failure     a rank that has ended the group for a reason of its own
//   verdict     rank 0, once: who the culprit is. Every rank gets the same one
//   goodbye     a rank that destroys its group, after the last call that it has begun; its connection then ends without being
//               a death
//
// Rank 0 decides for all; who loses rank 0 itself names it. A process that does not run for a while, as all of a suspended
// job's do, takes the silence of the others in that time for its own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/suspension_aware_deadline.h"
#include "transport/control/control_message.h"
#include "transport/control/culprit.h"
#include "transport/exchange.h"
#include "transport/file_descriptor.h"

namespace epx {

class ControlConnection {
public:
  using OnVerdict = std::function<void(const Verdict&)>;

  // The call is collective over `exchange`, which carries the address of rank 0 and a secret that is drawn for this
  // connection; all ranks succeed or all throw SYSTEM. The watchdog runs from here on. Ranks may have different timeouts, and
  // send heartbeats as often as the shortest one asks for. Connecting takes at most half of `timeout`, but 1 to 30 s.
  // Afterwards a rank is silent when no heartbeat has come for `timeout`, or a second where that is more.
  ControlConnection(int rank, int num_ranks, std::chrono::milliseconds timeout, Exchange& exchange);
  ~ControlConnection(); // says goodbye, and waits for no peer
  ControlConnection(const ControlConnection&) = delete;
  ControlConnection& operator=(const ControlConnection&) = delete;

  // Has the verdict, once there is one, handed to `on_verdict`: by the watchdog's thread, or at once by this one. It is called
  // once at most, and must neither throw nor wait.
  void deliver_to(const OnVerdict& on_verdict);

  // Any thread: the heartbeats tell from now on that this rank has begun the call.
  void begin_call(uint64_t sequence) noexcept { set_progress(sequence, false); }
  // The same, where calls are made by a device: whether it is still within the call.
  void set_progress(uint64_t sequence, bool is_in_call) noexcept {
    progress_.store(sequence << 1 | (is_in_call ? 1 : 0), std::memory_order_relaxed);
  }

  // A wait of this rank has run out on `missing`. Returns rank 0's verdict, which all ranks get; none when there is no rank
  // that could decide any more, or when it does not within a second and a half.
  std::optional<Verdict> report_timeout(int missing, epx_operation operation, uint64_t sequence);

  // Any thread: reports that a wait has run out, and does not wait for the verdict. Where nobody knows for whom this rank waits,
  // `missing` is -1; there may be no verdict as long as rank 0 does not know it either, so the report goes on until it is
  // withdrawn. Where rank 0 has left before the call, it is the culprit.
  void report_stuck(int missing, epx_operation operation, uint64_t sequence);
  void withdraw_report();

  // Any thread: this rank has found that the group has failed because of `culprit`, or ends it itself. That is the verdict, if
  // it is the first to reach rank 0.
  void report_failure(int culprit, epx_status status, epx_operation operation, uint64_t sequence);

  // Waits for the verdict, no longer than a second and a half.
  std::optional<Verdict> wait_for_verdict();

  // A connection to a peer is broken, so that a rank is lost: waits for the verdict for as long as a rank may be silent, and a
  // second and a half.
  std::optional<Verdict> wait_for_lost_rank();

private:
  using Clock = std::chrono::steady_clock;

  // The other end of a connection. Rank 0 has one for each other rank, and the others have one, to rank 0.
  struct Peer {
    explicit Peer(int peer_rank, FileDescriptor fd, std::chrono::milliseconds timeout)
        : rank(peer_rank), socket(std::move(fd)), silence_limit(timeout) {}

    int rank;
    FileDescriptor socket; // none after the connection has ended
    SuspensionAwareDeadline silence_limit;
    Clock::time_point last_heard = Clock::now();
    std::optional<Clock::time_point> died_at;
    bool has_left = false;
    uint64_t sequence = 0;
    bool is_in_call = false;
    std::array<std::byte, sizeof(ControlMessage)> incoming{};
    size_t num_incoming = 0;         // bytes of a message that has not come whole
    std::vector<std::byte> outgoing; // what the socket has not taken yet
  };

  void start();
  void stop();
  void watch();
  void receive_all();
  void receive(Peer& peer);
  void handle(Peer& peer, const ControlMessage& message);
  std::optional<Verdict> wait_for_verdict(std::chrono::milliseconds limit);
  void send(Peer& peer, const ControlMessage& message);
  void flush(Peer& peer);
  void lose(Peer& peer);
  void judge(Clock::time_point now);
  void judge_timeout(const TimeoutReport& report);
  void adopt(const Verdict& verdict);
  std::vector<RankState> states(Clock::time_point now) const;
  void wake() const;

  const int rank_;
  const int num_ranks_;
  const std::chrono::milliseconds silence_limit_; // without a heartbeat
  std::chrono::milliseconds heartbeat_interval_;  // of all ranks
  std::chrono::milliseconds min_silence_; // from which on a rank counts as stopped when another one's wait has run out
  std::vector<Peer> peers_;               // the watchdog's alone once it runs
  std::vector<TimeoutReport> reports_;    // likewise; rank 0's, of peers, that have come and are not judged yet
  Clock::time_point next_report_{};       // likewise
  bool has_sent_failure_ = false;         // likewise
  FileDescriptor wake_;                   // eventfd
  std::atomic<uint64_t> progress_{0};     // last call begun << 1 | is within it
  std::atomic<bool> stops_{false};

  std::mutex mutex_; // of what follows
  OnVerdict on_verdict_;
  std::condition_variable decided_;
  std::optional<TimeoutReport> own_report_;
  std::optional<Verdict> own_failure_;
  std::optional<Verdict> verdict_;

  std::thread watchdog_; // last: it uses all the others
};

} // namespace epx
