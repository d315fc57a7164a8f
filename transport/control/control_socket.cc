// SPDX-License-Identifier: Apache-2.0
#include "transport/control/control_socket.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include "base/error.h"
#include "base/resource_limits.h"
#include "transport/interrupt.h"

namespace epx {
namespace {

bool is_mapped(const SocketAddress& address) {
  in6_addr raw{};
  std::memcpy(&raw, address.data(), address.size());
  return IN6_IS_ADDR_V4MAPPED(&raw);
}

SocketAddress mapped(const in_addr& ipv4) {
  SocketAddress address{};
  address[10] = address[11] = 0xff;
  std::memcpy(address.data() + 12, &ipv4, sizeof(ipv4));
  return address;
}

// Returns how long poll() may wait, in milliseconds.
int left_of(const Deadline& deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.end() - Deadline::Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count() + 1, 0, 50)); // then an interrupt is looked for
}

// Waits until the socket is ready for `events`; returns false at the deadline.
bool wait_for(int fd, short events, const Deadline& deadline) {
  while (!deadline.passed()) {
    pollfd polled{fd, events, 0};
    require_not_interrupted("the control connection to rank 0");
    const int ready = ::poll(&polled, 1, left_of(deadline));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
  return false;
}

// Runs `transfer`, which moves some bytes as ::send and ::recv do, until all have been moved.
template <typename Transfer>
bool move_all(int fd, size_t size, short events, const Deadline& deadline, const Transfer& transfer) {
  for (size_t done = 0; done < size;) {
    const ssize_t moved = transfer(done, size - done);
    const bool may_try_again = moved < 0 && (errno == EAGAIN || errno == EINTR);
    if (moved > 0)
      done += static_cast<size_t>(moved);
    else if (!may_try_again || !wait_for(fd, events, deadline))
      return false;
  }
  return true;
}

// IPv6 sockets take IPv4 as well; machines without IPv6 have only the latter.
FileDescriptor open_socket(bool& has_ipv6) {
  FileDescriptor fd(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  has_ipv6 = static_cast<bool>(fd);
  if (!fd) return FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int off = 0;
  ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  return fd;
}

} // namespace

std::string format(const SocketAddress& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (is_mapped(address))
    ::inet_ntop(AF_INET, address.data() + 12, text.data(), text.size());
  else
    ::inet_ntop(AF_INET6, address.data(), text.data(), text.size());
  return text.data();
}

FileDescriptor listen_anywhere(uint16_t& port) {
  bool has_ipv6 = false;
  FileDescriptor fd = open_socket(has_ipv6);
  sockaddr_in6 ipv6{};
  ipv6.sin6_family = AF_INET6;
  ipv6.sin6_addr = in6addr_any;
  sockaddr_in ipv4{};
  ipv4.sin_family = AF_INET;
  auto* const address = has_ipv6 ? reinterpret_cast<sockaddr*>(&ipv6) : reinterpret_cast<sockaddr*>(&ipv4);
  socklen_t size = has_ipv6 ? sizeof(ipv6) : sizeof(ipv4);
  if (!fd || ::bind(fd.get(), address, size) != 0 || ::listen(fd.get(), SOMAXCONN) != 0 ||
      ::getsockname(fd.get(), address, &size) != 0)
    fail(EPX_ERROR_SYSTEM, "the control connection cannot listen on a TCP port: {}", describe_errno(errno));
  port = ntohs(has_ipv6 ? ipv6.sin6_port : ipv4.sin_port);
  return fd;
}

std::vector<SocketAddress> local_addresses() {
  ifaddrs* interfaces = nullptr;
  if (::getifaddrs(&interfaces) != 0)
    fail(EPX_ERROR_SYSTEM, "the control connection cannot list the network interfaces: {}", describe_errno(errno));
  std::vector<SocketAddress> addresses, loopback;
  for (const ifaddrs* each = interfaces; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0) continue;
    SocketAddress address{};
    if (each->ifa_addr->sa_family == AF_INET) {
      address = mapped(reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr);
    } else if (each->ifa_addr->sa_family == AF_INET6) {
      const in6_addr& ipv6 = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr;
      if (IN6_IS_ADDR_LINKLOCAL(&ipv6)) continue; // of use only with the name of an interface of the other machine
      std::memcpy(address.data(), &ipv6, address.size());
    } else {
      continue;
    }
    ((each->ifa_flags & IFF_LOOPBACK) != 0 ? loopback : addresses).push_back(address);
  }
  ::freeifaddrs(interfaces);
  const size_t kept = kMaxAddresses - std::min<size_t>(loopback.size(), 1);
  if (addresses.size() > kept) addresses.resize(kept);
  if (!loopback.empty()) addresses.push_back(loopback.front());
  return addresses;
}

FileDescriptor connect_to(const SocketAddress& address, uint16_t port, const Deadline& deadline, std::string& why) {
  const bool is_ipv4 = is_mapped(address);
  FileDescriptor fd(::socket(is_ipv4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in ipv4{};
  ipv4.sin_family = AF_INET;
  ipv4.sin_port = htons(port);
  std::memcpy(&ipv4.sin_addr, address.data() + 12, sizeof(ipv4.sin_addr));
  sockaddr_in6 ipv6{};
  ipv6.sin6_family = AF_INET6;
  ipv6.sin6_port = htons(port);
  std::memcpy(&ipv6.sin6_addr, address.data(), address.size());
  int error = 0;
  if (!fd) {
    error = errno;
  } else if (::connect(fd.get(),
                       is_ipv4 ? reinterpret_cast<const sockaddr*>(&ipv4) : reinterpret_cast<const sockaddr*>(&ipv6),
                       is_ipv4 ? sizeof(ipv4) : sizeof(ipv6)) != 0) {
    error = errno;
    if (error == EINPROGRESS) {
      socklen_t size = sizeof(error);
      if (!wait_for(fd.get(), POLLOUT, deadline))
        error = ETIMEDOUT;
      else if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0)
        error = errno;
    }
  }
  if (error != 0) {
    why = describe_errno(error);
    return FileDescriptor();
  }
  prepare_socket(fd.get());
  return fd;
}

void prepare_socket(int fd) {
  const int on = 1;
  ::fcntl(fd, F_SETFL, O_NONBLOCK);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

bool send_all(int fd, std::span<const std::byte> bytes, const Deadline& deadline) {
  return move_all(fd, bytes.size(), POLLOUT, deadline,
                  [&](size_t at, size_t size) { return ::send(fd, bytes.data() + at, size, MSG_NOSIGNAL); });
}

bool receive_all(int fd, std::span<std::byte> bytes, const Deadline& deadline) {
  return move_all(fd, bytes.size(), POLLIN, deadline,
                  [&](size_t at, size_t size) { return ::recv(fd, bytes.data() + at, size, 0); });
}

} // namespace epx
