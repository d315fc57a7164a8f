// SPDX-License-Identifier: Apache-2.0
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <unistd.h>

#include "tests/support/check.h"
#include "tests/support/run_ranks.h"

namespace epx::test {

namespace {

struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> done;
  int num_done = 0;
  std::vector<std::string> failures; // in the order in which they happened
};

void run_rank(int rank, const std::function<void(int)>& fn, Progress& progress) {
  std::string failure;
  try {
    fn(rank);
  } catch (const std::exception& error) {
    failure = fmt::format("rank {}: {}", rank, describe(error));
  } catch (...) {
    failure = fmt::format("rank {}: threw something unknown", rank);
  }
  const std::scoped_lock lock(progress.mutex);
  progress.done[static_cast<size_t>(rank)] = true;
  ++progress.num_done;
  if (!failure.empty()) progress.failures.push_back(failure);
  progress.changed.notify_all();
}

[[noreturn]] void give_up(const Progress& progress, std::chrono::seconds time_limit) {
  for (const std::string& failure : progress.failures)
    std::fprintf(stderr, "%s\n", failure.c_str());
  for (size_t rank = 0; rank < progress.done.size(); ++rank) {
    if (!progress.done[rank])
      std::fprintf(stderr, "rank %zu still runs after %lld s\n", rank, static_cast<long long>(time_limit.count()));
  }
  std::fflush(nullptr);
  ::_exit(1);
}

} // namespace

void run_threads(int num_ranks, const std::function<void(int rank)>& fn, std::chrono::seconds time_limit) {
  Progress progress;
  progress.done.resize(static_cast<size_t>(num_ranks), false);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([rank, &fn, &progress] { run_rank(rank, fn, progress); });
  }
  {
    std::unique_lock lock(progress.mutex);
    const auto all_done = [&] { return progress.num_done == num_ranks; };
    if (!progress.changed.wait_for(lock, time_limit, all_done)) give_up(progress, time_limit);
  }
  for (std::thread& thread : threads)
    thread.join();
  if (progress.failures.empty()) return;
  std::string message;
  for (const std::string& failure : progress.failures)
    message += (message.empty() ? "" : "\n  ") + failure;
  throw CheckFailure(message);
}

} // namespace epx::test
