// SPDX-License-Identifier: Apache-2.0
// Transport nccl makes and frees communicators of a stand-in for NCCL. Its bootstrap roots are threads with a listening socket, as
// NCCL's are. Each ends when all ranks of its communicator have come. None may be left, whatever becomes of the group. Ranks
// are threads.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nccl_device.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "base/error.h"
#include "base/random.h"
#include "tests/support/check.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"
#include "transport/bootstrap/bootstrap_exchange.h"
#include "transport/file_descriptor.h"
#include "transport/nccl/gpu_fabric.h"
#include "transport/nccl/gpu_identity.h"
#include "transport/nccl/nccl_library.h"
#include "transport/nccl/nccl_transport.h"
#include "transport/node_exchange.h"

// ---- The stand-in for NCCL ---------------------------------------------------------------------------------------------

namespace {

using namespace std::chrono_literals;
using epx::FileDescriptor;

// The layout of an id and of what ranks send is NCCL's: see transport/nccl/bootstrap_root.cc.
struct Id {
  uint64_t magic;
  sockaddr_in address;
};
struct Connection {
  uint64_t magic;
  int32_t type, bytes;
};
struct RankInfo {
  std::array<int32_t, 5> numbers; // rank, number of ranks, root, number of roots, offset
  std::array<std::byte, 156> addresses;
};

std::atomic<int> roots{0};            // that have not ended
std::atomic<int> open_connections{0}; // of roots that have ended
std::atomic<int> failing_rank{-1};    // whose ncclCommInitRankConfig fails
std::atomic<int> aborts_too_soon{0};  // of communicators whose ranks were coming

bool receive(int fd, void* bytes, size_t size) {
  return ::recv(fd, bytes, size, MSG_WAITALL) == static_cast<ssize_t>(size);
}

// Returns when all ranks have come, or one that does not belong to them. Returns whether all have.
bool receive_ranks(const Id& id, int listening) {
  int num_ranks = 0, num_here = 0;
  do {
    FileDescriptor connection(::accept(listening, nullptr, nullptr));
    Connection head{};
    if (!receive(connection.get(), &head.magic, sizeof(head.magic)) || head.magic != id.magic) continue;
    RankInfo info{};
    if (!receive(connection.get(), &head.type, 8) || head.bytes > static_cast<int32_t>(sizeof(info)) ||
        !receive(connection.get(), &info, static_cast<size_t>(head.bytes))) {
      ++open_connections;
      connection.release();
      return false;
    }
    if (num_here == 0) num_ranks = info.numbers[1];
    if (info.numbers[1] != num_ranks) return false;
    ++num_here;
  } while (num_here == 0 || num_here < num_ranks);
  return true;
}

std::mutex mutex;
std::map<uint64_t, std::shared_ptr<std::atomic<bool>>> is_complete; // by the id's magic

ncclResult_t get_unique_id(ncclUniqueId* out) {
  Id id{epx::random_u64(), {}};
  id.address.sin_family = AF_INET;
  id.address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  FileDescriptor listening(::socket(AF_INET, SOCK_STREAM, 0));
  socklen_t length = sizeof(id.address);
  auto* const address = reinterpret_cast<sockaddr*>(&id.address);
  if (::bind(listening.get(), address, length) != 0 || ::listen(listening.get(), 16) != 0 ||
      ::getsockname(listening.get(), address, &length) != 0)
    return ncclSystemError;
  const auto complete = std::make_shared<std::atomic<bool>>(false);
  {
    const std::scoped_lock lock(mutex);
    is_complete[id.magic] = complete;
  }
  ++roots;
  std::thread([id, complete, fd = listening.release()] {
    const FileDescriptor owner(fd);
    const bool all_came = receive_ranks(id, fd);
    std::this_thread::sleep_for(20ms); // making a communicator takes a while
    *complete = all_came;
    --roots;
  }).detach();
  std::memset(out, 0, sizeof(*out));
  std::memcpy(out, &id, sizeof(id));
  return ncclSuccess;
}

struct FakeCommunicator {
  std::shared_ptr<std::atomic<bool>> is_complete;
  int num_ranks;
};

FakeCommunicator& of(ncclComm_t communicator) {
  return *reinterpret_cast<FakeCommunicator*>(communicator);
}

ncclResult_t init_rank(ncclComm_t* communicator, int num_ranks, ncclUniqueId unique_id, int rank, ncclConfig_t*) {
  if (rank == failing_rank) return ncclSystemError;
  Id id{};
  std::memcpy(&id, &unique_id, sizeof(id));
  const FileDescriptor connection(::socket(AF_INET, SOCK_STREAM, 0));
  if (::connect(connection.get(), reinterpret_cast<const sockaddr*>(&id.address), sizeof(id.address)) != 0)
    return ncclSystemError;
  RankInfo info{{rank, num_ranks, 0, 1, 0}, {}};
  info.addresses.fill(std::byte{1});
  const Connection head{id.magic, 1, sizeof(info)};
  ::send(connection.get(), &head, sizeof(head), 0);
  ::send(connection.get(), &info, sizeof(info), 0);
  const std::scoped_lock lock(mutex);
  *communicator = reinterpret_cast<ncclComm_t>(new FakeCommunicator{is_complete.at(id.magic), num_ranks});
  return ncclInProgress;
}

ncclResult_t free_communicator(ncclComm_t communicator) {
  if (!*of(communicator).is_complete) ++aborts_too_soon;
  delete &of(communicator);
  return ncclSuccess;
}

const char* describe(ncclResult_t) {
  return "the stand-in for NCCL fails";
}

epx::NcclLibrary make_library() {
  epx::NcclLibrary library{};
  library.AllGather = [](const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t) { return ncclSuccess; };
  library.CommAbort = free_communicator;
  library.CommDestroy = free_communicator;
  library.CommFinalize = [](ncclComm_t) { return ncclSuccess; };
  library.CommGetAsyncError = [](ncclComm_t communicator, ncclResult_t* result) {
    *result = *of(communicator).is_complete ? ncclSuccess : ncclInProgress;
    return ncclSuccess;
  };
  library.CommInitRankConfig = init_rank;
  library.CommWindowDeregister = [](ncclComm_t, ncclWindow_t) { return ncclSuccess; };
  library.CommWindowRegister = [](ncclComm_t, void* memory, size_t, ncclWindow_t* window, int) {
    *window = static_cast<ncclWindow_t>(memory);
    return ncclSuccess;
  };
  library.GetErrorString = describe;
  library.GetLastError = [](ncclComm_t) { return ""; };
  library.GetUniqueId = get_unique_id;
  library.GetVersion = [](int* version) {
    *version = 22907; // from here on NCCL tells addresses by a function
    return ncclSuccess;
  };
  library.GetLsaDevicePointer = [](ncclWindow_t window, size_t, int, void** pointer) {
    *pointer = window;
    return ncclSuccess;
  };
  library.GroupEnd = [] { return ncclSuccess; };
  library.GroupStart = [] { return ncclSuccess; };
  library.MemAlloc = [](void** memory, size_t bytes) {
    *memory = std::aligned_alloc(NCCL_WIN_REQUIRED_ALIGNMENT, bytes);
    return ncclSuccess;
  };
  library.MemFree = [](void* memory) {
    std::free(memory);
    return ncclSuccess;
  };
  library.Recv = [](void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclSuccess; };
  library.Send = [](const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclSuccess; };
  library.TeamLsa = [](ncclComm_t communicator) { return ncclTeam_t{of(communicator).num_ranks, 0, 1}; };
  return library;
}

} // namespace

namespace epx {

const NcclLibrary& nccl() {
  static const NcclLibrary library = make_library();
  return library;
}

GpuIdentity find_gpu() noexcept {
  return {};
}
std::string why_not_a_gpu_each(std::span<const GpuIdentity>) {
  return "";
}
std::string why_not_new_enough(std::span<const GpuIdentity>) {
  return "";
}
bool reaches_over_nvlink(const GpuIdentity&, std::span<const GpuIdentity>) {
  return true;
}

// ---- The tests ---------------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t kTimeoutMs = 20'000;
constexpr int64_t kNcclTimeoutMs = 500; // a communicator to which not all ranks come is waited for so long
constexpr int64_t kWindowBytes = 4096;
constexpr int kNever = 0;
constexpr int kCommunicatorRound = 3; // after the exchange of hellos and that of ids

// The rank fails in one exchange of its group's creation; the first is 1.
class FailingExchange final : public BootstrapExchange {
public:
  FailingExchange(const epx_bootstrap& bootstrap, int failing_round)
      : BootstrapExchange(bootstrap, kTimeoutMs), failing_round_(failing_round) {}

protected:
  std::vector<ExchangeRecord> gather(ExchangeRecord mine) override {
    if (++round_ == failing_round_) mine.status = EPX_ERROR_SYSTEM;
    std::vector<ExchangeRecord> all = BootstrapExchange::gather(mine);
    if (round_ == failing_round_) fail(EPX_ERROR_SYSTEM, "exchange {} fails", round_);
    return all;
  }

private:
  int failing_round_;
  int round_ = 0;
};

// Creates what a group creates of transport nccl, with a window, and destroys it. The last rank fails as it is told. Returns
// whether the group was created.
bool create(int num_ranks, int ranks_per_node, int failing_round) {
  test::LocalRendezvous rendezvous(num_ranks);
  std::atomic<int> num_created{0};
  test::run_threads(num_ranks, [&](int rank) {
    const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
    FailingExchange exchange(bootstrap, rank == num_ranks - 1 ? failing_round : kNever);
    try {
      if (num_ranks == ranks_per_node) {
        const auto transport = make_nccl_transport(rank, num_ranks, kNcclTimeoutMs, exchange);
        transport->open_window(kWindowBytes, exchange);
      } else {
        const auto transport = make_nccl_multi_node_transport(rank, num_ranks, ranks_per_node, 1, kNcclTimeoutMs, exchange);
        NodeExchange of_node(exchange, rank, ranks_per_node);
        transport.node->open_window(kWindowBytes, of_node);
      }
      ++num_created;
    } catch (const StatusError& error) {
      test::check(error.status() == EPX_ERROR_SYSTEM || error.status() == EPX_ERROR_TIMEOUT, "a creation fails with {}",
                  error.message());
    }
  });
  test::check(num_created == 0 || num_created == num_ranks, "{} of {} ranks created a group", num_created.load(),
              num_ranks);
  return num_created == num_ranks;
}

void check_no_roots() {
  for (const auto end = std::chrono::steady_clock::now() + 5s; roots != 0 && std::chrono::steady_clock::now() < end;)
    std::this_thread::sleep_for(1ms);
  CHECK(roots == 0);
  CHECK(open_connections == 0);
}

struct Shape {
  int num_ranks, ranks_per_node;
};
constexpr std::array kShapes{Shape{1, 1}, Shape{2, 2}, Shape{3, 3}, Shape{2, 1}, Shape{4, 2}};

TEST_CASE("no bootstrap root is left of a group") {
  for (const Shape& shape : kShapes) {
    const int num_ranks = shape.num_ranks, ranks_per_node = shape.ranks_per_node;
    CAPTURE(num_ranks);
    CAPTURE(ranks_per_node);
    CHECK(create(num_ranks, ranks_per_node, kNever));
    check_no_roots();
  }
}

TEST_CASE("no bootstrap root is left of a group whose creation fails in any exchange") {
  for (const Shape& shape : kShapes) {
    const int num_ranks = shape.num_ranks, ranks_per_node = shape.ranks_per_node;
    CAPTURE(num_ranks);
    CAPTURE(ranks_per_node);
    int round = 1;
    for (; aborts_too_soon = 0, !create(num_ranks, ranks_per_node, round); ++round) {
      CAPTURE(round);
      check_no_roots();
      if (round > kCommunicatorRound) CHECK(aborts_too_soon == 0);
    }
    CHECK(round > kCommunicatorRound + 1); // the window's exchanges follow
    check_no_roots();
  }
}

TEST_CASE("no bootstrap root is left to which some of its ranks have come") {
  for (const Shape& shape : {Shape{2, 2}, Shape{3, 3}, Shape{2, 1}, Shape{4, 2}}) {
    const int num_ranks = shape.num_ranks, ranks_per_node = shape.ranks_per_node;
    CAPTURE(num_ranks);
    CAPTURE(ranks_per_node);
    failing_rank =
        num_ranks == ranks_per_node ? num_ranks - 1 : ranks_per_node; // over nodes, only the rails' has this rank
    CHECK_FALSE(create(num_ranks, ranks_per_node, kNever));
    failing_rank = -1;
    check_no_roots();
  }
}

} // namespace
} // namespace epx
