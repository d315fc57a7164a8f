// SPDX-License-Identifier: Apache-2.0
// While the ranks of a file rendezvous wait, their load on the directory must not grow with the square of their number.
#include <atomic>
#include <chrono>

#include <dirent.h>
#include <dlfcn.h>

#include <doctest/doctest.h>

#include "tests/unit/file_bootstrap_support.h"
#include "transport/bootstrap/file_pace.h"

namespace {

using namespace epx::test::files;

std::atomic<int64_t> num_listings{0};

} // namespace

// The rendezvous lists its directory by fdopendir. The definition in the program comes before that of the C library.
extern "C" DIR* fdopendir(int fd) {
  static const auto kReal = reinterpret_cast<DIR* (*)(int)>(::dlsym(RTLD_NEXT, "fdopendir"));
  ++num_listings;
  return kReal(fd);
}

TEST_CASE("together the ranks poll no more than 10,000 times a second, and list no more names than 32 ranks do") {
  for (int num_ranks = 1; num_ranks <= 65535; ++num_ranks) {
    const double polls = num_ranks / std::chrono::duration<double>(epx::longest_sleep(num_ranks)).count();
    if (polls > 10'000.5) FAIL(num_ranks, " ranks poll ", polls, " times a second");
    if (epx::listing_interval(num_ranks) >= 10s) continue; // the longest interval
    const double lists = num_ranks / std::chrono::duration<double>(epx::listing_interval(num_ranks)).count();
    if (lists * num_ranks > 32 * 32 / 0.05 * 1.02) FAIL(num_ranks, " ranks list the directory ", lists, " times a second");
  }
  CHECK(epx::listing_interval(1) == 50ms);
  CHECK(epx::listing_interval(32) == 50ms);
  CHECK(epx::listing_interval(65535) == 10s);
}

TEST_CASE("64 ranks that wait for rank 0 list the directory seldom") {
  const CleanDirectory directory(60);
  constexpr int kWaiting = 64;
  constexpr auto kTimeout = 6000ms; // on a busy machine some threads come late
  const int64_t before = num_listings;
  std::vector<int> ranks(kWaiting);
  std::iota(ranks.begin(), ranks.end(), 1);
  const Clock::time_point start = Clock::now();
  for (const Outcome& outcome :
       run_ranks(ranks, [&](int rank) { Bootstrap bootstrap(directory.path(), "job", rank, kWaiting + 1, kTimeout); }))
    check_outcome(outcome, EPX_ERROR_TIMEOUT, {"rank 0 of 65 never came"});
  const auto elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
  // Beside those of the wait, a rank lists the directory three times when it comes, twice at its deadline and twice when it leaves.
  const int64_t each = 7 + elapsed / epx::listing_interval(kWaiting + 1);
  CHECK(num_listings - before <= kWaiting * each);
  CHECK(num_listings - before >= kWaiting * 3); // they are counted
}
