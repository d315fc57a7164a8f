// SPDX-License-Identifier: Apache-2.0
#include "transport/control/control_connection.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/background_thread.h"
#include "base/error.h"
#include "base/log.h"
#include "base/names.h"
#include "transport/control/control_join.h"

namespace epx {
namespace {

using namespace std::chrono_literals;

constexpr auto kMinSetup = 1'000ms;
constexpr auto kMaxSetup = 30'000ms;
constexpr auto kMinSilenceLimit = 1'000ms; // many heartbeats, however short timeout_ms is
constexpr auto kVerdictTime = 1'500ms;     // for rank 0 to answer a report
// A rank that ends without destroying its group may have done its part of the last call, which its peers are about to end.
constexpr auto kDeathGrace = 1'000ms;
constexpr auto kLongGap = 1'000ms; // between two rounds of the watchdog: its process did not run

// The call is collective.
std::chrono::milliseconds heartbeat_interval(std::chrono::milliseconds timeout, Exchange& exchange) {
  const auto timeouts = exchange.all_gather([&] { return static_cast<int64_t>(timeout.count()); });
  const std::chrono::milliseconds shortest(*std::ranges::min_element(timeouts));
  return std::clamp<std::chrono::milliseconds>(shortest / 20, 20ms, 500ms);
}

ControlMessage message_of(const Verdict& verdict) {
  ControlMessage message;
  message.kind = ControlKind::verdict;
  message.rank = verdict.culprit;
  message.operation = verdict.operation;
  message.cause = static_cast<int32_t>(verdict.cause);
  message.value = verdict.status;
  message.sequence = verdict.sequence;
  return message;
}

Verdict verdict_of(const ControlMessage& message) {
  return {message.rank, static_cast<Cause>(message.cause), static_cast<epx_operation>(message.operation), message.sequence,
          static_cast<epx_status>(message.value)};
}

bool is_sound(const ControlMessage& message, int num_ranks) {
  const auto cause = static_cast<Cause>(message.cause);
  const bool has_verdict = message.kind == ControlKind::verdict || message.kind == ControlKind::failure;
  const int least_rank = message.kind == ControlKind::report ? -1 : 0;
  return message.magic == ControlMessage::kMagic && message.rank >= least_rank && message.rank < num_ranks &&
         message.kind >= ControlKind::heartbeat && message.kind <= ControlKind::failure &&
         message.operation >= EPX_OP_NONE &&
         (!has_verdict || (cause >= Cause::died && cause <= Cause::failed && message.value > EPX_SUCCESS &&
                           message.value <= EPX_ERROR_INTERNAL));
}

} // namespace

ControlConnection::ControlConnection(int rank, int num_ranks, std::chrono::milliseconds timeout, Exchange& exchange)
    : rank_(rank), num_ranks_(num_ranks), silence_limit_(std::max<std::chrono::milliseconds>(timeout, kMinSilenceLimit)),
      heartbeat_interval_(heartbeat_interval(timeout, exchange)),
      min_silence_(
          std::clamp<std::chrono::milliseconds>(timeout / 2, 4 * heartbeat_interval_, 1'000ms + 2 * heartbeat_interval_)) {
  const auto limit = std::clamp<std::chrono::milliseconds>(timeout / 2, kMinSetup, kMaxSetup);
  std::vector<FileDescriptor> sockets = join_control(rank, num_ranks, limit, exchange);
  for (size_t i = 0; i < sockets.size(); ++i)
    peers_.emplace_back(rank == 0 ? static_cast<int>(i + 1) : 0, std::move(sockets[i]), silence_limit_);
  try {
    exchange.all_gather([&] {
      start();
      return 0;
    });
  } catch (const StatusError&) {
    stop();
    throw;
  }
}

ControlConnection::~ControlConnection() {
  stop();
}

void ControlConnection::stop() {
  stops_.store(true);
  wake();
  if (watchdog_.joinable()) watchdog_.join();
}

void ControlConnection::deliver_to(const OnVerdict& on_verdict) {
  std::optional<Verdict> verdict;
  {
    const std::scoped_lock lock(mutex_);
    on_verdict_ = on_verdict;
    verdict = verdict_;
  }
  if (verdict) on_verdict(*verdict);
}

void ControlConnection::start() {
  wake_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_)
    fail(EPX_ERROR_SYSTEM, "the watchdog of the control connection cannot be started: no eventfd, errno {}", errno);
  watchdog_ = start_background_thread("the watchdog of the control connection", [this] { watch(); });
}

std::optional<Verdict> ControlConnection::report_timeout(int missing, epx_operation operation, uint64_t sequence) {
  report_stuck(missing, operation, sequence);
  return wait_for_verdict();
}

void ControlConnection::report_stuck(int missing, epx_operation operation, uint64_t sequence) {
  const std::scoped_lock lock(mutex_);
  if (!verdict_) own_report_ = TimeoutReport{rank_, missing, operation, sequence};
  wake();
}

void ControlConnection::withdraw_report() {
  const std::scoped_lock lock(mutex_);
  own_report_.reset();
}

void ControlConnection::report_failure(int culprit, epx_status status, epx_operation operation, uint64_t sequence) {
  const std::scoped_lock lock(mutex_);
  if (!verdict_ && !own_failure_) own_failure_ = Verdict{culprit, Cause::failed, operation, sequence, status};
  wake();
}

std::optional<Verdict> ControlConnection::wait_for_verdict() {
  return wait_for_verdict(kVerdictTime);
}

std::optional<Verdict> ControlConnection::wait_for_lost_rank() {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24); // a clock overflows with the longest timeout_ms
  return wait_for_verdict(std::min(silence_limit_, kLongest) + kVerdictTime);
}

std::optional<Verdict> ControlConnection::wait_for_verdict(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  decided_.wait_for(lock, limit, [this] { return verdict_.has_value(); });
  return verdict_;
}

void ControlConnection::wake() const {
  const uint64_t one = 1;
  if (wake_ && ::write(wake_.get(), &one, sizeof(one)) < 0 && errno != EAGAIN)
    log::transport().warn("the watchdog of the control connection cannot be woken: errno {}", errno);
}

// The watchdog thread.
void ControlConnection::watch() {
  Clock::time_point last_round = Clock::now();
  Clock::time_point next_heartbeat = last_round;
  for (Peer& peer : peers_) { // some time may have passed since they connected
    peer.last_heard = last_round;
    peer.silence_limit = SuspensionAwareDeadline(silence_limit_, last_round);
  }
  std::vector<pollfd> polled;
  while (!stops_.load()) {
    polled.assign(1, {wake_.get(), POLLIN, 0});
    for (const Peer& peer : peers_)
      if (peer.socket)
        polled.push_back({peer.socket.get(), static_cast<short>(peer.outgoing.empty() ? POLLIN : POLLIN | POLLOUT), 0});
    const auto until = std::chrono::ceil<std::chrono::milliseconds>(next_heartbeat - Clock::now());
    ::poll(polled.data(), polled.size(), static_cast<int>(std::max<int64_t>(until.count(), 0)));
    uint64_t wakes = 0;
    while (::read(wake_.get(), &wakes, sizeof(wakes)) > 0) {
    }

    const Clock::time_point now = Clock::now();
    if (const auto gap = now - last_round; gap > kLongGap + heartbeat_interval_)
      for (Peer& peer : peers_)
        peer.last_heard += gap;
    last_round = now;
    receive_all();
    // What the others sent before a report may have come after their sockets were read.
    if (!reports_.empty()) receive_all();
    if (now >= next_heartbeat) {
      next_heartbeat = now + heartbeat_interval_;
      ControlMessage heartbeat;
      const uint64_t progress = progress_.load(std::memory_order_relaxed);
      heartbeat.sequence = progress >> 1;
      heartbeat.value = static_cast<int32_t>(progress & 1);
      for (Peer& peer : peers_)
        if (peer.socket && peer.outgoing.empty()) send(peer, heartbeat); // a peer that reads nothing gets no more of them
    }
    for (Peer& peer : peers_)
      if (peer.socket && !peer.outgoing.empty()) flush(peer);
    judge(now);
  }
  ControlMessage goodbye;
  goodbye.kind = ControlKind::goodbye;
  goodbye.sequence = progress_.load(std::memory_order_relaxed) >> 1; // calls that no heartbeat has told of yet
  for (Peer& peer : peers_)
    if (peer.socket) send(peer, goodbye);
}

void ControlConnection::receive_all() {
  for (Peer& peer : peers_)
    if (peer.socket) receive(peer);
}

void ControlConnection::receive(Peer& peer) {
  while (peer.socket) {
    const ssize_t received = ::recv(peer.socket.get(), peer.incoming.data() + peer.num_incoming,
                                    peer.incoming.size() - peer.num_incoming, MSG_DONTWAIT);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && errno == EAGAIN) return;
    if (received <= 0) {
      lose(peer);
      return;
    }
    peer.num_incoming += static_cast<size_t>(received);
    if (peer.num_incoming < peer.incoming.size()) continue;
    peer.num_incoming = 0;
    ControlMessage message;
    std::memcpy(&message, peer.incoming.data(), sizeof(message));
    handle(peer, message);
  }
}

void ControlConnection::handle(Peer& peer, const ControlMessage& message) {
  if (!is_sound(message, num_ranks_)) {
    log::transport().warn("rank {} sends what is no message of the control connection", peer.rank);
    lose(peer);
    return;
  }
  peer.last_heard = Clock::now();
  peer.silence_limit = SuspensionAwareDeadline(silence_limit_, peer.last_heard);
  switch (message.kind) {
  case ControlKind::heartbeat:
    peer.sequence = message.sequence;
    peer.is_in_call = message.value != 0;
    break;
  case ControlKind::report:
    peer.sequence = std::max(peer.sequence, message.sequence);
    if (rank_ == 0)
      reports_.push_back({peer.rank, message.rank, static_cast<epx_operation>(message.operation), message.sequence});
    break;
  case ControlKind::failure:
    if (rank_ == 0) adopt(verdict_of(message));
    break;
  case ControlKind::verdict:
    if (peer.rank == 0) adopt(verdict_of(message));
    break;
  case ControlKind::goodbye:
    peer.has_left = true;
    peer.sequence = std::max(peer.sequence, message.sequence);
    peer.is_in_call = false;
    peer.socket.close();
    break;
  }
}

// Sends as much as the socket takes, and keeps the rest.
void ControlConnection::send(Peer& peer, const ControlMessage& message) {
  const auto bytes = std::as_bytes(std::span(&message, 1));
  peer.outgoing.insert(peer.outgoing.end(), bytes.begin(), bytes.end());
  flush(peer);
}

void ControlConnection::flush(Peer& peer) {
  const ssize_t sent = ::send(peer.socket.get(), peer.outgoing.data(), peer.outgoing.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent > 0)
    peer.outgoing.erase(peer.outgoing.begin(), peer.outgoing.begin() + sent);
  else if (sent < 0 && errno != EAGAIN && errno != EINTR)
    receive(peer); // its last messages, and then the end of the connection
}

void ControlConnection::lose(Peer& peer) {
  peer.socket.close();
  peer.outgoing.clear();
  if (!peer.has_left) peer.died_at = Clock::now();
}

std::vector<RankState> ControlConnection::states(Clock::time_point now) const {
  std::vector<RankState> states(static_cast<size_t>(num_ranks_));
  const uint64_t progress = progress_.load(std::memory_order_relaxed);
  states[static_cast<size_t>(rank_)].sequence = progress >> 1;
  states[static_cast<size_t>(rank_)].is_in_call = (progress & 1) != 0;
  for (const Peer& peer : peers_)
    states[static_cast<size_t>(peer.rank)] = {peer.has_left, peer.died_at.has_value(),
                                              std::chrono::duration_cast<std::chrono::milliseconds>(now - peer.last_heard),
                                              peer.sequence, peer.is_in_call};
  return states;
}

// Rank 0 decides for all; the others decide only that rank 0 itself is gone.
void ControlConnection::judge(Clock::time_point now) {
  const std::vector<TimeoutReport> reports = std::exchange(reports_, {});
  std::optional<TimeoutReport> report;
  std::optional<Verdict> failure;
  {
    const std::scoped_lock lock(mutex_);
    if (verdict_) return;
    report = own_report_;
    failure = own_failure_;
  }
  Peer* const decider = rank_ == 0 ? nullptr : &peers_.front();
  if (failure && (decider == nullptr || !decider->socket)) {
    adopt(*failure);
    return;
  }
  if (failure && !std::exchange(has_sent_failure_, true)) {
    ControlMessage message = message_of(*failure);
    message.kind = ControlKind::failure;
    send(*decider, message);
  }
  if (report && decider == nullptr) judge_timeout(*report);
  for (const TimeoutReport& of_peer : reports)
    judge_timeout(of_peer);
  if (report && decider != nullptr) {
    const bool is_gone = decider->died_at.has_value() || (decider->socket && now - decider->last_heard > min_silence_);
    // Where nobody knows who is missing, rank 0 is if it has left before this call; else nobody can decide.
    if (decider->has_left && report->missing < 0 && decider->sequence < report->sequence) {
      adopt({0, Cause::late, report->operation, report->sequence});
      return;
    }
    if (is_gone) {
      adopt({0, decider->died_at ? Cause::died : Cause::silent, report->operation, report->sequence});
      return;
    }
    ControlMessage message;
    message.kind = ControlKind::report;
    message.rank = report->missing;
    message.operation = report->operation;
    message.sequence = report->sequence;
    if (decider->socket && now >= next_report_) {
      next_report_ = now + heartbeat_interval_;
      send(*decider, message);
    }
  }
  for (Peer& peer : peers_) {
    const bool died = peer.died_at && now - *peer.died_at >= kDeathGrace;
    const bool is_silent = peer.socket && peer.silence_limit.passed(now);
    if (!died && !is_silent) continue;
    adopt({peer.rank, died ? Cause::died : Cause::silent, EPX_OP_NONE, peer.sequence});
    return;
  }
}

void ControlConnection::judge_timeout(const TimeoutReport& report) {
  if (const auto verdict = find_culprit(states(Clock::now()), report, min_silence_)) adopt(*verdict);
}

// Keeps the first verdict, tells it to all if this is rank 0, and hands it to the group.
void ControlConnection::adopt(const Verdict& verdict) {
  OnVerdict on_verdict;
  {
    const std::scoped_lock lock(mutex_);
    if (verdict_) return;
    verdict_ = verdict;
    on_verdict = on_verdict_;
  }
  if (verdict.cause == Cause::failed)
    log::transport().info("the control connection: rank {} has ended the group: {}", verdict.culprit,
                          name_of(verdict.status));
  else if (verdict.operation == EPX_OP_NONE)
    log::transport().warn("the control connection: rank {} {}; the last call that it began is {}", verdict.culprit,
                          describe(verdict.cause), verdict.sequence);
  else
    log::transport().warn("the control connection: a wait in {} (call {}) ran out: rank {} {}", name_of(verdict.operation),
                          verdict.sequence, verdict.culprit, describe(verdict.cause));
  ControlMessage message = message_of(verdict);
  if (rank_ != 0) message.kind = ControlKind::failure; // of rank 0, which finds it when it is continued
  if (rank_ == 0 || verdict.culprit == 0)
    for (Peer& peer : peers_)
      if (peer.socket) send(peer, message);
  if (on_verdict) on_verdict(verdict);
  decided_.notify_all();
}

} // namespace epx
