// SPDX-License-Identifier: Apache-2.0
// These tests check how the ranks of the host transport share windows, and which segments they open.
#include <doctest/doctest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "tests/support/check.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"
#include "tests/support/system_state.h"
#include "transport/bootstrap/bootstrap_exchange.h"
#include "transport/host/host_transport.h"
#include "transport/host/shared_segment.h"

namespace epx {
namespace {

using namespace std::chrono_literals;
using test::check;
using test::check_equal;
namespace fs = std::filesystem;

constexpr int64_t kRendezvousMs = 30'000;
constexpr int64_t kWindowBytes = 5'000; // not whole pages

fs::path path_of(const std::string& name) {
  return fs::path(SharedSegment::kDirectory) / name;
}

std::set<std::string> own_names() {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(SharedSegment::kDirectory))
    if (entry.path().filename().string().starts_with("epx-")) names.insert(entry.path().filename());
  return names;
}

// A test defines what the ranks do between two steps of opening a window.
class WatchedExchange final : public BootstrapExchange {
public:
  WatchedExchange(const epx_bootstrap& bootstrap, std::function<void(int)> before_gather)
      : BootstrapExchange(bootstrap, kRendezvousMs), before_gather_(std::move(before_gather)) {}
  int num_gathers() const { return num_gathers_; }

protected:
  std::vector<ExchangeRecord> gather(ExchangeRecord mine) override {
    before_gather_(num_gathers_++);
    return BootstrapExchange::gather(mine);
  }

private:
  std::function<void(int)> before_gather_;
  int num_gathers_ = 0;
};

using BeforeGather = std::function<void(int rank, int number)>;

// Opens a window, checks that all ranks share zeroed memory, and returns how many gathers that took.
int check_window(const epx_bootstrap& bootstrap, SegmentKind kind, const BeforeGather& before_gather) {
  const int rank = bootstrap.rank;
  const int num_ranks = bootstrap.num_ranks;
  WatchedExchange exchange(bootstrap, [&](int number) { before_gather(rank, number); });
  const std::unique_ptr<Transport> transport = make_host_transport(rank, num_ranks, kind);
  const std::unique_ptr<Window> window = transport->open_window(kWindowBytes, exchange);
  const int num_gathers = exchange.num_gathers();
  const PeerWindow view = window->view();
  check_equal(window->bytes(), kWindowBytes, "bytes of the window");
  for (int64_t i = 0; i < kWindowBytes; ++i)
    check(*view.local<char>(i) == 0, "byte {} of a new window is {}", i, *view.local<char>(i));
  exchange.all_gather([] { return 0; });
  for (int peer = 0; peer < num_ranks; ++peer)
    *view.at<int>(peer, 8 * rank) = 100 * rank + peer;
  *view.local<char>(kWindowBytes - 1) = 'x';
  exchange.all_gather([] { return 0; });
  for (int peer = 0; peer < num_ranks; ++peer)
    check_equal(*view.local<int>(8 * peer), 100 * peer + rank, "what a peer stored");
  // A second window of the same transport.
  const std::unique_ptr<Window> second = transport->open_window(64, exchange);
  *second->view().at<int>((rank + 1) % num_ranks, 0) = 7 + rank;
  exchange.all_gather([] { return 0; });
  check_equal(*second->view().local<int>(0), 7 + (rank + num_ranks - 1) % num_ranks, "what a peer stored there");
  return num_gathers;
}

// Each rank is a process; they join through files.
void run_rank_processes(int num_ranks, const std::function<void(const epx_bootstrap&)>& fn) {
  const test::TempDirectory directory;
  test::check_all_succeeded(test::run_processes(num_ranks, 60s, [&](int rank) {
    epx_bootstrap bootstrap{};
    test::check_ok(epx_bootstrap_file(directory.path().c_str(), "job", rank, num_ranks, kRendezvousMs, &bootstrap),
                   "rendezvous");
    fn(bootstrap);
    epx_bootstrap_free(&bootstrap);
  }));
}

const BeforeGather kNothing = [](int, int) {};

TEST_CASE("windows are nameless: in no step of opening one is anything in /dev/shm") {
  const std::set<std::string> before = own_names();
  const BeforeGather look = [&](int, int) {
    for (const std::string& name : own_names()) {
      const FileDescriptor file(::open(path_of(name).c_str(), O_RDONLY | O_CLOEXEC));
      check(before.contains(name) || !read_segment_record(file.get()), "{} is in /dev/shm", name);
    }
  };
  for (const int num_ranks : {1, 2, 4}) {
    CAPTURE(num_ranks);
    CHECK_NOTHROW(run_rank_processes(num_ranks, [&](const epx_bootstrap& bootstrap) {
      check_equal(check_window(bootstrap, SegmentKind::kNameless, look), 2, "gathers");
    }));
    test::LocalRendezvous rendezvous(num_ranks);
    CHECK_NOTHROW(test::run_threads(num_ranks, [&](int rank) {
      check_equal(check_window(rendezvous.bootstrap(rank), SegmentKind::kNameless, look), 2, "gathers");
    }));
  }
}

TEST_CASE("windows by name: the names are gone when all have mapped them") {
  const test::SharedMemoryWatch watch;
  for (const int num_ranks : {1, 2, 4}) {
    CAPTURE(num_ranks);
    CHECK_NOTHROW(run_rank_processes(num_ranks, [&](const epx_bootstrap& bootstrap) {
      check_equal(check_window(bootstrap, SegmentKind::kNamed, kNothing), 2, "gathers");
    }));
    test::LocalRendezvous rendezvous(num_ranks);
    CHECK_NOTHROW(test::run_threads(
        num_ranks, [&](int rank) { check_window(rendezvous.bootstrap(rank), SegmentKind::kNamed, kNothing); }));
  }
  CHECK(watch.leftovers().empty());
}

TEST_CASE("where one rank cannot share nameless memory, all ranks take names") {
  const test::SharedMemoryWatch watch;
  for (int hidden = 0; hidden < 3; ++hidden) {
    CAPTURE(hidden);
    CHECK_NOTHROW(run_rank_processes(3, [&](const epx_bootstrap& bootstrap) {
      if (bootstrap.rank == hidden) test::hide_from_proc();
      check_equal(check_window(bootstrap, SegmentKind::kNameless, kNothing), 4, "gathers");
    }));
  }
  CHECK(watch.leftovers().empty());
}

TEST_CASE("ranks in two PID namespaces, each with its own /proc, take names" * doctest::skip(::geteuid() != 0)) {
  const test::SharedMemoryWatch watch;
  CHECK_NOTHROW(run_rank_processes(2, [&](const epx_bootstrap& bootstrap) {
    if (bootstrap.rank == 0) {
      check_equal(check_window(bootstrap, SegmentKind::kNameless, kNothing), 4, "gathers");
      return;
    }
    check(::unshare(CLONE_NEWPID | CLONE_NEWNS) == 0, "no namespaces: {}", std::strerror(errno));
    const pid_t child = ::fork(); // the first process of the namespace
    if (child == 0) {
      int code = 1;
      if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
          ::mount("proc", "/proc", "proc", 0, nullptr) == 0) {
        try {
          check_equal(check_window(bootstrap, SegmentKind::kNameless, kNothing), 4, "gathers");
          code = 0;
        } catch (const std::exception& error) {
          std::fprintf(stderr, "%s\n", error.what());
        }
      }
      ::_exit(code);
    }
    int status = 0;
    check(::waitpid(child, &status, 0) == child && status == 0, "the rank in the namespace failed: {}", status);
  }));
  CHECK(watch.leftovers().empty());
}

TEST_CASE("all groups of one bootstrap are created when a rank of one of them cannot share nameless memory") {
  CHECK_NOTHROW(run_rank_processes(3, [&](const epx_bootstrap& bootstrap) {
    if (bootstrap.rank == 0) test::hide_from_proc();
    const int32_t color = bootstrap.rank == 2 ? 1 : 0; // rank 2 is alone, and shares memory with no other rank
    for (int round = 0; round < 2; ++round) {
      epx_group_config config{};
      test::check_ok(epx_group_config_init(&config), "epx_group_config_init");
      config.num_experts = 2;
      config.max_tokens_per_rank = 4;
      config.hidden_dim = 8;
      config.max_top_k = 1;
      config.max_token_dtype = EPX_FLOAT32;
      config.transport = EPX_TRANSPORT_HOST;
      config.timeout_ms = kRendezvousMs;
      config.color = color;
      epx_group group = nullptr;
      test::check_ok(epx_group_create(&bootstrap, &config, &group), "epx_group_create");
      epx_group_destroy(group);
    }
  }));
}

// ---- Which segments are opened ----

TEST_CASE("a segment is opened only if it is the one that its creator sent") {
  std::string why;
  const auto own = SharedSegment::create_nameless(kWindowBytes, why);
  REQUIRE(own != nullptr);
  // Opens as another process would.
  const auto open_elsewhere = [&](const SegmentAddress& address, const char* expected) {
    test::check_all_succeeded(test::run_processes(1, 20s, [&](int) {
      SegmentAddress asked = address;
      std::string why_not;
      // This process inherited the registered segment; a spoilt nonce is in nobody's registry.
      const auto opened = SharedSegment::open(asked, why_not);
      check(opened == nullptr, "it was opened");
      check(test::contains(why_not, expected), "\"{}\" does not say \"{}\"", why_not, expected);
    }));
  };
  SegmentAddress address = own->address();
  address.record.nonce[1] ^= 1;
  CHECK_NOTHROW(open_elsewhere(address, "another record"));
  SegmentAddress other_file = address;
  ++other_file.inode;
  CHECK_NOTHROW(open_elsewhere(other_file, "not the peer's"));
  SegmentAddress other_size = address;
  other_size.record.bytes += 8192;
  CHECK_NOTHROW(open_elsewhere(other_size, "not the peer's"));
  SegmentAddress other_pid = address;
  other_pid.pid = 1; // somebody else's
  CHECK_NOTHROW(open_elsewhere(other_pid, "/proc/1/fd/"));
  CHECK_NOTHROW(open_elsewhere(SegmentAddress{{}, 0, 0, SegmentKind::kNamed, 0, 0, 0}, "No such file"));

  own->withdraw(); // the descriptor's number is free, and may be another file's
  const int reused = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  CHECK_NOTHROW(open_elsewhere(address, "/proc/"));
  ::close(reused);
}

TEST_CASE("a peer cannot shrink nameless memory, which would kill the others by SIGBUS") {
  std::string why;
  const auto own = SharedSegment::create_nameless(kWindowBytes, why);
  REQUIRE(own != nullptr);
  const std::string path = fmt::format("/proc/self/fd/{}", own->address().fd);
  CHECK(::truncate(path.c_str(), 0) != 0);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(fd >= 0);
  struct stat file {};
  REQUIRE(::fstat(fd, &file) == 0);
  CHECK((file.st_mode & 07777) == 0600);
  CHECK(::ftruncate(fd, 0) != 0);
  ::close(fd);
}

TEST_CASE("reserving completes under signals that interrupt a large reservation again and again") {
  constexpr int64_t kBytes = int64_t{96} << 20;
  test::check_all_succeeded(test::run_processes(1, 60s, [&](int) {
    std::signal(SIGALRM, [](int) {});
    const itimerval often{{0, 1'000}, {0, 1'000}};
    ::setitimer(ITIMER_REAL, &often, nullptr);
    std::string why;
    const auto nameless = SharedSegment::create_nameless(kBytes, why);
    check(nameless != nullptr, "{}", why);
    struct stat file {};
    check(::stat(fmt::format("/proc/self/fd/{}", nameless->address().fd).c_str(), &file) == 0, "stat failed");
    check(file.st_blocks * 512 >= kBytes, "{} blocks are reserved", file.st_blocks);
  }));
}

TEST_CASE("a refused reservation reports the bytes wanted and the bytes free") {
  constexpr int64_t kTooMuch = int64_t{1} << 50;
  const std::function<void()> ways[] = {[] {
                                          std::string why;
                                          SharedSegment::create_nameless(kTooMuch, why);
                                        },
                                        [] { SharedSegment::create_named(kTooMuch); }};
  for (const auto& create : ways) {
    try {
      create();
      FAIL("2^50 bytes were reserved");
    } catch (const StatusError& error) {
      CHECK(error.status() == EPX_ERROR_OUT_OF_MEMORY);
      CAPTURE(error.message());
      CHECK(test::contains(error.message(), std::to_string(kTooMuch)));
      CHECK(test::contains(error.message(), "bytes are free"));
    }
  }
}

} // namespace
} // namespace epx
