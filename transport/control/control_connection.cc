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
#include "base/resource_limits.h"
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
  message.reporter = verdict.reporter;
  message.other_rank = verdict.other_rank;
  message.other_operation = verdict.other_operation;
  return message;
}

Verdict verdict_of(const ControlMessage& message) {
  return {message.rank,
          static_cast<Cause>(message.cause),
          static_cast<epx_operation>(message.operation),
          message.sequence,
          static_cast<epx_status>(message.value),
          message.reporter,
          message.other_rank,
          static_cast<epx_operation>(message.other_operation)};
}

bool is_sound(const ControlMessage& message, int num_ranks) {
  const auto is_rank_or_none = [&](int rank) { return rank >= -1 && rank < num_ranks; };
  const auto is_operation = [](int operation) {
    return operation >= EPX_OP_NONE && operation <= CallProgress::kMaxOperation;
  };
  if (message.magic != ControlMessage::kMagic || !is_rank_or_none(message.rank) || !is_operation(message.operation))
    return false;
  switch (message.kind) {
  case ControlKind::heartbeat:
  case ControlKind::goodbye:
    return true;
  case ControlKind::report:
    return message.value >= 0 && message.value <= static_cast<int32_t>(ReportKind::connection);
  case ControlKind::verdict:
  case ControlKind::failure:
    break;
  default:
    return false;
  }
  const auto cause = static_cast<Cause>(message.cause);
  const bool blames_nobody = cause == Cause::network || cause == Cause::out_of_sequence;
  const bool has_culprit = cause == Cause::failed || (message.rank >= 0) != blames_nobody;
  const bool has_reporter = cause < Cause::failed || message.reporter >= 0;
  const bool has_both = cause != Cause::out_of_sequence || message.other_rank >= 0;
  return cause >= Cause::died && cause <= Cause::out_of_sequence && has_culprit && has_reporter && has_both &&
         is_rank_or_none(message.reporter) && is_rank_or_none(message.other_rank) &&
         is_operation(message.other_operation) && message.value > EPX_SUCCESS && message.value <= EPX_ERROR_INTERNAL;
}

std::string log_text(const Verdict& verdict) {
  if (verdict.cause == Cause::failed)
    return fmt::format("rank {} has ended the group: {}", verdict.reporter, name_of(verdict.status));
  if (verdict.cause == Cause::out_of_sequence)
    return fmt::format("call {} is {} on rank {} and {} on rank {}", verdict.sequence, name_of(verdict.operation),
                       verdict.reporter, name_of(verdict.other_operation), verdict.other_rank);
  if (verdict.operation == EPX_OP_NONE)
    return fmt::format("rank {} {}; the last call that it began is {}", verdict.culprit, describe(verdict.cause),
                       verdict.sequence);
  return fmt::format("{} (call {}) cannot go on: rank {} {}", name_of(verdict.operation), verdict.sequence,
                     verdict.cause == Cause::network ? verdict.reporter : verdict.culprit, describe(verdict.cause));
}

} // namespace

ControlConnection::ControlConnection(int rank, int num_ranks, std::chrono::milliseconds timeout, Exchange& exchange)
    : rank_(rank), num_ranks_(num_ranks), silence_limit_(std::max<std::chrono::milliseconds>(timeout, kMinSilenceLimit)),
      heartbeat_interval_(heartbeat_interval(timeout, exchange)),
      min_silence_(std::clamp<std::chrono::milliseconds>(timeout / 2, std::max(kMinSilenceLimit, 4 * heartbeat_interval_),
                                                         1'000ms + 2 * heartbeat_interval_)),
      time_to_tell_(std::max<std::chrono::milliseconds>(min_silence_, kDeathGrace) + 2 * heartbeat_interval_) {
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
    fail(EPX_ERROR_SYSTEM, "the watchdog of the control connection cannot be started: no eventfd: {}",
         describe_errno(errno));
  watchdog_ = start_background_thread("the watchdog of the control connection", [this] { watch(); });
}

std::optional<Verdict> ControlConnection::report_timeout(int missing, epx_operation operation, uint64_t sequence) {
  report_stuck(missing, operation, sequence);
  return wait_for_verdict();
}

void ControlConnection::report_stuck(int missing, epx_operation operation, uint64_t sequence, ReportKind kind) {
  const std::scoped_lock lock(mutex_);
  if (verdict_ || (own_report_ && own_report_->kind == ReportKind::connection)) return;
  own_report_ = WaitReport{rank_, missing, operation, sequence, kind};
  is_undecided_ = false;
  wake();
}

void ControlConnection::withdraw_report() {
  const std::scoped_lock lock(mutex_);
  if (own_report_ && own_report_->kind != ReportKind::connection) own_report_.reset();
}

std::optional<Verdict> ControlConnection::report_broken_connection(int peer, epx_operation operation, uint64_t sequence) {
  report_stuck(peer, operation, sequence, ReportKind::connection);
  return wait_for_verdict(time_to_tell_ + kVerdictTime);
}

void ControlConnection::report_failure(int culprit, epx_status status, epx_operation operation, uint64_t sequence) {
  report(Verdict{culprit, Cause::failed, operation, sequence, status, rank_});
}

void ControlConnection::report_hang(epx_operation operation, uint64_t sequence) {
  report(Verdict{rank_, Cause::hangs, operation, sequence, EPX_ERROR_TIMEOUT, rank_});
}

void ControlConnection::report(const Verdict& failure) {
  const std::scoped_lock lock(mutex_);
  if (!verdict_ && !own_failure_) own_failure_ = failure;
  wake();
}

std::optional<Verdict> ControlConnection::wait_for_verdict() {
  return wait_for_verdict(kVerdictTime);
}

std::optional<Verdict> ControlConnection::wait_for_verdict(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  decided_.wait_for(lock, limit, [this] { return verdict_.has_value() || is_undecided_; });
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
    Clock::time_point next_round = next_heartbeat;
    for (const Peer& peer : peers_)
      if (peer.died_at && *peer.died_at + kDeathGrace > last_round)
        next_round = std::min(next_round, *peer.died_at + kDeathGrace);
    const auto until = std::chrono::ceil<std::chrono::milliseconds>(next_round - Clock::now());
    ::poll(polled.data(), polled.size(), static_cast<int>(std::max<int64_t>(until.count(), 0)));
    uint64_t wakes = 0;
    while (::read(wake_.get(), &wakes, sizeof(wakes)) > 0) {
    }

    const Clock::time_point now = Clock::now();
    if (const auto gap = now - last_round;
        gap > std::min<Clock::duration>(kLongGap, min_silence_ / 2) + heartbeat_interval_)
      for (Peer& peer : peers_)
        peer.last_heard += gap;
    last_round = now;
    receive_all();
    // What the others sent before a report may have come after their sockets were read.
    if (!reports_.empty()) receive_all();
    if (now >= next_heartbeat) {
      next_heartbeat = now + heartbeat_interval_;
      ControlMessage heartbeat;
      const CallProgress progress = this->progress();
      heartbeat.sequence = progress.sequence;
      heartbeat.operation = progress.operation;
      heartbeat.value = progress.is_in_call ? 1 : 0;
      for (Peer& peer : peers_)
        if (peer.socket && peer.outgoing.empty()) send(peer, heartbeat); // a peer that reads nothing gets no more of them
      if (rank_ == 0)
        if (const auto verdict = find_other_operation(states(now))) adopt(*verdict);
    }
    for (Peer& peer : peers_)
      if (peer.socket && !peer.outgoing.empty()) flush(peer);
    judge(now);
  }
  ControlMessage goodbye;
  goodbye.kind = ControlKind::goodbye;
  goodbye.sequence = progress().sequence; // calls that no heartbeat has told of yet
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
    peer.operation = static_cast<epx_operation>(message.operation);
    break;
  case ControlKind::report:
    peer.set_sequence(message.sequence);
    if (rank_ == 0)
      reports_.push_back({peer.rank, message.rank, static_cast<epx_operation>(message.operation), message.sequence,
                          static_cast<ReportKind>(message.value)});
    break;
  case ControlKind::failure:
    if (rank_ == 0) adopt(verdict_of(message));
    break;
  case ControlKind::verdict:
    if (peer.rank == 0) adopt(verdict_of(message));
    break;
  case ControlKind::goodbye:
    peer.has_left = true;
    peer.set_sequence(message.sequence);
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
  const CallProgress progress = this->progress();
  RankState& own = states[static_cast<size_t>(rank_)];
  own.sequence = progress.sequence;
  own.is_in_call = progress.is_in_call;
  own.operation = progress.operation;
  for (const Peer& peer : peers_)
    states[static_cast<size_t>(peer.rank)] = {peer.has_left,
                                              peer.died_at.has_value(),
                                              std::chrono::duration_cast<std::chrono::milliseconds>(now - peer.last_heard),
                                              peer.sequence,
                                              peer.is_in_call,
                                              peer.operation};
  return states;
}

// Rank 0 decides for all; the others decide only that rank 0 itself is gone.
void ControlConnection::judge(Clock::time_point now) {
  const std::vector<WaitReport> reports = std::exchange(reports_, {});
  std::optional<WaitReport> report;
  std::optional<Verdict> failure;
  {
    const std::scoped_lock lock(mutex_);
    if (verdict_) return;
    report = own_report_;
    failure = own_failure_;
  }
  Peer* const decider = rank_ == 0 ? nullptr : &peers_.front();
  if (failure && (decider == nullptr || decider->has_left)) {
    adopt(*failure);
    return;
  }
  // What follows from the death of rank 0 is not the verdict: that is the death, once its grace is over.
  if (failure && decider->socket && !std::exchange(has_sent_failure_, true)) {
    ControlMessage message = message_of(*failure);
    message.kind = ControlKind::failure;
    send(*decider, message);
  }
  if (report && decider == nullptr) judge_report(*report, now);
  for (const WaitReport& of_peer : reports)
    judge_report(of_peer, now);
  if (report && decider != nullptr) report_to(*decider, *report, now);
  for (Peer& peer : peers_) {
    const bool died = peer.died_at && now - *peer.died_at >= kDeathGrace;
    const bool is_silent = peer.socket && peer.silence_limit.passed(now);
    if (!died && !is_silent) continue;
    adopt({peer.rank, died ? Cause::died : Cause::silent, EPX_OP_NONE, peer.sequence});
    return;
  }
}

// Rank 0. Peers send a report again and again until there is a verdict.
void ControlConnection::judge_report(const WaitReport& report, Clock::time_point now) {
  const bool is_broken = report.kind == ReportKind::connection;
  if (is_broken && !first_broken_) first_broken_ = now;
  if (const auto verdict = find_culprit(states(Clock::now()), report, min_silence_))
    adopt(*verdict);
  else if (report.kind == ReportKind::last || (is_broken && now - *first_broken_ >= time_to_tell_))
    adopt(blame_network(report));
}

// The other ranks: what rank 0 has to judge, unless it cannot any more.
void ControlConnection::report_to(Peer& decider, const WaitReport& report, Clock::time_point now) {
  if (decider.died_at || (decider.socket && now - decider.last_heard > min_silence_)) {
    adopt({0, decider.died_at ? Cause::died : Cause::silent, report.operation, report.sequence});
  } else if (decider.has_left) {
    const bool knows_missing = report.kind == ReportKind::timeout && report.missing >= 0;
    if (!knows_missing && decider.sequence < report.sequence)
      adopt({0, Cause::late, report.operation, report.sequence});
    else if (report.kind != ReportKind::timeout)
      adopt(blame_network(report));
    else if (knows_missing)
      leave_undecided();
  } else if (now >= next_report_) {
    ControlMessage message;
    message.kind = ControlKind::report;
    message.rank = report.missing;
    message.operation = report.operation;
    message.value = static_cast<int32_t>(report.kind);
    message.sequence = report.sequence;
    next_report_ = now + heartbeat_interval_;
    send(decider, message);
  }
}

// Rank 0 has left and cannot judge the report of this rank, which has evidence of its own.
void ControlConnection::leave_undecided() {
  {
    const std::scoped_lock lock(mutex_);
    is_undecided_ = true;
  }
  decided_.notify_all();
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
  log::transport().log(verdict.cause == Cause::failed ? log::Level::kInfo : log::Level::kWarn, "the control connection: {}",
                       log_text(verdict));
  ControlMessage message = message_of(verdict);
  if (rank_ != 0) message.kind = ControlKind::failure; // of rank 0, which finds it when it is continued
  if (rank_ == 0 || verdict.culprit == 0)
    for (Peer& peer : peers_)
      if (peer.socket) send(peer, message);
  if (on_verdict) on_verdict(verdict);
  decided_.notify_all();
}

} // namespace epx
