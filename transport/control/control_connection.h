// SPDX-License-Identifier: Apache-2.0
// The control connection tells the ranks of a group of several nodes, which share no memory, who has died, stopped, or not
// come. Each rank has one TCP connection to rank 0, and one watchdog thread. Rows never use it.
//
//   heartbeat   every rank, several times in timeout_ms: the last call that it has begun, and which operation it is
//   report      a rank whose wait has run out, or whose connection to a rail peer is broken
//   failure     a rank that has ended the group, that hangs in a kernel, or that has given up rank 0
//   verdict     rank 0, once: who the culprit is, or that none is. Every rank gets the same one
//   goodbye     a rank that destroys its group, after the last call that it has begun; its connection then ends without being
//               a death
//
// Rank 0 decides for all; a rank that loses rank 0 itself names it. Where rank 0 has left the group, a rank decides for itself.
// A process that has been suspended, as in a stopped job, does not count that time as silence of its peers.
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

// What heartbeats tell of a rank's calls. It fits in one word, which any thread may replace.
struct CallProgress {
  static constexpr int kMaxOperation = 0x7f;

  uint64_t sequence = 0;                 // the last call that the rank has begun
  epx_operation operation = EPX_OP_NONE; // of that call, if it is known
  bool is_in_call = false;

  uint64_t to_word() const { return sequence << 8 | static_cast<uint64_t>(operation) << 1 | (is_in_call ? 1 : 0); }
  static CallProgress from_word(uint64_t word) {
    return {word >> 8, static_cast<epx_operation>(word >> 1 & kMaxOperation), (word & 1) != 0};
  }
};

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
  // The same, where calls are made by a device: whether it is still within the call, and which operation it is. Ranks that tell
  // different operations of the same call get a verdict at once.
  void set_progress(uint64_t sequence, bool is_in_call, epx_operation operation = EPX_OP_NONE) noexcept {
    progress_.store(CallProgress{sequence, operation, is_in_call}.to_word(), std::memory_order_relaxed);
  }

  // A wait of this rank has run out on `missing`. Returns rank 0's verdict, which all ranks get; none when there is no rank
  // that could decide any more, or when it does not within a second and a half.
  std::optional<Verdict> report_timeout(int missing, epx_operation operation, uint64_t sequence);

  // Any thread: reports that a wait has run out, and does not wait for the verdict. Where nobody knows for whom this rank
  // waits, `missing` is -1; there may be no verdict as long as rank 0 does not know it either, so the report goes on until it
  // is withdrawn. Where rank 0 has left before the call, it is the culprit. The last report always gets a verdict, which blames
  // no rank when all have come.
  void report_stuck(int missing, epx_operation operation, uint64_t sequence, ReportKind kind = ReportKind::timeout);
  void withdraw_report(); // unless it says that a connection is broken

  // Any thread: a connection of the rails is broken, to `peer` if that is known, else -1. Waits for the verdict: it names a
  // rank that has died, has stopped, or has left before the call. When none is found within time_to_tell_ (one to three
  // seconds), in which a death or a failure elsewhere would have been reported, the verdict blames no rank. Returns none only
  // when there is no verdict in time.
  std::optional<Verdict> report_broken_connection(int peer, epx_operation operation, uint64_t sequence);

  // Any thread: this rank has found that the group has failed because of `culprit` (-1: of no rank), or ends it itself. That is
  // the verdict, if it is the first to reach rank 0.
  void report_failure(int culprit, epx_status status, epx_operation operation, uint64_t sequence);

  // Any thread: this rank has come to the call and hangs there, in a kernel that waits for no peer. That is the verdict
  // likewise.
  void report_hang(epx_operation operation, uint64_t sequence);

  // Waits for the verdict, no longer than a second and a half.
  std::optional<Verdict> wait_for_verdict();

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
    epx_operation operation = EPX_OP_NONE; // of that call, if it is known

    void set_sequence(uint64_t begun) { // by a message that does not tell the operation
      if (begun > sequence) operation = EPX_OP_NONE;
      sequence = std::max(sequence, begun);
    }

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
  void report(const Verdict& failure);
  void send(Peer& peer, const ControlMessage& message);
  void flush(Peer& peer);
  void lose(Peer& peer);
  void judge(Clock::time_point now);
  void judge_report(const WaitReport& report, Clock::time_point now);
  void report_to(Peer& decider, const WaitReport& report, Clock::time_point now);
  void leave_undecided();
  void adopt(const Verdict& verdict);
  CallProgress progress() const { return CallProgress::from_word(progress_.load(std::memory_order_relaxed)); }
  std::vector<RankState> states(Clock::time_point now) const;
  void wake() const;

  const int rank_;
  const int num_ranks_;
  const std::chrono::milliseconds silence_limit_; // without a heartbeat
  std::chrono::milliseconds heartbeat_interval_;  // of all ranks
  std::chrono::milliseconds min_silence_;  // from which on a rank counts as stopped when another one's wait has run out
  std::chrono::milliseconds time_to_tell_; // within which a death, a silence or a failure is known to rank 0
  std::vector<Peer> peers_;                // the watchdog's alone once it runs
  std::vector<WaitReport> reports_;        // likewise; rank 0's, of peers, that have come and are not judged yet
  std::optional<Clock::time_point> first_broken_; // likewise; rank 0's: when the first broken connection was reported
  Clock::time_point next_report_{};               // likewise
  bool has_sent_failure_ = false;                 // likewise
  FileDescriptor wake_;                           // eventfd
  std::atomic<uint64_t> progress_{0};             // CallProgress
  std::atomic<bool> stops_{false};

  std::mutex mutex_; // of what follows
  OnVerdict on_verdict_;
  std::condition_variable decided_;
  std::optional<WaitReport> own_report_;
  std::optional<Verdict> own_failure_;
  std::optional<Verdict> verdict_;
  bool is_undecided_ = false; // nobody is left who could judge own_report_

  std::thread watchdog_; // last: it uses all the others
};

} // namespace epx
