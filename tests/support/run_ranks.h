// SPDX-License-Identifier: Apache-2.0
// Runs ranks as threads or as processes, for no longer than a time limit, and returns how each ended.
#pragma once

#include <chrono>
#include <csignal>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace epx::test {

// Runs fn(rank) on num_ranks threads. Throws CheckFailure with the message of every rank that threw, the earliest first.
// Threads cannot be killed: when one still runs at the time limit, the process says so and exits.
void run_threads(int num_ranks, const std::function<void(int rank)>& fn,
                 std::chrono::seconds time_limit = std::chrono::seconds(240));

struct ProcessResult {
  int rank = 0;
  int exit_code = -1;   // -1: ended by a signal
  int signal = 0;       // 0: exited
  bool stopped = false; // killed by the runner, at the time limit or since another rank had failed
  std::string output;   // of both stdout and stderr

  bool succeeded() const { return exit_code == 0; }
  std::string describe() const; // one line, then the output
};

struct ProcessOptions {
  std::chrono::milliseconds time_limit{60'000};
  bool stop_at_first_failure = false;                           // ends the others soon after one has failed
  std::function<void(int rank, std::string_view line)> on_line; // each line of output as it comes, without the newline
  const volatile std::sig_atomic_t* stop = nullptr;             // non-zero: end all, as at the time limit
};

// Forks num_ranks children; each runs fn(rank) and exits with what it returns. Children that are left at the time limit get
// SIGTERM and soon afterwards SIGKILL, their descendants too. The caller has no other threads.
std::vector<ProcessResult> spawn_processes(int num_ranks, const ProcessOptions& options,
                                           const std::function<int(int rank)>& fn);

// The same for test bodies: a child exits with 0, or with 1 after printing the exception that fn threw.
std::vector<ProcessResult> run_processes(int num_ranks, std::chrono::milliseconds time_limit,
                                         const std::function<void(int rank)>& fn);

// Throws CheckFailure unless every result succeeded.
void check_all_succeeded(const std::vector<ProcessResult>& results);

} // namespace epx::test
