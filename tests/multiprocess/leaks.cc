// SPDX-License-Identifier: Apache-2.0
// leaks --transport host|nccl [--groups N] [--deaths N]
// Counts this process's threads, descriptors and memory, also the GPU's, before and after N groups, however they end. Ranks are
// processes under epx_test_launch. A rank that is alone also loses peers, which it starts itself.
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <malloc.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "epx/epx.hpp"
#include "tests/multiprocess/fault_rank.h"
#include "tests/support/address_sanitizer.h"
#include "tests/support/check.h"
#include "tests/support/launcher.h"

extern char** environ;

namespace epx::test {
namespace {

using namespace std::chrono_literals;

constexpr int kFirstGroups = 5; // what a process keeps for all its groups is there after so many
constexpr auto kTimeToEnd = 5s; // of threads that nobody waits for
constexpr int64_t kTimeoutMs = 60'000;

struct Resources {
  int64_t threads = 0;
  int64_t descriptors = 0;
  int64_t allocated_bytes = 0; // by malloc
  int64_t resident_bytes = 0;
  int64_t device_bytes = 0; // of all processes that share the GPU
};

int64_t count_entries(const char* directory) {
  const std::filesystem::directory_iterator entries(directory);
  return std::distance(begin(entries), end(entries));
}

Resources measure(const Device& device) {
  Resources now;
  now.threads = count_entries("/proc/self/task");
  now.descriptors = count_entries("/proc/self/fd");
  const struct mallinfo2 memory = mallinfo2();
  now.allocated_bytes = static_cast<int64_t>(memory.uordblks + memory.hblkhd);
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages; // the second number
  now.resident_bytes = pages * ::sysconf(_SC_PAGESIZE);
  now.device_bytes = device.bytes_in_use();
  return now;
}

struct Options {
  std::string transport;
  int groups = 100;
  int deaths = 6;
};

// Runs `body` a few times, and then `count` times, between which a rank may have gained no thread and no descriptor, and next to
// no memory.
void check_no_growth(const RankContext& context, const char* what, int count, const std::function<void(int round)>& body) {
  int round = 0;
  for (; round < kFirstGroups; ++round)
    body(round);
  context.gather(0);
  std::this_thread::sleep_for(300ms); // threads that nobody waits for end
  const Resources before = measure(*context.device);
  context.gather(0);
  for (; round < kFirstGroups + count; ++round)
    body(round);
  context.gather(0);
  Resources after = measure(*context.device);
  for (const auto end = std::chrono::steady_clock::now() + kTimeToEnd;
       (after.threads > before.threads || after.descriptors > before.descriptors) &&
       std::chrono::steady_clock::now() < end;) {
    std::this_thread::sleep_for(10ms);
    after = measure(*context.device);
  }
  context.gather(0);
  if (context.rank == 0) {
    std::printf("%s, %d times: %+lld threads, %+lld descriptors, %+lld bytes allocated, %+lld resident, %+lld on the GPU\n",
                what, count, static_cast<long long>(after.threads - before.threads),
                static_cast<long long>(after.descriptors - before.descriptors),
                static_cast<long long>(after.allocated_bytes - before.allocated_bytes),
                static_cast<long long>(after.resident_bytes - before.resident_bytes),
                static_cast<long long>(after.device_bytes - before.device_bytes));
    std::fflush(stdout);
  }
  check(after.threads <= before.threads, "{}: {} threads before, {} after", what, before.threads, after.threads);
  check(after.descriptors <= before.descriptors, "{}: {} descriptors before, {} after", what, before.descriptors,
        after.descriptors);
  const auto check_bytes = [&](const char* which, int64_t Resources::*bytes, int64_t most) {
    check(after.*bytes - before.*bytes <= most, "{}: {} bytes {} before, {} after {} more groups", what, before.*bytes,
          which, after.*bytes, count);
  };
  if (EPX_TEST_HAS_ADDRESS_SANITIZER == 0) { // which keeps freed memory
    check_bytes("allocated", &Resources::allocated_bytes, 256 << 10);
    check_bytes("resident", &Resources::resident_bytes, 4 << 20);
  }
  check_bytes("in use on the GPU", &Resources::device_bytes, 4 << 20);
}

void test_groups_that_are_destroyed(const RankContext& context, const Options& options) {
  check_no_growth(context, "groups that are destroyed", options.groups, [&](int) {
    FaultRank rank(context, kTimeoutMs);
    check_ok(rank.call(EPX_OP_DISPATCH), "epx_dispatch");
    check_ok(rank.call(EPX_OP_COMBINE), "epx_combine");
    context.gather(0); // all ranks have what they wait for
  });
}

void test_groups_that_are_aborted(const RankContext& context, const Options& options) {
  check_no_growth(context, "groups that are aborted", options.groups, [&](int round) {
    FaultRank rank(context, kTimeoutMs);
    context.gather(0);
    if (round % context.num_ranks == context.rank) check_ok(epx_group_abort(rank.group()), "epx_group_abort");
    context.gather(0);
  });
}

void test_groups_that_are_refused(const RankContext& context, const Options& options) {
  check_no_growth(context, "groups that are refused", options.groups, [&](int) {
    GroupCase shape;
    shape.num_ranks = context.num_ranks;
    shape.transport = context.device->transport();
    epx_group_config config = make_config(shape);
    if (context.rank == context.num_ranks - 1) config.hidden_dim = context.num_ranks == 1 ? -1 : config.hidden_dim + 1;
    epx_group group = nullptr;
    check_status(epx_group_create(context.bootstrap, &config, &group),
                 context.num_ranks == 1 ? EPX_ERROR_INVALID_ARGUMENT : EPX_ERROR_MISMATCH, "epx_group_create");
  });
}

// A bootstrap whose all-gather fails from a certain one on, after it has gathered, on all ranks alike.
class FailingBootstrap {
public:
  FailingBootstrap(const epx_bootstrap& below, int num_good) : below_(below), num_good_(num_good) {}
  FailingBootstrap(const FailingBootstrap&) = delete;
  FailingBootstrap& operator=(const FailingBootstrap&) = delete;

  epx_bootstrap get() {
    epx_bootstrap bootstrap = {};
    bootstrap.struct_size = sizeof(bootstrap);
    bootstrap.rank = below_.rank;
    bootstrap.num_ranks = below_.num_ranks;
    bootstrap.all_gather = all_gather;
    bootstrap.context = this;
    return bootstrap;
  }
  bool has_failed() const { return num_good_ < 0; }

private:
  static epx_status all_gather(void* context, const void* send, void* recv, size_t bytes_per_rank, int64_t timeout_ms,
                               char* message, size_t message_bytes) {
    auto& self = *static_cast<FailingBootstrap*>(context);
    const epx_status status =
        self.below_.all_gather(self.below_.context, send, recv, bytes_per_rank, timeout_ms, message, message_bytes);
    return --self.num_good_ < 0 ? EPX_ERROR_SYSTEM : status;
  }

  const epx_bootstrap& below_;
  int num_good_;
};

// Each creation fails in another of its exchanges. NCCL leaves two sockets of a communicator that is aborted while its ranks come,
// as it is when the exchange fails in which the ranks of a node begin it.
void test_groups_whose_creation_fails(const RankContext& context, const Options& options) {
  const char* const ranks_per_node = std::getenv("EPX_TEST_RANKS_PER_NODE");
  const int ranks_of_node = ranks_per_node != nullptr ? std::atoi(ranks_per_node) : context.num_ranks;
  if (options.transport == "nccl" && ranks_of_node > 1) return;
  int num_exchanges = 0;
  check_no_growth(context, "groups whose creation fails", options.groups, [&](int) {
    FailingBootstrap failing(*context.bootstrap, num_exchanges++);
    const epx_bootstrap bootstrap = failing.get();
    RankContext broken = context;
    broken.bootstrap = &bootstrap;
    {
      const FaultRank rank(broken, kTimeoutMs, FaultRank::MayFail{});
      check_status(rank.created(), failing.has_failed() ? EPX_ERROR_SYSTEM : EPX_SUCCESS, "epx_group_create");
    }
    if (!failing.has_failed()) num_exchanges = 0; // it had no further exchange
    context.gather(0);
  });
}

// ---- Deaths ------------------------------------------------------------------------------------------------------------

constexpr int64_t kDeathTimeoutMs = 3'000;

// Joins rank 1 - `rank`, which is another process, in a group.
void with_peer(const std::string& job, int rank, Device& device, const std::function<void(FaultRank&)>& body) {
  const Bootstrap bootstrap = bootstrap_file(std::getenv("EPX_TEST_DIR"), job.c_str(), rank, 2, kMeetTimeout);
  const RankContext context{rank, 2, bootstrap.get(), &device};
  FaultRank fault_rank(context, kDeathTimeoutMs);
  context.gather(0);
  body(fault_rank);
}

// The peer shares the GPU, so it is of another node.
pid_t start_peer(const std::string& transport, const std::string& job) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  std::vector<std::string> words{"env", "NCCL_HOSTID=peer", program, "--transport", transport, "--peer", job};
  std::vector<char*> argv;
  for (std::string& word : words)
    argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = -1;
  check(::posix_spawnp(&pid, "env", nullptr, nullptr, argv.data(), environ) == 0, "posix_spawnp of {} failed", program);
  return pid;
}

[[noreturn]] void die_as_peer(const std::string& transport, const std::string& job) {
  const std::unique_ptr<Device> device = make_device(transport, 0, 1);
  with_peer(job, 1, *device, [](FaultRank&) { std::raise(SIGKILL); });
  std::abort();
}

void test_groups_whose_peer_dies(const RankContext& context, const Options& options) {
  if (context.num_ranks > 1) return;
  check_no_growth(context, "groups whose peer dies", options.deaths, [&](int round) {
    const std::string job = "peer-" + std::to_string(round);
    const pid_t peer = start_peer(options.transport, job);
    with_peer(job, 0, *context.device, [&](FaultRank& rank) {
      epx_status status = EPX_SUCCESS;
      const auto end = std::chrono::steady_clock::now() + 2 * std::chrono::milliseconds(kDeathTimeoutMs);
      while (status == EPX_SUCCESS && std::chrono::steady_clock::now() < end)
        status = rank.call(EPX_OP_DISPATCH); // of a GPU, the one that waits returns before it has failed
      check(status != EPX_SUCCESS, "calls succeed although the peer is dead");
      // While this rank's session is open: a process that ends may close its control connection, by which this rank learned of
      // it, before it unlocks its file of the rendezvous, which the last rank to leave then could not remove.
      int exit = 0;
      check(::waitpid(peer, &exit, 0) == peer && WIFSIGNALED(exit) && WTERMSIG(exit) == SIGKILL,
            "the peer ended with {:#x}", exit);
    });
  });
}

int number(std::map<std::string, std::string>& options, const char* name, int otherwise) {
  return options.contains(name) ? std::atoi(options[name].c_str()) : otherwise;
}

int run(int argc, char** argv) {
  std::map<std::string, std::string> given;
  for (int i = 1; i + 1 < argc; i += 2)
    given[argv[i]] = argv[i + 1];
  const char* const directory = std::getenv("EPX_TEST_DIR");
  check(directory != nullptr, "EPX_TEST_DIR is not set: start this through epx_test_launch");
  Options options;
  options.transport = given["--transport"];
  options.groups = number(given, "--groups", options.groups);
  options.deaths = number(given, "--deaths", options.deaths);
  if (given.contains("--peer")) die_as_peer(options.transport, given["--peer"]);
  // An arena of glibc may keep tens of MB that are free: NCCL's thread that makes a communicator allocates 40 MB for a moment. Each
  // thread may get another arena.
  ::mallopt(M_TRIM_THRESHOLD, 128 << 10);
  const auto launcher = make_file_launcher(options.transport, "EPX_TEST_RANK", "EPX_TEST_RANKS", directory);
  for (const auto& test : {test_groups_that_are_destroyed, test_groups_that_are_aborted, test_groups_that_are_refused,
                           test_groups_whose_creation_fails, test_groups_whose_peer_dies})
    launcher->each_rank([&](const RankContext& context) { test(context, options); });
  return 0;
}

} // namespace
} // namespace epx::test

int main(int argc, char** argv) {
  try {
    return epx::test::run(argc, argv);
  } catch (const epx::test::Skipped& reason) {
    std::fprintf(stderr, "skipped: %s\n", reason.what());
    return epx::test::kSkippedExitCode;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", epx::test::describe(error).c_str());
    std::_Exit(1); // no destructors: they may wait for peers that are gone
  }
}
