// SPDX-License-Identifier: Apache-2.0
#include "transport/control/control_join.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include "base/deadline.h"
#include "base/error.h"
#include "base/names.h"
#include "base/random.h"
#include "base/resource_limits.h"
#include "transport/control/control_socket.h"
#include "transport/interrupt.h"

namespace epx {
namespace {

using namespace std::chrono_literals;

// Rank 0 sends a challenge, the other rank answers, and rank 0 accepts.
struct Challenge {
  uint64_t nonce;
};
struct Answer {
  int64_t rank;
  uint64_t nonce;
  uint64_t proof; // keyed_hash of (the challenge's nonce, rank, nonce)
};
struct Acceptance {
  uint64_t proof; // keyed_hash of (the answer's nonce, the challenge's nonce)
};

template <size_t N>
uint64_t prove(const HashKey& secret, const std::array<uint64_t, N>& words) {
  return keyed_hash(secret, std::as_bytes(std::span(words)));
}

template <typename T>
std::span<std::byte> bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

constexpr auto kAnswerTime = 5s; // for a peer that has connected, before it is taken for a stranger

// A connection that has not proved yet to be a rank's.
struct Newcomer {
  FileDescriptor socket;
  uint64_t nonce;
  Deadline deadline{kAnswerTime};
  Answer answer{};
  size_t received = 0;
};

class Acceptor {
public:
  Acceptor(FileDescriptor listener, const HashKey& secret, int num_ranks)
      : listener_(std::move(listener)), secret_(secret), joined_(static_cast<size_t>(num_ranks - 1)) {}

  std::vector<FileDescriptor> run(std::chrono::milliseconds limit) {
    const Deadline deadline(limit);
    while (num_joined_ < joined_.size()) {
      if (deadline.passed())
        fail(EPX_ERROR_SYSTEM, "{} did not open the control connection to rank 0 within {} ms: is a firewall between them?",
             name_ranks(missing()), limit.count());
      require_not_interrupted(fmt::format("the wait for the control connection of {} to rank 0", name_ranks(missing())));
      poll();
      accept_newcomers();
      for (Newcomer& newcomer : newcomers_)
        hear(newcomer, deadline);
      std::erase_if(newcomers_, [](const Newcomer& newcomer) { return !newcomer.socket || newcomer.deadline.passed(); });
    }
    return std::move(joined_);
  }

private:
  void poll() const {
    std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
    for (const Newcomer& newcomer : newcomers_)
      polled.push_back({newcomer.socket.get(), POLLIN, 0});
    ::poll(polled.data(), polled.size(), 20);
  }

  void accept_newcomers() {
    const size_t max_newcomers = joined_.size() + 64; // beyond the ranks there are only strangers
    while (newcomers_.size() < max_newcomers) {
      FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      // Without descriptors none of the ranks that wait in the queue could ever join.
      if (!socket && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
        fail(EPX_ERROR_SYSTEM, "rank 0 cannot accept the control connections of its peers: {}", describe_errno(errno));
      if (!socket) return;
      prepare_socket(socket.get());
      Challenge challenge{random_u64()};
      if (!send_all(socket.get(), bytes_of(challenge), Deadline(0ms)))
        continue; // an empty socket takes so few bytes at once
      newcomers_.push_back({std::move(socket), challenge.nonce});
    }
  }

  void hear(Newcomer& newcomer, const Deadline& deadline) {
    const std::span<std::byte> answer = bytes_of(newcomer.answer);
    const ssize_t received =
        ::recv(newcomer.socket.get(), answer.data() + newcomer.received, answer.size() - newcomer.received, 0);
    if (received < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (received <= 0) {
      newcomer.socket.close();
      return;
    }
    newcomer.received += static_cast<size_t>(received);
    if (newcomer.received < answer.size()) return;
    const auto [rank, nonce, proof] = newcomer.answer;
    FileDescriptor socket = std::move(newcomer.socket);
    if (proof != prove(secret_, std::array{newcomer.nonce, static_cast<uint64_t>(rank), nonce})) return;
    if (rank < 1 || rank > static_cast<int64_t>(joined_.size()) || joined_[static_cast<size_t>(rank - 1)]) return;
    Acceptance acceptance{prove(secret_, std::array{nonce, newcomer.nonce})};
    if (!send_all(socket.get(), bytes_of(acceptance), deadline)) return;
    joined_[static_cast<size_t>(rank - 1)] = std::move(socket);
    ++num_joined_;
  }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (size_t i = 0; i < joined_.size() && ranks.size() < EPX_MAX_REPORTED_RANKS; ++i)
      if (!joined_[i]) ranks.push_back(static_cast<int>(i + 1));
    return ranks;
  }

  FileDescriptor listener_;
  HashKey secret_;
  std::vector<Newcomer> newcomers_;
  std::vector<FileDescriptor> joined_; // by rank - 1
  size_t num_joined_ = 0;
};

// Returns no socket, and why in `why`, when rank 0 does not answer there.
FileDescriptor join_at(const SocketAddress& address, const ControlEndpoint& endpoint, int rank, const Deadline& deadline,
                       std::string& why) {
  FileDescriptor socket = connect_to(address, endpoint.port, deadline, why);
  if (!socket) return socket;
  Challenge challenge{};
  Answer answer{rank, random_u64(), 0};
  Acceptance acceptance{};
  why = "whoever listens there does not answer as rank 0 does";
  if (!receive_all(socket.get(), bytes_of(challenge), deadline)) return FileDescriptor();
  answer.proof = prove(endpoint.secret, std::array{challenge.nonce, static_cast<uint64_t>(answer.rank), answer.nonce});
  if (!send_all(socket.get(), bytes_of(answer), deadline) || !receive_all(socket.get(), bytes_of(acceptance), deadline) ||
      acceptance.proof != prove(endpoint.secret, std::array{answer.nonce, challenge.nonce}))
    return FileDescriptor();
  return socket;
}

FileDescriptor join_rank_0(const ControlEndpoint& endpoint, int rank, std::chrono::milliseconds limit) {
  const size_t num_addresses = std::min<size_t>(endpoint.num_addresses, kMaxAddresses);
  std::string tried;
  for (size_t i = 0; i < num_addresses; ++i) {
    const Deadline deadline(std::max<std::chrono::milliseconds>(limit / num_addresses, 1ms));
    std::string why;
    FileDescriptor socket = join_at(endpoint.addresses[i], endpoint, rank, deadline, why);
    if (socket) return socket;
    tried += fmt::format("{}{}: {}", tried.empty() ? "" : "; ", format(endpoint.addresses[i]), why);
  }
  fail(EPX_ERROR_SYSTEM, "the control connection to rank 0, TCP port {}, failed at each of its addresses ({})",
       endpoint.port, tried);
}

} // namespace

std::vector<FileDescriptor> join_control(int rank, int num_ranks, std::chrono::milliseconds limit, Exchange& exchange) {
  FileDescriptor listener;
  const std::vector<ControlEndpoint> endpoints = exchange.all_gather([&] {
    ControlEndpoint endpoint{};
    if (rank != 0) return endpoint;
    endpoint.secret = {random_u64(), random_u64()};
    listener = listen_anywhere(endpoint.port);
    const std::vector<SocketAddress> addresses = local_addresses();
    endpoint.num_addresses = static_cast<uint32_t>(addresses.size());
    std::ranges::copy(addresses, endpoint.addresses.begin());
    return endpoint;
  });
  std::vector<FileDescriptor> sockets;
  std::string why_not; // this rank's, which may be a consequence of what rank 0 met
  std::vector<int32_t> have_joined;
  try {
    have_joined = exchange.all_gather([&]() -> int32_t {
      if (rank == 0) {
        sockets = Acceptor(std::move(listener), endpoints.front().secret, num_ranks).run(limit);
        return 1;
      }
      try {
        sockets.push_back(join_rank_0(endpoints.front(), rank, limit));
      } catch (const StatusError& error) {
        if (error.status() == EPX_ERROR_ABORTED) throw; // interrupted
        why_not = error.message();
      }
      return sockets.empty() ? 0 : 1;
    });
  } catch (const StatusError& error) {
    if (why_not.empty()) throw;
    fail(error.status(), "{}; here: {}", error.message(), why_not);
  }
  if (!why_not.empty()) fail(EPX_ERROR_SYSTEM, "{}", why_not);
  if (const auto without = std::ranges::find(have_joined, 0); without != have_joined.end())
    fail(EPX_ERROR_SYSTEM, "rank {} did not join the control connection", without - have_joined.begin());
  return sockets;
}

} // namespace epx
