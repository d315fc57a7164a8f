// SPDX-License-Identifier: Apache-2.0
// Sockets of the control connection: where rank 0 listens, and messages of a fixed size.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "transport/control/keyed_hash.h"
#include "transport/file_descriptor.h"

namespace epx {

// An address of this machine, as IPv6; those of IPv4 are mapped (::ffff:a.b.c.d).
using SocketAddress = std::array<unsigned char, 16>;

constexpr size_t kMaxAddresses = 8;

// Rank 0 tells the others through the bootstrap where it listens, and gives them the group's secret.
struct ControlEndpoint {
  HashKey secret;
  uint32_t num_addresses;
  uint16_t port;
  std::array<SocketAddress, kMaxAddresses> addresses; // in the order in which to try them; loopback comes last
};

std::string format(const SocketAddress& address); // "10.0.0.7", "fd00::7"

// Opens a listening socket on all interfaces at a port that the system chooses. Throws SYSTEM.
FileDescriptor listen_anywhere(uint16_t& port);

// Returns the addresses of the interfaces that are up, link-local ones apart; at most kMaxAddresses, loopback among them.
// Throws SYSTEM.
std::vector<SocketAddress> local_addresses();

// Connects; returns no descriptor, and why in `why`, when that fails or takes until the deadline. The socket is non-blocking.
FileDescriptor connect_to(const SocketAddress& address, uint16_t port, const Deadline& deadline, std::string& why);

// Sets O_NONBLOCK, FD_CLOEXEC and TCP_NODELAY, by which small messages are not held back.
void prepare_socket(int fd);

// Both wait no longer than the deadline, and return whether all bytes were sent or received.
bool send_all(int fd, std::span<const std::byte> bytes, const Deadline& deadline);
bool receive_all(int fd, std::span<std::byte> bytes, const Deadline& deadline);

} // namespace epx
