// SPDX-License-Identifier: Apache-2.0
// These file rendezvous fail: arguments are bad, directories are missing or read-only, ranks never come, come twice or
// disagree, a dead job has left files behind, and two jobs share one directory.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "epx/epx.h"
#include "tests/multiprocess/sentences.h"
#include "tests/support/check.h"
#include "tests/support/run_ranks.h"
#include "tests/support/system_state.h"

namespace epx::test {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLongMs = 30000;
constexpr int64_t kShortMs = 700;

size_t num_files(const TempDirectory& directory) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : fs::recursive_directory_iterator(directory.path()))
    ++count;
  return count;
}

// Joins the other ranks and gathers a number that only this job has.
void check_rendezvous(const std::string& directory, const std::string& job, int rank, int num_ranks, int32_t secret) {
  epx_bootstrap bootstrap{};
  check_ok(epx_bootstrap_file(directory.c_str(), job.c_str(), rank, num_ranks, kLongMs, &bootstrap), "epx_bootstrap_file");
  check(bootstrap.rank == rank && bootstrap.num_ranks == num_ranks, "the bootstrap is of rank {} of {}", bootstrap.rank,
        bootstrap.num_ranks);
  for (int round = 0; round < 3; ++round) {
    const int32_t mine = secret + 100 * round + rank;
    std::vector<int32_t> all(static_cast<size_t>(num_ranks), -1);
    std::array<char, 256> message{};
    check(bootstrap.all_gather(bootstrap.context, &mine, all.data(), sizeof(mine), kLongMs, message.data(),
                               message.size()) == EPX_SUCCESS,
          "all_gather: {}", message.data());
    for (int peer = 0; peer < num_ranks; ++peer) {
      check_equal(all[static_cast<size_t>(peer)], secret + 100 * round + peer,
                  "what rank " + std::to_string(peer) + " sent");
    }
  }
  epx_bootstrap_free(&bootstrap);
  check(bootstrap.context == nullptr && bootstrap.all_gather == nullptr, "epx_bootstrap_free leaves the struct as it is");
}

TEST_CASE("bad arguments of epx_bootstrap_file") {
  const TempDirectory directory;
  const std::string path = directory.path().string();
  const std::string missing = path + "/missing";
  const std::string file = path + "/file";
  std::ofstream(file) << "not a directory";
  const std::string long_id(65, 'a');
  const size_t entries = num_files(directory);

  struct Case {
    std::string name;
    const char* directory;
    const char* job_id;
    int32_t rank;
    int32_t num_ranks;
    int64_t timeout_ms;
    epx_status status;
    std::vector<std::string> words;
  };
  constexpr epx_status kInvalid = EPX_ERROR_INVALID_ARGUMENT;
  const char* const good = path.c_str();
  const std::vector<Case> table = {
      {"directory NULL", nullptr, "job", 0, 1, kShortMs, kInvalid, {"directory", "NULL"}},
      {"job_id NULL", good, nullptr, 0, 1, kShortMs, kInvalid, {"job_id", "NULL"}},
      {"job_id empty", good, "", 0, 1, kShortMs, kInvalid, {"job_id"}},
      {"job_id of 65 characters", good, long_id.c_str(), 0, 1, kShortMs, kInvalid, {"job_id", "65", "64"}},
      {"job_id with a slash", good, "a/b", 0, 1, kShortMs, kInvalid, {"job_id", "a/b"}},
      {"job_id with a blank", good, "a b", 0, 1, kShortMs, kInvalid, {"job_id", "a b"}},
      {"rank negative", good, "job", -1, 2, kShortMs, kInvalid, {"rank", "-1"}},
      {"rank beyond num_ranks", good, "job", 2, 2, kShortMs, kInvalid, {"rank", "2"}},
      {"num_ranks 0", good, "job", 0, 0, kShortMs, kInvalid, {"num_ranks", "0"}},
      {"num_ranks negative", good, "job", 0, -8, kShortMs, kInvalid, {"num_ranks", "-8"}},
      {"timeout_ms 0", good, "job", 0, 1, 0, kInvalid, {"timeout_ms", "0"}},
      {"timeout_ms negative", good, "job", 0, 1, -9, kInvalid, {"timeout_ms", "-9"}},
      {"directory empty", "", "job", 0, 1, kShortMs, kInvalid, {"directory"}},
      {"directory missing", missing.c_str(), "job", 0, 1, kShortMs, EPX_ERROR_SYSTEM, {missing, "No such file"}},
      {"directory is a file", file.c_str(), "job", 0, 1, kShortMs, EPX_ERROR_SYSTEM, {file, "Not a directory"}},
  };
  for (const Case& bad : table) {
    CAPTURE(bad.name);
    epx_bootstrap bootstrap{};
    epx_bootstrap before{};
    CHECK_NOTHROW(
        check_status(epx_bootstrap_file(bad.directory, bad.job_id, bad.rank, bad.num_ranks, bad.timeout_ms, &bootstrap),
                     bad.status, bad.name));
    CHECK_NOTHROW(check_tells(epx_last_error(), bad.words, bad.name));
    CHECK(std::memcmp(&bootstrap, &before, sizeof(before)) == 0);
    CHECK(num_files(directory) == entries);
  }
  CHECK(epx_bootstrap_file(good, "job", 0, 1, kShortMs, nullptr) == kInvalid);
  epx_bootstrap_free(nullptr);
  epx_bootstrap zeroed{};
  epx_bootstrap_free(&zeroed);
}

TEST_CASE("job ids that are also names of directories stay below the directory") {
  const TempDirectory directory;
  const std::string below = directory.path().string() + "/below";
  fs::create_directory(below);
  for (const std::string job : {".", "..", "...", "-", "a.b-c_d"}) {
    CAPTURE(job);
    epx_bootstrap bootstrap{};
    const epx_status status = epx_bootstrap_file(below.c_str(), job.c_str(), 0, 1, kShortMs, &bootstrap);
    CHECK((status == EPX_SUCCESS || status == EPX_ERROR_INVALID_ARGUMENT));
    epx_bootstrap_free(&bootstrap);
    CHECK(num_files(directory) == 1); // "below", empty
  }
}

TEST_CASE("a read-only directory") {
  const TempDirectory directory;
  fs::permissions(directory.path(),
                  fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_read | fs::perms::others_exec);
  const pid_t child = fork();
  if (child == 0) {
    // Root may write everywhere, so the child becomes another user.
    if (geteuid() == 0 && setuid(65534) != 0) _exit(77);
    epx_bootstrap bootstrap{};
    const epx_status status = epx_bootstrap_file(directory.path().c_str(), "job", 0, 2, kShortMs, &bootstrap);
    const std::string sentence = epx_last_error();
    _exit(status == EPX_ERROR_SYSTEM && contains(sentence, directory.path().string()) && contains(sentence, "denied") ? 0
                                                                                                                      : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK((WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77));
  CHECK(num_files(directory) == 0);
}

TEST_CASE("ranks that never come are listed, and nothing is left") {
  const TempDirectory directory;
  const std::string path = directory.path().string();
  run_threads(2, [&](int thread) {
    epx_bootstrap bootstrap{};
    check_status(epx_bootstrap_file(path.c_str(), "job", 3 * thread, 5, kShortMs, &bootstrap), EPX_ERROR_TIMEOUT,
                 "ranks 0 and 3 of 5");
    check_tells(epx_last_error(), {"1, 2", "4"}, "ranks 1, 2 and 4");
  });
  // A rank that comes too late finds no peer, and is not taken for a rank of the next job.
  epx_bootstrap bootstrap{};
  CHECK(epx_bootstrap_file(path.c_str(), "job", 1, 5, kShortMs, &bootstrap) == EPX_ERROR_TIMEOUT);
  CHECK(contains(epx_last_error(), "0"));
  run_threads(2, [&](int rank) { check_rendezvous(path, "job", rank, 2, 500); });
  CHECK(num_files(directory) == 0);
}

TEST_CASE("a rank that does not come to a later all-gather is listed") {
  const TempDirectory directory;
  const std::string path = directory.path().string();
  run_threads(3, [&](int rank) {
    epx_bootstrap bootstrap{};
    check_ok(epx_bootstrap_file(path.c_str(), "job", rank, 3, kLongMs, &bootstrap), "epx_bootstrap_file");
    if (rank != 1) {
      std::array<int32_t, 3> all{};
      std::array<char, 256> message{};
      const epx_status status = bootstrap.all_gather(bootstrap.context, &rank, all.data(), sizeof(rank), kShortMs,
                                                     message.data(), message.size());
      check(status == EPX_ERROR_TIMEOUT, "all_gather returned {}", epx_status_string(status));
      check_says(message.data(), "1");
    }
    epx_bootstrap_free(&bootstrap);
  });
}

TEST_CASE("two processes claim one rank") {
  const TempDirectory directory;
  const std::string path = directory.path().string();
  std::mutex mutex;
  std::vector<epx_status> seen;
  bool named = false;
  run_threads(3, [&](int thread) {
    epx_bootstrap bootstrap{};
    const int rank = thread == 0 ? 0 : 1; // rank 1 twice
    const epx_status status = epx_bootstrap_file(path.c_str(), "job", rank, 3, 3000, &bootstrap);
    const std::string sentence = status == EPX_SUCCESS ? "" : epx_last_error();
    epx_bootstrap_free(&bootstrap);
    const std::scoped_lock lock(mutex);
    seen.push_back(status);
    named = named || (status == EPX_ERROR_MISMATCH && contains(sentence, "rank 1"));
    check(status == EPX_ERROR_MISMATCH || status == EPX_ERROR_TIMEOUT, "rank {}: {}: {}", rank, epx_status_string(status),
          sentence);
  });
  CHECK(named);
  CHECK(num_files(directory) == 0);
}

TEST_CASE("ranks that disagree on num_ranks") {
  const TempDirectory directory;
  const std::string path = directory.path().string();
  run_threads(2, [&](int rank) {
    epx_bootstrap bootstrap{};
    check_status(epx_bootstrap_file(path.c_str(), "job", rank, 2 + rank, 5000, &bootstrap), EPX_ERROR_MISMATCH,
                 "rank " + std::to_string(rank));
    check_tells(epx_last_error(), {"num_ranks", "2", "3"}, "num_ranks");
  });
  CHECK(num_files(directory) == 0);
}

// Returns what lies below a directory in which ranks rename and remove files meanwhile.
std::vector<fs::path> entries_of(const std::string& directory) {
  std::vector<fs::path> entries;
  std::error_code gone;
  for (fs::recursive_directory_iterator entry(directory, gone), end; !gone && entry != end; entry.increment(gone))
    entries.push_back(entry->path());
  return entries;
}

// Waits until the directory has a file whose name begins so. Returns false if none comes.
bool wait_for_file(const std::string& directory, const std::string& begin) {
  const auto is_it = [&](const fs::path& path) { return path.filename().string().starts_with(begin); };
  for (int i = 0; i < 1000; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(10)))
    if (std::ranges::any_of(entries_of(directory), is_it)) return true;
  return false;
}

// Starts ranks 0 and 1 of three and kills them while they wait for the third.
void leave_a_dead_job(const std::string& path, const std::string& job) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < 2; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      epx_bootstrap bootstrap{};
      epx_bootstrap_file(path.c_str(), job.c_str(), rank, 3, kLongMs, &bootstrap);
      _exit(0);
    }
    children.push_back(child);
  }
  for (int rank = 0; rank < 2; ++rank)
    CHECK(wait_for_file(path, "alive." + std::to_string(rank) + "."));
  std::this_thread::sleep_for(std::chrono::milliseconds(300)); // they have written all that they write alone
  for (const pid_t child : children) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
}

TEST_CASE("what dead jobs of the same name left behind is never taken for a live rank") {
  const TempDirectory directory;
  const std::string path = directory.path().string();
  leave_a_dead_job(path, "job");
  CHECK(num_files(directory) > 0);
  SUBCASE("the same number of ranks") {
    run_threads(3, [&](int rank) { check_rendezvous(path, "job", rank, 3, 7000); });
  }
  SUBCASE("another number of ranks") {
    run_threads(2, [&](int rank) { check_rendezvous(path, "job", rank, 2, 7000); });
  }
  SUBCASE("the missing rank alone") {
    epx_bootstrap bootstrap{};
    CHECK(epx_bootstrap_file(path.c_str(), "job", 2, 3, kShortMs, &bootstrap) == EPX_ERROR_TIMEOUT);
    CHECK(contains(epx_last_error(), "0, 1"));
  }
  SUBCASE("several dead jobs") {
    leave_a_dead_job(path, "job");
    run_threads(3, [&](int rank) { check_rendezvous(path, "job", rank, 3, 7000); });
    CHECK(num_files(directory) == 0);
  }
  SUBCASE("garbage in every file, which may belong to another program and stays") {
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
      if (entry.is_regular_file()) std::ofstream(entry.path(), std::ios::trunc) << "garbage";
    }
    const size_t files = num_files(directory);
    epx_bootstrap bootstrap{};
    CHECK(epx_bootstrap_file(path.c_str(), "job", 0, 3, kShortMs, &bootstrap) == EPX_ERROR_SYSTEM);
    CHECK_NOTHROW(check_tells(epx_last_error(), {path + "/epx-job", "alive.0.", "which epx did not write"}, "garbage"));
    CHECK(num_files(directory) == files);
  }
  SUBCASE("empty files") {
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
      if (entry.is_regular_file()) fs::resize_file(entry.path(), 0);
    }
    run_threads(3, [&](int rank) { check_rendezvous(path, "job", rank, 3, 7000); });
  }
}

TEST_CASE("two jobs share a directory at once, and the same job runs again and again") {
  const TempDirectory directory;
  const std::string path = directory.path().string();
  run_threads(6, [&](int thread) {
    const bool first = thread < 3;
    for (int i = 0; i < 5; ++i) {
      check_rendezvous(path, first ? "job" : "job.2", thread % 3, 3, first ? 1000 : 200000);
    }
  });
  CHECK(num_files(directory) == 0);
}

TEST_CASE("files are private") {
  const TempDirectory directory;
  const std::string path = directory.path().string();
  const mode_t mask = umask(0);
  const auto meet = [&](int rank) {
    epx_bootstrap bootstrap{};
    epx_bootstrap_file(path.c_str(), "job", rank, 2, kLongMs, &bootstrap);
    epx_bootstrap_free(&bootstrap);
  };
  std::thread waiting([&] { meet(0); });
  CHECK(wait_for_file(path, "alive.0."));
  const std::vector<fs::path> entries = entries_of(path);
  for (const fs::path& entry : entries) {
    struct stat stats {};
    if (lstat(entry.c_str(), &stats) != 0) continue; // renamed meanwhile
    CHECK((stats.st_mode & 07777) == (S_ISDIR(stats.st_mode) ? 0700 : 0600));
  }
  CHECK(entries.size() > 1);
  meet(1); // so that rank 0 ends
  waiting.join();
  umask(mask);
}

// Returns how the modes of what the rendezvous has made differ from 0700 and 0600; "" when they do not.
std::string wrong_modes(const fs::path& job) {
  std::string wrong;
  std::vector<fs::path> paths = entries_of(job.string());
  paths.push_back(job);
  for (const fs::path& path : paths) {
    struct stat stats {};
    if (lstat(path.c_str(), &stats) != 0 || path.filename().string().starts_with("tmp.")) continue;
    if ((stats.st_mode & 07777) != (S_ISDIR(stats.st_mode) ? 0700 : 0600))
      wrong += fmt::format(" {} has mode {:04o}", path.string(), stats.st_mode & 07777);
  }
  return wrong;
}

TEST_CASE("ranks meet and create a group whatever their umask is") {
  constexpr int kRanks = 3;
  for (const mode_t mask : {0000, 0022, 0077, 0177, 0277, 0477, 0777}) {
    CAPTURE(fmt::format("{:04o}", mask));
    const TempDirectory directory;
    const SharedMemoryWatch shared_memory;
    fs::permissions(directory.path(), fs::perms::all);
    const std::vector<ProcessResult> results = run_processes(kRanks, std::chrono::seconds(30), [&](int rank) {
      signal(SIGCHLD, [](int) { _exit(3); }); // a program may wait for children of its own
      // Permissions mean nothing to root. Such a process is hidden from its peers, so that segments get names.
      check(geteuid() != 0 || setuid(65534) == 0, "setuid failed");
      umask(mask);
      epx_bootstrap bootstrap{};
      check_ok(epx_bootstrap_file(directory.path().c_str(), "job", rank, kRanks, kLongMs, &bootstrap),
               "epx_bootstrap_file");
      const std::string wrong = wrong_modes(directory.path() / "epx-job");
      check(wrong.empty(), "{}", wrong);
      epx_group_config config{};
      epx_group_config_init(&config);
      config.num_experts = kRanks;
      config.max_tokens_per_rank = config.max_top_k = 1;
      config.hidden_dim = 4;
      config.max_token_dtype = EPX_FLOAT32;
      config.transport = EPX_TRANSPORT_HOST;
      epx_group group = nullptr;
      check_ok(epx_group_create(&bootstrap, &config, &group), "epx_group_create");
      epx_group_destroy(group);
      epx_bootstrap_free(&bootstrap);
      check(umask(0) == mask, "the umask has changed");
    });
    CHECK_NOTHROW(check_all_succeeded(results));
    CHECK(num_files(directory) == 0);
    CHECK(shared_memory.leftovers().empty());
  }
}

} // namespace
} // namespace epx::test
