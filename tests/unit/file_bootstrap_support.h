// SPDX-License-Identifier: Apache-2.0
// The tests of the file rendezvous share these ranks, as threads and as processes, and their outcomes.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "base/error.h"
#include "tests/support/system_state.h"
#include "tests/support/time_limit.h"
#include "transport/bootstrap/file.h"

namespace epx::test::files {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using epx::test::TimeLimit;
using std::chrono::milliseconds;

inline const std::string kNonce = "0123456789abcdef0123456789abcdef"; // of a job that is not running

inline constexpr milliseconds kPatient = 20s; // a test that waits this long has failed
inline constexpr milliseconds kShort = 1000ms;
inline constexpr milliseconds kSlack = 3s; // what a loaded machine may add to a bounded wait

inline std::set<std::string> names_in(const fs::path& directory) {
  std::set<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    names.insert(it->path().filename().string());
  return names;
}

// A directory of a test, which may take `seconds`.
class TempDirectory : public test::TempDirectory {
public:
  explicit TempDirectory(unsigned seconds = 30) : limit_(seconds) {}

  std::string path() const { return test::TempDirectory::path().string(); }
  fs::path job(const std::string& id) const { return fs::path(path()) / ("epx-" + id); }

private:
  TimeLimit limit_;
};

// The same, and the test fails unless there is nothing in it in the end.
class CleanDirectory : public TempDirectory {
public:
  using TempDirectory::TempDirectory;
  ~CleanDirectory() { CHECK(names_in(path()).empty()); }
};

template <typename Condition>
bool wait_until(Condition condition, milliseconds limit = kPatient) {
  const Clock::time_point end = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() >= end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

// One rank's bootstrap is used as a caller of the C struct uses it.
class Bootstrap {
public:
  Bootstrap(const std::string& directory, const std::string& job, int rank, int num_ranks, milliseconds timeout)
      : bootstrap_(epx::make_file_bootstrap(directory, job, rank, num_ranks, timeout)) {}
  ~Bootstrap() { bootstrap_.release(bootstrap_.context); }
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

  const epx_bootstrap& get() const { return bootstrap_; }

  template <typename T>
  std::vector<T> all_gather(const std::vector<T>& mine, milliseconds timeout) {
    std::vector<T> all(mine.size() * static_cast<size_t>(bootstrap_.num_ranks));
    char message[1024] = "";
    const epx_status status = bootstrap_.all_gather(bootstrap_.context, mine.data(), all.data(), mine.size() * sizeof(T),
                                                    timeout.count(), message, sizeof(message));
    if (status != EPX_SUCCESS) throw epx::StatusError(status, message);
    return all;
  }

private:
  epx_bootstrap bootstrap_;
};

struct Outcome {
  epx_status status = EPX_SUCCESS;
  std::string message;
  milliseconds elapsed{};
};

inline Outcome outcome_of(const std::function<void()>& body) {
  const Clock::time_point begin = Clock::now();
  Outcome outcome;
  try {
    body();
  } catch (const epx::StatusError& error) {
    outcome = {error.status(), error.message(), {}};
  } catch (const std::exception& error) {
    outcome = {EPX_ERROR_INTERNAL, error.what(), {}};
  }
  outcome.elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
  return outcome;
}

// A rank that runs beside the test.
class RankThread {
public:
  explicit RankThread(std::function<void()> body)
      : thread_([this, body = std::move(body)] {
          outcome_ = outcome_of(body);
          done_ = true;
        }) {}
  ~RankThread() {
    if (thread_.joinable()) thread_.join();
  }
  RankThread(const RankThread&) = delete;
  RankThread& operator=(const RankThread&) = delete;

  bool done() const { return done_; }
  const Outcome& join() {
    if (thread_.joinable()) thread_.join();
    return outcome_;
  }

private:
  Outcome outcome_;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

inline std::vector<Outcome> run_ranks(const std::vector<int>& ranks, const std::function<void(int)>& body) {
  std::vector<std::unique_ptr<RankThread>> threads;
  threads.reserve(ranks.size());
  for (const int rank : ranks)
    threads.push_back(std::make_unique<RankThread>([&body, rank] { body(rank); }));
  std::vector<Outcome> outcomes;
  outcomes.reserve(ranks.size());
  for (const auto& thread : threads)
    outcomes.push_back(thread->join());
  return outcomes;
}

inline std::vector<int> all_ranks(int num_ranks) {
  std::vector<int> ranks(static_cast<size_t>(num_ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

inline void check_success(const std::vector<Outcome>& outcomes) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    CAPTURE(rank);
    CHECK_MESSAGE(outcomes[rank].status == EPX_SUCCESS, outcomes[rank].message);
  }
}

inline void check_outcome(const Outcome& outcome, epx_status status, const std::vector<std::string>& parts) {
  CAPTURE(outcome.message);
  CHECK(outcome.status == status);
  for (const std::string& part : parts) {
    CAPTURE(part);
    CHECK(outcome.message.find(part) != std::string::npos);
  }
}

inline void require(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

// `rounds` all-gathers whose sizes and values differ by round; throws when a byte is wrong.
inline void run_rounds(Bootstrap& bootstrap, int rank, int num_ranks, int rounds, milliseconds timeout) {
  constexpr size_t kSizes[] = {1, 0, 464, 3, 100'000};
  for (int round = 0; round < rounds; ++round) {
    const size_t bytes = kSizes[static_cast<size_t>(round) % std::size(kSizes)];
    const auto part = [&](int of) {
      std::vector<uint8_t> values(bytes);
      for (size_t i = 0; i < bytes; ++i)
        values[i] = static_cast<uint8_t>(round * 31 + of * 7 + static_cast<int>(i) * 3 + 1);
      return values;
    };
    std::vector<uint8_t> expected;
    for (int of = 0; of < num_ranks; ++of) {
      const std::vector<uint8_t> values = part(of);
      expected.insert(expected.end(), values.begin(), values.end());
    }
    require(bootstrap.all_gather(part(rank), timeout) == expected, fmt::format("round {}: wrong data", round));
  }
}

inline void run_job(const std::string& directory, const std::string& job, int num_ranks, int rounds = 5) {
  check_success(run_ranks(all_ranks(num_ranks), [&](int rank) {
    Bootstrap bootstrap(directory, job, rank, num_ranks, kPatient);
    run_rounds(bootstrap, rank, num_ranks, rounds, kPatient);
  }));
}

// ---- Ranks that are processes -------------------------------------------------------------------------------------------

class RankProcess {
public:
  explicit RankProcess(const std::function<void()>& body) {
    std::fflush(nullptr); // the parent prints what is buffered
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::alarm(30);
    const Outcome outcome = outcome_of(body);
    if (outcome.status != EPX_SUCCESS) fmt::print(stderr, "rank process: {}\n", outcome.message);
    ::_exit(outcome.status);
  }
  ~RankProcess() {
    if (pid_ > 0) kill();
  }
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  // Returns the status from waitpid; 0 is success.
  int join() {
    int status = -1;
    if (pid_ > 0) ::waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }
  void stop() { ::kill(pid_, SIGSTOP); }
  void go_on() { ::kill(pid_, SIGCONT); }
  void kill() {
    ::kill(pid_, SIGKILL);
    join();
  }

private:
  pid_t pid_ = -1;
};

// Changes all files in the job's directory as if a process on another machine had written them.
inline void move_to_another_host(const fs::path& job) {
  constexpr std::streamoff kHost = 64; // where the name of the host begins in a file
  for (const std::string& name : names_in(job)) {
    if (fs::file_size(job / name) < 176) continue; // less than a header: it was being written
    std::fstream file((job / name).string(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(kHost);
    file << "another-host";
  }
}

// Starts processes that join as `ranks` of `num_ranks`, and kills them once the hellos of all are there.
inline void leave_hellos(const TempDirectory& directory, const std::string& job, std::vector<int> ranks, int num_ranks) {
  std::sort(ranks.rbegin(), ranks.rend()); // rank 0 starts last, when no other rank can continue
  std::vector<std::unique_ptr<RankProcess>> processes;
  for (const int rank : ranks) {
    const fs::path hello = directory.job(job) / fmt::format("hello.{}", rank);
    std::error_code ignored;
    fs::remove(hello, ignored);
    processes.push_back(
        std::make_unique<RankProcess>([&] { Bootstrap bootstrap(directory.path(), job, rank, num_ranks, kPatient); }));
    CHECK(wait_until([&] { return fs::exists(hello); }));
    processes.back()->stop();
  }
}

} // namespace epx::test::files
