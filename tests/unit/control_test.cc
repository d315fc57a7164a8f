// SPDX-License-Identifier: Apache-2.0
// These tests run the control connection between ranks that are threads. Ranks that are killed or stopped are in
// tests/multiprocess/control_faults.cc.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "base/error.h"
#include "tests/support/check.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/meeting.h"
#include "tests/support/run_ranks.h"
#include "transport/bootstrap/bootstrap_exchange.h"
#include "transport/control/control_connection.h"
#include "transport/control/control_join.h"
#include "transport/control/control_socket.h"
#include "transport/control/culprit.h"
#include "transport/control/keyed_hash.h"

namespace epx::test {
// While it is set, it is called when a recv() of a thread of the library has found nothing in a socket.
std::atomic<const std::function<void(int fd)>*> g_after_empty_recv{nullptr};
} // namespace epx::test

// Stands before the C library's, so that a test can send something between two of the library's calls.
extern "C" ssize_t recv(int fd, void* bytes, size_t size, int flags) {
  using Recv = ssize_t (*)(int, void*, size_t, int);
  static const auto real = reinterpret_cast<Recv>(::dlsym(RTLD_NEXT, "recv"));
  const ssize_t received = real(fd, bytes, size, flags);
  const int error = errno;
  if (const auto* const then = epx::test::g_after_empty_recv.load(); received < 0 && error == EAGAIN && then != nullptr)
    (*then)(fd);
  errno = error;
  return received;
}

namespace epx {
namespace {

using namespace std::chrono_literals;
using test::Meeting;
using Clock = std::chrono::steady_clock;

TEST_CASE("the keyed hash is SipHash-2-4") {
  // The key is 00 01 .. 0f, and message n is 00 01 .. n - 1: vectors of the authors' reference implementation.
  const HashKey key{0x0706050403020100, 0x0f0e0d0c0b0a0908};
  std::array<std::byte, 15> message;
  for (size_t i = 0; i < message.size(); ++i)
    message[i] = std::byte(i);
  CHECK(keyed_hash(key, std::span(message).first(0)) == 0x726fdb47dd0e0e31);
  CHECK(keyed_hash(key, std::span(message).first(8)) == 0x93f5f5799a932462);
  CHECK(keyed_hash(key, message) == 0xa129ca6149be45e5);
}

// ---- Who is the culprit ----

RankState at(uint64_t sequence, std::chrono::milliseconds silence = 0ms) {
  RankState state;
  state.sequence = sequence;
  state.silence = silence;
  return state;
}

RankState dead(uint64_t sequence) {
  RankState state = at(sequence);
  state.has_died = true;
  return state;
}

Verdict verdict_of(const std::vector<RankState>& states, int missing = 1) {
  return find_culprit(states, {0, missing, EPX_OP_DISPATCH, 7}, 1000ms).value();
}

RankState in_call(uint64_t sequence, std::chrono::milliseconds silence = 0ms) {
  RankState state = at(sequence, silence);
  state.is_in_call = true;
  return state;
}

TEST_CASE("the culprit has died, or is silent, or has come least far, in this order") {
  const auto is = [](const Verdict& verdict, int culprit, Cause cause) {
    return verdict.culprit == culprit && verdict.cause == cause && verdict.operation == EPX_OP_DISPATCH &&
           verdict.sequence == 7;
  };
  CHECK(is(verdict_of({at(7), at(6), at(5, 4000ms), dead(7)}), 3, Cause::died));
  CHECK(is(verdict_of({at(7), at(6), at(5, 4000ms), at(7, 5000ms)}), 3, Cause::silent));
  CHECK(is(verdict_of({at(7), at(6), at(5, 900ms), at(7)}), 2, Cause::late));
  CHECK(is(verdict_of({at(7), at(6), at(6), at(7)}), 1, Cause::late));
  CHECK(is(verdict_of({at(7), at(7), at(7), at(7)}, 2), 2, Cause::late)); // it came, and hangs within the call
  CHECK(is(verdict_of({at(0, 9000ms), at(6)}), 1, Cause::late));          // the rank that reports is none
  RankState left = at(6, 9000ms);
  left.has_left = true;
  CHECK(is(verdict_of({at(7), at(7, 2000ms), left}), 1, Cause::silent));
  CHECK(is(verdict_of({at(7), at(7), left}), 2, Cause::late)); // it has destroyed its group too early
}

TEST_CASE("where nobody knows who is missing, the culprit is no rank within a call that may be a victim") {
  const auto culprit_of = [](const std::vector<RankState>& states) {
    const auto verdict = find_culprit(states, {0, -1, EPX_OP_DISPATCH, 7}, 1000ms);
    return verdict ? verdict->culprit : -1;
  };
  CHECK(culprit_of({in_call(7), in_call(6), at(6), in_call(7)}) == 2);
  CHECK(culprit_of({in_call(7), at(5), at(6), in_call(7)}) == 1);
  CHECK(culprit_of({in_call(7), in_call(6), in_call(6), in_call(7)}) == -1); // these two will report as well
  CHECK(culprit_of({in_call(7), in_call(7), at(7), in_call(7)}) == -1);      // one has ended the call already
  CHECK(culprit_of({at(6), in_call(7), in_call(7), in_call(7)}) == -1);      // the rank that reports is none
  CHECK(culprit_of({in_call(7), at(6), in_call(7, 2000ms), in_call(7)}) == 2);
  CHECK(culprit_of({in_call(7), at(6), in_call(7, 2000ms), dead(7)}) == 3);
}

TEST_CASE("a broken connection is the fault of a rank that died, is silent, or left before the call, and else of none") {
  const auto culprit_of = [](const std::vector<RankState>& states) {
    const auto verdict = find_culprit(states, {0, 1, EPX_OP_DISPATCH, 7, ReportKind::connection}, 1000ms);
    return verdict ? verdict->culprit : -1;
  };
  RankState left = at(6), left_later = at(7);
  left.has_left = left_later.has_left = true;
  CHECK(culprit_of({in_call(7), in_call(7), in_call(7), in_call(7)}) == -1);
  CHECK(culprit_of({in_call(7), in_call(6), at(5), in_call(7)}) == -1); // that they are late breaks no connection
  CHECK(culprit_of({in_call(7), at(6), left_later, in_call(7)}) == -1);
  CHECK(culprit_of({in_call(7), at(5), left, in_call(7)}) == 2);
  CHECK(culprit_of({in_call(7), in_call(7), left, in_call(7, 2000ms)}) == 3);
  CHECK(culprit_of({in_call(7), in_call(7, 2000ms), dead(7), in_call(7)}) == 2);
  const Verdict nobody = blame_network({0, 1, EPX_OP_DISPATCH, 7, ReportKind::connection});
  CHECK(nobody.culprit == -1);
  CHECK(nobody.cause == Cause::network);
  CHECK(nobody.status == EPX_ERROR_SYSTEM);
  CHECK(nobody.reporter == 0);
  CHECK(nobody.other_rank == 1);
}

TEST_CASE("the last report blames a rank within an earlier call, and none when all have come") {
  const auto culprit_of = [](const std::vector<RankState>& states) {
    const auto verdict = find_culprit(states, {0, -1, EPX_OP_DISPATCH, 7, ReportKind::last}, 1000ms);
    return verdict ? verdict->culprit : -1;
  };
  CHECK(culprit_of({in_call(7), in_call(7), in_call(6), in_call(7)}) == 2);
  CHECK(culprit_of({in_call(7), in_call(7), in_call(8), at(7)}) == -1);
  CHECK(blame_network({0, -1, EPX_OP_DISPATCH, 7, ReportKind::last}).status == EPX_ERROR_TIMEOUT);
}

TEST_CASE("ranks that have begun different operations as the same call are out of sequence") {
  const auto makes = [](uint64_t sequence, epx_operation operation) {
    RankState state = at(sequence);
    state.operation = operation;
    return state;
  };
  const RankState unknown = at(7);
  CHECK_FALSE(find_other_operation(std::vector{makes(7, EPX_OP_PREPARE), makes(7, EPX_OP_PREPARE), unknown}));
  CHECK_FALSE(find_other_operation(std::vector{makes(6, EPX_OP_PREPARE), makes(7, EPX_OP_DISPATCH), unknown}));
  const auto verdict = find_other_operation(
      std::vector{unknown, makes(8, EPX_OP_COMBINE), makes(7, EPX_OP_PREPARE), makes(7, EPX_OP_DISPATCH)});
  REQUIRE(verdict);
  CHECK(verdict->culprit == -1);
  CHECK(verdict->cause == Cause::out_of_sequence);
  CHECK(verdict->status == EPX_ERROR_OUT_OF_SEQUENCE);
  CHECK(verdict->sequence == 7);
  CHECK(verdict->reporter == 2);
  CHECK(verdict->operation == EPX_OP_PREPARE);
  CHECK(verdict->other_rank == 3);
  CHECK(verdict->other_operation == EPX_OP_DISPATCH);
}

// ---- Sockets ----

TEST_CASE("addresses: some, no two alike, loopback last") {
  const std::vector<SocketAddress> addresses = local_addresses();
  REQUIRE(!addresses.empty());
  CHECK(addresses.size() <= kMaxAddresses);
  CHECK(std::set(addresses.begin(), addresses.end()).size() == addresses.size());
  const std::string last = format(addresses.back());
  CHECK((last == "127.0.0.1" || last == "::1"));
}

TEST_CASE("a connection that is refused says so at once") {
  uint16_t port = 0;
  listen_anywhere(port).close();
  SocketAddress loopback{};
  loopback[10] = loopback[11] = 0xff;
  loopback[12] = 127;
  loopback[15] = 1;
  std::string why;
  const auto begin = Clock::now();
  CHECK_FALSE(connect_to(loopback, port, Deadline(5s), why));
  CHECK(why == "Connection refused");
  CHECK(Clock::now() - begin < 1s);
}

// ---- Ranks as threads ----

constexpr auto kLong = 60'000ms;

// Runs `body` as each rank, with an exchange over all of them.
void each_rank(int num_ranks, const std::function<void(int rank, Exchange& exchange)>& body) {
  test::LocalRendezvous rendezvous(num_ranks);
  test::run_threads(num_ranks, [&](int rank) {
    const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
    BootstrapExchange exchange(bootstrap, kLong.count());
    body(rank, exchange);
  });
}

// A rank's control connection, and the verdict that it has been told.
class Member {
public:
  Member(int rank, int num_ranks, std::chrono::milliseconds timeout, Exchange& exchange) : rank_(rank) {
    control_.emplace(rank, num_ranks, timeout, exchange);
    control_->deliver_to([this](const Verdict& found) {
      const std::scoped_lock lock(mutex_);
      verdict_ = found;
      ++calls_;
    });
  }

  ControlConnection* operator->() { return &*control_; }
  void leave() { control_.reset(); }

  Verdict wait() {
    const auto deadline = Clock::now() + 20s;
    while (calls_ == 0) {
      test::check(Clock::now() < deadline, "no verdict has come");
      std::this_thread::sleep_for(1ms);
    }
    const std::scoped_lock lock(mutex_);
    return *verdict_;
  }
  // Waits for the verdict, which must have this culprit and cause. Returns it.
  Verdict expect(int culprit, Cause cause) {
    const Verdict verdict = wait();
    check(verdict.culprit == culprit && verdict.cause == cause);
    return verdict;
  }
  // What else the verdict must be.
  void check(bool is_right) const {
    test::check(is_right, "rank {} is told: rank {} {}, call {}", rank_, verdict_->culprit, describe(verdict_->cause),
                verdict_->sequence);
  }
  void check_num_verdicts(int expected) const { test::check_equal(calls_.load(), expected, "the number of verdicts"); }

private:
  int rank_;
  std::mutex mutex_;
  std::optional<Verdict> verdict_;
  std::atomic<int> calls_{0};
  std::optional<ControlConnection> control_; // whose watchdog ends before what it calls
};

TEST_CASE("a rank that is late is named on every rank, whoever reports it") {
  for (const int num_ranks : {2, 3, 7}) {
    for (const int reporter : {0, num_ranks - 1}) {
      const int late = reporter == 0 ? num_ranks - 1 : 0;
      Meeting told(num_ranks), decided(num_ranks);
      each_rank(num_ranks, [&](int rank, Exchange& exchange) {
        Member member(rank, num_ranks, kLong, exchange);
        member->begin_call(rank == late ? 3 : 4);
        told.wait();
        std::this_thread::sleep_for(1200ms); // two heartbeats
        if (rank == reporter) {
          const std::optional<Verdict> verdict = member->report_timeout(late, EPX_OP_COMBINE, 4);
          test::check(verdict && verdict->culprit == late, "the reporting rank got another verdict");
        }
        const Verdict verdict = member.expect(late, Cause::late);
        member.check(verdict.operation == EPX_OP_COMBINE && verdict.sequence == 4);
        decided.wait();
        member.check_num_verdicts(1);
      });
    }
  }
}

TEST_CASE("a report without a missing rank is decided once somebody knows one, and may be withdrawn") {
  constexpr int kRanks = 3;
  Meeting told(kRanks), undecided(kRanks), decided(kRanks);
  each_rank(kRanks, [&](int rank, Exchange& exchange) {
    Member member(rank, kRanks, 400ms, exchange);
    member->set_progress(4, true);
    told.wait();
    std::this_thread::sleep_for(200ms); // ten heartbeats
    if (rank != 2) member->report_stuck(-1, EPX_OP_COMBINE, 4);
    std::this_thread::sleep_for(600ms);
    member.check_num_verdicts(0);
    member->withdraw_report();
    undecided.wait();
    if (rank == 2) member->set_progress(4, false); // it has ended the call, and does not begin the next one
    if (rank == 1) member->set_progress(5, true);
    std::this_thread::sleep_for(200ms);
    if (rank == 1) member->report_stuck(-1, EPX_OP_DISPATCH, 5);
    const Verdict verdict = member.expect(2, Cause::late);
    member.check(verdict.sequence == 5);
    decided.wait();
  });
}

uint16_t port_of(int fd, int (*get_name)(int, sockaddr*, socklen_t*)) {
  sockaddr_in6 address{};
  socklen_t size = sizeof(address);
  test::check(get_name(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0, "a socket has no name");
  return ntohs(address.sin6_port); // at the same place in IPv4's
}

void send_message(int fd, ControlKind kind, uint64_t sequence) {
  ControlMessage message;
  message.kind = kind;
  message.operation = EPX_OP_COMBINE;
  message.sequence = sequence;
  if (kind == ControlKind::heartbeat) message.value = 1; // in that call
  if (kind == ControlKind::report) message.rank = -1;
  if (kind == ControlKind::failure) {
    message.cause = static_cast<int32_t>(Cause::failed);
    message.value = EPX_ERROR_SYSTEM;
    message.reporter = 2;
  }
  test::check(send_all(fd, std::as_bytes(std::span(&message, 1)), Deadline(5s)), "a message was not sent");
}

// Rank 0 reads the sockets of its peers one after the other. Behind its look at that of rank 1, which is empty, rank 1 tells
// that it has come to call 4, and then rank 2 that it waits there: nobody is late. Two looks later that is judged, and rank 2
// ends the group.
TEST_CASE("a report is judged by all that was sent before it, in whatever order the sockets are read") {
  constexpr int kRanks = 3;
  std::atomic<int> heartbeat_fd{-1}, report_fd{-1};
  Meeting joined(kRanks), judged(kRanks);
  each_rank(kRanks, [&](int rank, Exchange& exchange) {
    if (rank == 0) {
      int looks = 0;
      uint16_t port = 0;
      const std::function<void(int)> send_between = [&](int fd) {
        if (port_of(fd, ::getpeername) != port || ++looks == 2) return;
        if (looks == 1) send_message(heartbeat_fd, ControlKind::heartbeat, 4);
        if (looks <= 3) send_message(report_fd, looks == 1 ? ControlKind::report : ControlKind::failure, 4);
      };
      Member member(0, kRanks, kLong, exchange);
      member->set_progress(4, true);
      joined.wait();
      port = port_of(heartbeat_fd, ::getsockname);
      test::g_after_empty_recv = &send_between;
      const Verdict verdict = member.wait();
      judged.wait();
      test::g_after_empty_recv = nullptr;
      member.check(verdict.cause == Cause::failed);
      return;
    }
    exchange.all_gather([] { return int64_t{60'000}; }); // timeouts; then the join, and the start of the watchdogs
    const std::vector<FileDescriptor> sockets = join_control(rank, kRanks, 20'000ms, exchange);
    exchange.all_gather([] { return 0; });
    (rank == 1 ? heartbeat_fd : report_fd) = sockets.front().get();
    joined.wait();
    judged.wait();
  });
}

TEST_CASE("a rank that ends the group tells all others why") {
  constexpr int kRanks = 3;
  for (const int ends : {0, 2}) {
    Meeting decided(kRanks);
    each_rank(kRanks, [&](int rank, Exchange& exchange) {
      Member member(rank, kRanks, kLong, exchange);
      if (rank == ends) member->report_failure(1, EPX_ERROR_SYSTEM, EPX_OP_DISPATCH, 9);
      const Verdict verdict = member.expect(1, Cause::failed);
      member.check(verdict.status == EPX_ERROR_SYSTEM && verdict.operation == EPX_OP_DISPATCH && verdict.sequence == 9 &&
                   verdict.reporter == ends);
      decided.wait();
    });
  }
}

// Rank 0 has the sockets, and no control connection: closing them is its death. What rank 1 then finds in its node is a
// consequence, whether it tells it before or after it notices.
TEST_CASE("where rank 0 dies, that is the verdict, and no failure that follows from it") {
  constexpr int kRanks = 3;
  for (const auto delay : {0ms, 300ms}) {
    Meeting joined(kRanks), decided(kRanks);
    each_rank(kRanks, [&](int rank, Exchange& exchange) {
      if (rank == 0) {
        exchange.all_gather([] { return int64_t{60'000}; });
        std::vector<FileDescriptor> sockets = join_control(0, kRanks, 20'000ms, exchange);
        exchange.all_gather([] { return 0; });
        joined.wait();
        sockets.clear();
        decided.wait();
        return;
      }
      Member member(rank, kRanks, kLong, exchange);
      joined.wait();
      std::this_thread::sleep_for(delay);
      if (rank == 1) member->report_failure(2, EPX_ERROR_ABORTED, EPX_OP_DISPATCH, 9);
      const Verdict verdict = member.expect(0, Cause::died);
      member.check(verdict.status == EPX_ERROR_TIMEOUT);
      decided.wait();
    });
  }
}

TEST_CASE("a rank that hangs says so, and is named by all") {
  constexpr int kRanks = 3;
  for (const int hangs : {0, 2}) {
    Meeting decided(kRanks);
    each_rank(kRanks, [&](int rank, Exchange& exchange) {
      Member member(rank, kRanks, kLong, exchange);
      if (rank == hangs) member->report_hang(EPX_OP_DISPATCH, 9);
      const Verdict verdict = member.expect(hangs, Cause::hangs);
      member.check(verdict.status == EPX_ERROR_TIMEOUT && verdict.operation == EPX_OP_DISPATCH && verdict.sequence == 9 &&
                   verdict.reporter == hangs);
      decided.wait();
    });
  }
}

TEST_CASE("a broken connection that nobody's death explains is nobody's fault, on every rank alike") {
  constexpr int kRanks = 3;
  for (const int reporter : {0, 2}) {
    Meeting told(kRanks), decided(kRanks);
    each_rank(kRanks, [&](int rank, Exchange& exchange) {
      Member member(rank, kRanks, 400ms, exchange);
      member->set_progress(4, true, EPX_OP_COMBINE);
      told.wait();
      if (rank == reporter) {
        const auto begin = Clock::now();
        const std::optional<Verdict> verdict = member->report_broken_connection(1, EPX_OP_COMBINE, 4);
        test::check(verdict && verdict->cause == Cause::network, "the reporting rank got another verdict");
        const auto waited = Clock::now() - begin;
        test::check(waited >= 1s, "the verdict came after {} ms, before a death would have been told", waited / 1ms);
      }
      const Verdict verdict = member.expect(-1, Cause::network);
      member.check(verdict.status == EPX_ERROR_SYSTEM && verdict.reporter == reporter && verdict.other_rank == 1 &&
                   verdict.sequence == 4);
      decided.wait();
      member.check_num_verdicts(1);
    });
  }
}

TEST_CASE("where rank 0 has left, a rank decides about a broken connection itself, and at once") {
  constexpr int kRanks = 3;
  for (const bool has_made_call : {false, true}) {
    Meeting gone(kRanks), decided(kRanks);
    each_rank(kRanks, [&](int rank, Exchange& exchange) {
      Member member(rank, kRanks, kLong, exchange);
      member->set_progress(rank == 0 && !has_made_call ? 3 : 4, rank != 0, EPX_OP_COMBINE);
      if (rank == 0) member.leave();
      gone.wait();
      if (rank == 1) {
        const auto begin = Clock::now();
        const std::optional<Verdict> verdict = member->report_broken_connection(2, EPX_OP_COMBINE, 4);
        const auto waited = Clock::now() - begin;
        test::check(waited < 900ms, "the verdict came after {} ms", waited / 1ms);
        test::check(verdict && verdict->culprit == (has_made_call ? -1 : 0) &&
                        verdict->cause == (has_made_call ? Cause::network : Cause::late),
                    "the verdict is another one");
      }
      decided.wait();
    });
  }
}

TEST_CASE("the last report always gets a verdict, also where rank 0 has left") {
  constexpr int kRanks = 3;
  for (const bool has_left : {false, true}) {
    Meeting gone(kRanks), decided(kRanks);
    each_rank(kRanks, [&](int rank, Exchange& exchange) {
      Member member(rank, kRanks, 400ms, exchange);
      member->set_progress(4, true, EPX_OP_COMBINE);
      if (rank == 0 && has_left) member.leave();
      gone.wait();
      if (rank != 0) std::this_thread::sleep_for(200ms); // ten heartbeats
      if (rank == 1) member->report_stuck(-1, EPX_OP_COMBINE, 4, ReportKind::last);
      if (rank == 1 || (rank == 0 && !has_left)) {
        const Verdict verdict = member.expect(-1, Cause::network);
        member.check(verdict.status == EPX_ERROR_TIMEOUT && verdict.reporter == 1);
      }
      decided.wait();
    });
  }
}

TEST_CASE("ranks that tell different operations of the same call are out of sequence at once, on every rank") {
  constexpr int kRanks = 3;
  Meeting told(kRanks); // by rank 0, which compares the others with itself
  each_rank(kRanks, [&](int rank, Exchange& exchange) {
    Member member(rank, kRanks, kLong, exchange);
    if (rank == 0) member->set_progress(4, true, EPX_OP_PREPARE);
    told.wait();
    if (rank != 0) member->set_progress(4, true, rank == 2 ? EPX_OP_DISPATCH : EPX_OP_PREPARE);
    const auto begin = Clock::now();
    const Verdict verdict = member.expect(-1, Cause::out_of_sequence);
    member.check(verdict.sequence == 4 && verdict.reporter == 0 && verdict.operation == EPX_OP_PREPARE &&
                 verdict.other_rank == 2 && verdict.other_operation == EPX_OP_DISPATCH);
    test::check(Clock::now() - begin < 5s, "the verdict has waited for more than heartbeats");
  });
}

TEST_CASE("a rank whose timeout is longer than that of others is not taken for a silent one") {
  constexpr int kRanks = 3, kLate = 2;
  Meeting told(kRanks), decided(kRanks);
  each_rank(kRanks, [&](int rank, Exchange& exchange) {
    Member member(rank, kRanks, rank == 1 ? kLong : 200ms, exchange); // kLong alone: a heartbeat each 500 ms
    member->begin_call(rank == kLate ? 3 : 4);
    told.wait();
    std::this_thread::sleep_for(450ms);
    if (rank == 0) member->report_timeout(kLate, EPX_OP_COMBINE, 4);
    member.expect(kLate, Cause::late);
    decided.wait();
  });
}

TEST_CASE("ranks that leave are not taken for dead, and reports to nobody end") {
  constexpr int kRanks = 3;
  Meeting gone(kRanks);
  each_rank(kRanks, [&](int rank, Exchange& exchange) {
    Member member(rank, kRanks, kLong, exchange);
    if (rank != 1) member.leave();
    gone.wait();
    if (rank != 1) return;
    std::this_thread::sleep_for(1500ms); // longer than a death would take to be told
    member.check_num_verdicts(0);
    const auto begin = Clock::now();
    test::check(!member->report_timeout(2, EPX_OP_PREPARE, 1), "a rank that has left decided");
    test::check(Clock::now() - begin < 1300ms, "a report to nobody waited for a verdict, which takes 1500 ms");
  });
}

TEST_CASE("a rank that has left before a call is late there, rank 0 too, and one that has made it is not") {
  constexpr int kRanks = 3;
  for (const int leaves : {0, 2})
    for (const bool has_made_call : {false, true}) {
      Meeting gone(kRanks), decided(kRanks);
      each_rank(kRanks, [&](int rank, Exchange& exchange) {
        Member member(rank, kRanks, kLong, exchange); // no heartbeat comes before the goodbye
        member->set_progress(4, true);
        if (rank == leaves) {
          member->set_progress(has_made_call ? 4 : 3, has_made_call);
          member.leave();
        }
        gone.wait();
        if (rank == 1) member->report_stuck(-1, EPX_OP_COMBINE, 4);
        if (has_made_call) {
          std::this_thread::sleep_for(700ms);
          member.check_num_verdicts(0);
        } else if (rank == 1) {
          const Verdict verdict = member.expect(leaves, Cause::late);
          member.check(verdict.sequence == 4);
        }
        decided.wait();
      });
    }
}

TEST_CASE("a timeout that is shorter than the time between heartbeats ends nothing") {
  each_rank(3, [](int rank, Exchange& exchange) {
    Member member(rank, 3, 10ms, exchange);
    std::this_thread::sleep_for(400ms);
    member.check_num_verdicts(0);
  });
}

TEST_CASE("connections are made and ended at once, many times") {
  for (int round = 0; round < 20; ++round)
    each_rank(4, [&](int rank, Exchange& exchange) {
      Member member(rank, 4, kLong, exchange);
      member.check_num_verdicts(0);
    });
}

// Makes connections to `port` that are no rank's, one of each kind, and keeps them open.
std::vector<FileDescriptor> make_strangers(const ControlEndpoint& endpoint) {
  std::vector<FileDescriptor> strangers;
  for (const char* text : {"", "GET / HTTP/1.1\r\nHost: rank0\r\n\r\n", "short"}) {
    std::string why;
    FileDescriptor stranger = connect_to(endpoint.addresses[endpoint.num_addresses - 1], endpoint.port, Deadline(5s), why);
    test::check(static_cast<bool>(stranger), "a stranger cannot connect: {}", why);
    send_all(stranger.get(), std::as_bytes(std::span(text, std::strlen(text))), Deadline(5s));
    strangers.push_back(std::move(stranger));
  }
  return strangers;
}

// Passes records on, and makes strangers connect between the two exchanges of the join.
class ExchangeWithStrangers final : public Exchange {
public:
  ExchangeWithStrangers(const epx_bootstrap& bootstrap, bool makes_strangers, bool spoils_secret)
      : bootstrap_(bootstrap), makes_strangers_(makes_strangers), spoils_secret_(spoils_secret) {}

protected:
  std::vector<ExchangeRecord> gather(ExchangeRecord mine) override {
    mine.rank = bootstrap_.rank;
    std::vector<ExchangeRecord> all(static_cast<size_t>(bootstrap_.num_ranks));
    char message[EPX_MAX_MESSAGE_BYTES] = "";
    test::check(bootstrap_.all_gather(bootstrap_.context, &mine, all.data(), sizeof(mine), kLong.count(), message,
                                      sizeof(message)) == EPX_SUCCESS,
                "all-gather: {}", message);
    throw_peer_failure(mine, all);
    ControlEndpoint endpoint{};
    std::memcpy(&endpoint, all.front().payload, sizeof(endpoint));
    if (round_++ == 0 && makes_strangers_) strangers_ = make_strangers(endpoint);
    if (spoils_secret_) all.front().payload[0] ^= std::byte{1};
    return all;
  }

private:
  const epx_bootstrap& bootstrap_;
  bool makes_strangers_;
  bool spoils_secret_;
  int round_ = 0;
  std::vector<FileDescriptor> strangers_;
};

TEST_CASE("strangers that connect, silent or not, are not taken for ranks") {
  constexpr int kRanks = 3;
  test::LocalRendezvous rendezvous(kRanks);
  test::run_threads(kRanks, [&](int rank) {
    const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
    ExchangeWithStrangers exchange(bootstrap, rank == 1, false);
    const std::vector<FileDescriptor> sockets = join_control(rank, kRanks, 20'000ms, exchange);
    test::check_equal(sockets.size(), static_cast<size_t>(rank == 0 ? kRanks - 1 : 1), "the number of sockets");
    for (const FileDescriptor& socket : sockets)
      test::check(static_cast<bool>(socket), "a socket is missing");
  });
}

TEST_CASE("a rank with another secret is refused, and every rank says why") {
  constexpr int kRanks = 3;
  test::LocalRendezvous rendezvous(kRanks);
  std::mutex mutex;
  std::vector<std::string> messages(kRanks);
  test::run_threads(kRanks, [&](int rank) {
    const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
    ExchangeWithStrangers exchange(bootstrap, false, rank == 2);
    try {
      join_control(rank, kRanks, 1'500ms, exchange);
      test::fail_check("rank {} joined", rank);
    } catch (const StatusError& error) {
      test::check_equal(static_cast<int>(error.status()), static_cast<int>(EPX_ERROR_SYSTEM), "the status");
      const std::scoped_lock lock(mutex);
      messages[static_cast<size_t>(rank)] = error.message();
    }
  });
  CHECK(messages[0].starts_with("rank 2 did not open the control connection to rank 0 within 1500 ms"));
  CHECK(messages[1].find("did not open the control connection") != std::string::npos);
  CHECK(messages[2].starts_with("rank 0: rank 2 did not open the control connection"));
  CHECK(messages[2].find("here: the control connection to rank 0, TCP port ") != std::string::npos);
  CHECK(messages[2].find("does not answer as rank 0 does") != std::string::npos);
}

} // namespace
} // namespace epx
