// SPDX-License-Identifier: Apache-2.0
// One rank meets a limit of its process or of its cgroup while a group is created. It is told the limit, the other ranks are told
// too, nothing crashes or hangs, and nothing is left behind.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "epx/epx.h"
#include "tests/support/check.h"
#include "tests/support/run_ranks.h"
#include "tests/support/system_state.h"

namespace epx::test {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr int kRanks = 3;
constexpr int64_t kTimeoutMs = 2'000;
constexpr const char* kResult = "RESULT ";

size_t num_entries(const char* directory) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(directory), {}));
}

// What a group must give back.
struct Held {
  size_t descriptors = num_entries("/proc/self/fd");
  size_t threads = num_entries("/proc/self/task");
  bool window = has_window();

  static bool has_window() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);)
      if (contains(line, "epx-")) return true;
    return false;
  }
};

// Sets the soft limit, and sets it back at the end, so that the process can look at what it holds.
class SoftLimit {
public:
  SoftLimit(int resource, rlim_t value) : resource_(static_cast<__rlimit_resource>(resource)) {
    check(::getrlimit(resource_, &before_) == 0, "getrlimit failed");
    rlimit now = before_;
    now.rlim_cur = std::min(value, before_.rlim_max);
    check(::setrlimit(resource_, &now) == 0, "setrlimit failed");
  }
  ~SoftLimit() { ::setrlimit(resource_, &before_); }
  SoftLimit(const SoftLimit&) = delete;
  SoftLimit& operator=(const SoftLimit&) = delete;

private:
  __rlimit_resource resource_;
  rlimit before_{};
};

epx_group_config make_config(int ranks_per_node) {
  epx_group_config config{};
  epx_group_config_init(&config);
  config.num_experts = kRanks;
  config.max_tokens_per_rank = 512;
  config.hidden_dim = 1024;
  config.max_top_k = 2;
  config.max_token_dtype = EPX_FLOAT32;
  config.transport = EPX_TRANSPORT_HOST;
  config.timeout_ms = kTimeoutMs;
  config.ranks_per_node = ranks_per_node;
  return config;
}

struct Trial {
  std::string name;
  int victim = 0;
  // Sets limits, and returns what ends them. It is called before the rendezvous or between it and the creation.
  std::function<std::shared_ptr<void>()> limit;
  bool limits_rendezvous = false;
  int ranks_per_node = 0;
  bool as_other_user = false; // some limits mean nothing to root
  bool is_mute = false;       // the victim can write no file, so that it can tell nobody
};

struct Result {
  bool joined = false;
  int status = -1;
  std::string sentence;
};

// The status is printed, since a process that has met a limit may not be able to do more.
void run_rank(const Trial& trial, const TempDirectory& directory, int rank) {
  if (trial.as_other_user && ::geteuid() == 0) check(::setuid(65534) == 0, "setuid failed");
  const Held before;
  Result result;
  {
    std::shared_ptr<void> limit;
    epx_bootstrap bootstrap{};
    epx_group group = nullptr;
    if (rank == trial.victim && trial.limits_rendezvous) limit = trial.limit();
    result.status = epx_bootstrap_file(directory.path().c_str(), "job", rank, kRanks, kTimeoutMs, &bootstrap);
    result.joined = result.status == EPX_SUCCESS;
    if (result.joined) {
      if (rank == trial.victim && limit == nullptr) limit = trial.limit();
      const epx_group_config config = make_config(trial.ranks_per_node);
      result.status = epx_group_create(&bootstrap, &config, &group);
    }
    if (result.status != EPX_SUCCESS) result.sentence = epx_last_error();
    epx_group_destroy(group);
    epx_bootstrap_free(&bootstrap);
  }
  std::printf("%s%d %d %s\n", kResult, result.joined ? 1 : 0, result.status, result.sentence.c_str());
  const Held after;
  check_equal(after.descriptors, before.descriptors, "descriptors");
  check_equal(after.threads, before.threads, "threads");
  check(!after.window, "a window is still mapped");
  struct sigaction action {};
  check(::sigaction(SIGXFSZ, nullptr, &action) == 0 && action.sa_handler == SIG_DFL, "the handler of SIGXFSZ has changed");
}

Result parse(const std::string& output) {
  const size_t start = output.rfind(kResult);
  if (start == std::string::npos) return {};
  const std::string text = output.substr(start + std::char_traits<char>::length(kResult));
  return {text[0] == '1', std::stoi(text.substr(2)),
          text.substr(text.find(' ', 2) + 1, text.find('\n') - text.find(' ', 2) - 1)};
}

// Returns whether the group was created. If it was not, every rank must be told `limit`, except that a rank which could not
// join, or can tell nobody, is named as one that never came.
bool run_trial(const Trial& trial, const std::vector<std::string>& limit) {
  CAPTURE(trial.name);
  CAPTURE(trial.victim);
  CAPTURE(trial.limits_rendezvous);
  CAPTURE(trial.ranks_per_node);
  const TempDirectory directory;
  fs::permissions(directory.path(), fs::perms::all);
  const SharedMemoryWatch shared_memory;
  const std::vector<ProcessResult> processes =
      run_processes(kRanks, 30s, [&](int rank) { run_rank(trial, directory, rank); });
  std::vector<Result> results;
  for (const ProcessResult& process : processes) {
    CHECK_MESSAGE(process.succeeded(), process.describe());
    results.push_back(parse(process.output));
  }
  const Result& victim = results[static_cast<size_t>(trial.victim)];
  const bool is_created = victim.status == EPX_SUCCESS;
  for (int rank = 0; rank < kRanks; ++rank) {
    const Result& result = results[static_cast<size_t>(rank)];
    CAPTURE(rank);
    CAPTURE(result.sentence);
    CAPTURE(victim.sentence);
    CHECK((result.status == EPX_SUCCESS) == is_created);
    if (is_created) continue;
    const bool is_told =
        std::ranges::any_of(limit, [&](const std::string& word) { return contains(result.sentence, word); });
    const bool names_victim = contains(result.sentence, "rank " + std::to_string(trial.victim));
    const bool is_missed = rank != trial.victim && result.status == EPX_ERROR_TIMEOUT && names_victim;
    CHECK((is_told || (is_missed && (trial.is_mute || !victim.joined))));
  }
  CHECK(directory.entries().empty());
  CHECK(shared_memory.leftovers().empty());
  return is_created;
}

std::function<std::shared_ptr<void>()> soft_limit(int resource, int64_t value) {
  return [=] { return std::make_shared<SoftLimit>(resource, static_cast<rlim_t>(value)); };
}

int64_t window_bytes() {
  const epx_group_config config = make_config(0);
  epx_memory_plan plan{};
  plan.struct_size = sizeof(plan);
  check_ok(epx_group_memory_plan(&config, kRanks, &plan), "epx_group_memory_plan");
  return plan.window_bytes;
}

} // namespace

TEST_CASE("RLIMIT_FSIZE") {
  const int64_t window = window_bytes();
  int num_created = 0;
  for (const int victim : {0, 2}) {
    for (const bool limits_rendezvous : {false, true}) {
      for (const int64_t bytes : {int64_t{0}, int64_t{100}, int64_t{400}, int64_t{600}, int64_t{1'000}, int64_t{5'000},
                                  int64_t{1'000'000}, window, window + 1'000'000}) {
        Trial trial{std::to_string(bytes) + " bytes", victim, soft_limit(RLIMIT_FSIZE, bytes), limits_rendezvous};
        trial.is_mute = bytes < 400; // a header and a sentence
        num_created += run_trial(trial, {"RLIMIT_FSIZE (ulimit -f)"}) ? 1 : 0;
      }
    }
  }
  CHECK(num_created == 4); // with the largest limit
}

TEST_CASE("RLIMIT_NOFILE") {
  for (const int ranks_per_node : {0, 1}) {
    for (const int victim : {0, 2}) {
      for (const bool limits_rendezvous : {false, true}) {
        if (limits_rendezvous && ranks_per_node != 0) continue; // what follows the rendezvous is the same
        bool is_created = false;
        for (int spare = 0; spare < 24 && !is_created; ++spare) {
          const auto limit = [=] {
            int end = 0;
            for (int free = 0; free < spare || ::fcntl(end, F_GETFD) >= 0; ++end)
              free += ::fcntl(end, F_GETFD) < 0 ? 1 : 0;
            return std::make_shared<SoftLimit>(RLIMIT_NOFILE, static_cast<rlim_t>(end));
          };
          const Trial trial{std::to_string(spare) + " spare", victim, limit, limits_rendezvous, ranks_per_node};
          is_created = run_trial(trial, {"RLIMIT_NOFILE (ulimit -n)"});
        }
        CHECK(is_created);
      }
    }
  }
}

TEST_CASE("RLIMIT_AS") {
  const int64_t window = window_bytes();
  for (const int victim : {0, 2}) {
    for (const bool limits_rendezvous : {false, true}) {
      int num_created = 0;
      for (const int64_t more :
           {int64_t{0}, int64_t{1} << 18, int64_t{1} << 20, window, 2 * window, 5 * window + (64 << 20)}) {
        const auto limit = [=] {
          std::ifstream statm("/proc/self/statm");
          int64_t pages = 0;
          statm >> pages;
          return std::make_shared<SoftLimit>(RLIMIT_AS, static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE) + more));
        };
        const Trial trial{std::to_string(more) + " bytes more", victim, limit, limits_rendezvous};
        num_created += run_trial(trial, {"RLIMIT_AS (ulimit -v)"}) ? 1 : 0;
      }
      CHECK(num_created == 1);
    }
  }
}

TEST_CASE("RLIMIT_NPROC") {
  for (const int victim : {0, 2}) {
    const Trial trial{"no thread", victim, soft_limit(RLIMIT_NPROC, 1), false, 1, true};
    CHECK_FALSE(run_trial(trial, {"RLIMIT_NPROC (ulimit -u) is 1"}));
    const Trial needs_none{"a group of one node needs no thread", victim, soft_limit(RLIMIT_NPROC, 1), false, 0, true};
    CHECK(run_trial(needs_none, {}));
  }
}

TEST_CASE("RLIMIT_MEMLOCK does not matter on the host transport") {
  CHECK(run_trial({"no locked memory", 0, soft_limit(RLIMIT_MEMLOCK, 0), true, 0}, {}));
  CHECK(run_trial({"no locked memory", 2, soft_limit(RLIMIT_MEMLOCK, 0), true, 1}, {}));
}

TEST_CASE("pids.max of a cgroup") {
  const std::string parent = fs::exists("/sys/fs/cgroup/pids") ? "/sys/fs/cgroup/pids" : "/sys/fs/cgroup";
  const std::string cgroup = parent + "/epx-test-" + std::to_string(::getpid());
  std::error_code error;
  if (!fs::create_directory(cgroup, error) || !fs::exists(cgroup + "/pids.max")) {
    fs::remove(cgroup, error);
    MESSAGE("left out: this process cannot make a cgroup with a limit of tasks");
    return;
  }
  std::ofstream(cgroup + "/pids.max") << 1;
  const auto enter = [&]() -> std::shared_ptr<void> {
    std::ofstream(cgroup + "/cgroup.procs") << ::getpid();
    return std::make_shared<int>(0);
  };
  for (const int victim : {0, 2})
    CHECK_FALSE(run_trial({"no thread", victim, enter, false, 1}, {"pids.max of cgroup " + cgroup + " is 1"}));
  fs::remove(cgroup, error);
  CHECK(!error);
}

} // namespace epx::test
