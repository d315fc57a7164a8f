// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/bootstrap_root.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "base/log.h"
#include "transport/file_descriptor.h"
#include "transport/nccl/nccl_check.h"

namespace epx {
namespace {

// An ncclUniqueId holds these (ncclBootstrapHandle in NCCL's bootstrap.h), the same in all releases of nccl_versions.cc.
struct RootAddress {
  uint64_t magic;
  union {
    sockaddr any;
    sockaddr_in v4;
    sockaddr_in6 v6;
  } socket;
};
static_assert(sizeof(RootAddress) <= sizeof(ncclUniqueId) && offsetof(RootAddress, socket) == 8);

// What a rank sends to the root. A connection begins with the magic number and the type (ncclSocketConnect). The size of the rest
// follows, which is extInfo of NCCL's bootstrap.cc. In 2.28 the addresses begin where later releases have `offset`; of these, the
// last 4 bytes do not travel.
struct RootHello {
  uint64_t magic;
  int32_t socket_type;
  int32_t bytes;
  int32_t rank, num_ranks, root, num_roots, offset;
  std::byte addresses[152]; // where the rank listens
};
constexpr int32_t kBootstrapSocket = 1; // ncclSocketTypeBootstrap
constexpr size_t kHeadBytes = offsetof(RootHello, rank);
constexpr size_t kHelloBytes = 172;
static_assert(offsetof(RootHello, addresses) + sizeof(RootHello::addresses) == kHeadBytes + kHelloBytes);

constexpr std::chrono::seconds kRootTimeout{1}; // the root is a thread of this process

// Comes to the root as the only rank of a communicator, which listens nowhere. If the root waits for its first rank, it has all of
// them then. If ranks have come, it gives up, as they have told it another number of ranks. It closes what it has open both
// times; after a connection that breaks off it would leave that one open.
void end_root(const ncclUniqueId& id) {
  RootAddress root{};
  std::memcpy(&root, &id, sizeof(root));
  const sa_family_t family = root.socket.any.sa_family;
  if (family != AF_INET && family != AF_INET6) return;
  log::transport().info("no communicator came of an id: its bootstrap root ends");
  const FileDescriptor connection(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval timeout{kRootTimeout.count(), 0};
  ::setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)); // of connect() too
  ::setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  const size_t length = family == AF_INET ? sizeof(root.socket.v4) : sizeof(root.socket.v6);
  if (::connect(connection.get(), &root.socket.any, static_cast<socklen_t>(length)) != 0) return; // it has ended
  RootHello hello{};
  hello.magic = root.magic;
  hello.socket_type = kBootstrapSocket;
  hello.bytes = kHelloBytes;
  hello.num_ranks = 1;
  hello.num_roots = 1;
  ::send(connection.get(), &hello, kHeadBytes + kHelloBytes, MSG_NOSIGNAL);
  char nothing = 0;
  ::recv(connection.get(), &nothing, sizeof(nothing), 0); // returns once the root has read that
}

} // namespace

BootstrapRoot::BootstrapRoot() {
  check_nccl(nccl().GetUniqueId(&id_), "ncclGetUniqueId");
}

BootstrapRoot::~BootstrapRoot() {
  // NCCL_COMM_ID names a root of the user's, and ncclGetUniqueId starts none.
  if (is_waiting_ && std::getenv("NCCL_COMM_ID") == nullptr) end_root(id_);
}

} // namespace epx
