// SPDX-License-Identifier: Apache-2.0
// These tests check how long a file rendezvous may take to fail, and which ranks it names when rank 0 has died. They run alone,
// since they check the times that epx.h promises.
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tests/unit/file_bootstrap_support.h"

namespace {

using namespace epx::test::files;

// epx.h promises a failure within 100 ms + 10 % after timeout_ms.
milliseconds promise(milliseconds timeout) {
  return timeout + 100ms + timeout / 10;
}

// Stops a rank for some time, and continues it also when the test fails.
void stop_for(RankProcess& rank, milliseconds time) {
  rank.stop();
  std::this_thread::sleep_for(time);
  rank.go_on();
}

// The exit status of a rank that failed as it must, but too late. No epx_status is as large.
constexpr int kLate = 100;

// Repeats what failed too late, twice at most: other work on the machine makes a rank late now and then, a wait that is too long makes
// it late each time. `attempt` returns whether all were in time, and checks everything else itself.
void check_in_time(const std::function<bool()>& attempt) {
  constexpr int kAttempts = 3;
  for (int i = 0; i < kAttempts; ++i)
    if (attempt()) return;
  FAIL_CHECK(fmt::format("too late {} times in a row", kAttempts));
}

// Waits for the rank, which must have failed as its body says. Returns whether it did so in time.
bool was_in_time(RankProcess& rank) {
  const int status = rank.join();
  const bool late = WIFEXITED(status) && WEXITSTATUS(status) == kLate;
  CHECK((late || status == 0));
  return !late;
}

// Starts a rank that must fail in time with a sentence that contains `word`; its exit status says whether it did.
std::unique_ptr<RankProcess> start_rank(const std::function<void()>& body, milliseconds timeout, const std::string& word) {
  return std::make_unique<RankProcess>([=] {
    const Outcome outcome = outcome_of(body);
    require(outcome.status == EPX_ERROR_TIMEOUT, fmt::format("{} ({})", outcome.message, static_cast<int>(outcome.status)));
    require(outcome.message.find(word) != std::string::npos, outcome.message);
    if (outcome.elapsed <= promise(timeout)) return;
    fmt::print(stderr, "took {} ms: {}\n", outcome.elapsed.count(), outcome.message);
    ::_exit(kLate);
  });
}

} // namespace

TEST_SUITE_BEGIN("file_bootstrap_deadline");

TEST_CASE("a rendezvous at which a rank is missing fails in time on every rank") {
  const TimeLimit limit(60);
  for (const milliseconds timeout : {200ms, 500ms, 1000ms})
    for (const std::vector<int>& present : {std::vector<int>{1, 2}, {0, 1}, {0, 2}, {0}, {2}}) {
      CAPTURE(timeout.count());
      CAPTURE(present.size());
      check_in_time([&] {
        const TempDirectory directory;
        bool in_time = true;
        for (const Outcome& outcome :
             run_ranks(present, [&](int rank) { Bootstrap bootstrap(directory.path(), "job", rank, 3, timeout); })) {
          CAPTURE(outcome.message);
          CHECK(outcome.status == EPX_ERROR_TIMEOUT);
          in_time = in_time && outcome.elapsed <= promise(timeout);
        }
        return in_time;
      });
    }
}

TEST_CASE("a rendezvous at which a rank falls silent fails in time on the others") {
  const TimeLimit limit(60);
  static constexpr milliseconds kTimeout = 500ms;
  for (const bool killed : {true, false})
    for (const int silent : {0, 1}) {
      CAPTURE(killed);
      CAPTURE(silent);
      check_in_time([&] {
        const TempDirectory directory;
        const auto meet = [&](int rank) {
          return [&directory, rank] { Bootstrap bootstrap(directory.path(), "job", rank, 4, kTimeout); };
        };
        // Rank 3 never comes. A rank 0 that is stopped is known to live, and is not blamed for that.
        const std::string word = killed && silent == 0 ? "rank 0 of 4 came and does not answer" : "rank 3 of 4 never came";
        RankProcess first([&] { outcome_of(meet(silent)); });
        auto second = start_rank(meet(1 - silent), kTimeout, word);
        auto third = start_rank(meet(2), kTimeout, word);
        // Both have the session's number, and have written their contributions.
        REQUIRE(wait_until([&] {
          int parts = 0;
          for (const std::string& name : names_in(directory.job("job")))
            parts += name.starts_with("in.0.") ? 1 : 0;
          return parts == 3;
        }));
        if (killed)
          first.kill();
        else
          stop_for(first, 900ms);
        const bool second_in_time = was_in_time(*second);
        return was_in_time(*third) && second_in_time;
      });
    }
}

// Ranks that are resumed get the whole timeout again, and no more.
TEST_CASE("a rendezvous that is suspended and at which a rank is missing fails in time after it is resumed") {
  const TimeLimit limit(60);
  static constexpr milliseconds kTimeout = 500ms;
  static constexpr milliseconds kBefore = 250ms; // of the timeout has passed
  static constexpr milliseconds kSuspended = 1500ms;
  for (const std::vector<int>& present : {std::vector<int>{0, 1}, {1, 2}}) {
    const std::string word = fmt::format("rank {} of 3 never came", present.front() == 0 ? 2 : 0);
    CAPTURE(word);
    check_in_time([&] {
      const TempDirectory directory;
      std::vector<std::unique_ptr<RankProcess>> ranks;
      for (const int rank : present)
        ranks.push_back(start_rank(
            [&directory, rank] {
              const Outcome outcome = outcome_of([&] { Bootstrap bootstrap(directory.path(), "job", rank, 3, kTimeout); });
              require(outcome.elapsed >= kBefore + kSuspended + kTimeout * 8 / 10,
                      fmt::format("took {} ms only: {}", outcome.elapsed.count(), outcome.message));
              throw epx::StatusError(outcome.status, outcome.message);
            },
            kBefore + kSuspended + kTimeout, word));
      std::this_thread::sleep_for(kBefore);
      for (const auto& rank : ranks)
        rank->stop();
      std::this_thread::sleep_for(kSuspended);
      for (const auto& rank : ranks)
        rank->go_on();
      bool in_time = true;
      for (const auto& rank : ranks)
        in_time = was_in_time(*rank) && in_time;
      return in_time;
    });
  }
}

TEST_CASE("an all-gather to which a rank does not come fails in time on the others") {
  const TimeLimit limit(60);
  static constexpr milliseconds kTimeout = 500ms;
  for (const int absent : {0, 1}) {
    CAPTURE(absent);
    check_in_time([&] {
      const TempDirectory directory;
      std::atomic<int> failed{0};
      std::atomic<bool> in_time{true};
      for (const Outcome& outcome : run_ranks(all_ranks(3), [&](int rank) {
             Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
             if (rank == absent) {
               require(wait_until([&] { return failed == 2; }), "nobody has failed");
               return;
             }
             const Outcome gather = outcome_of([&] { bootstrap.all_gather<int>({rank}, kTimeout); });
             ++failed;
             require(gather.status == EPX_ERROR_TIMEOUT, gather.message);
             require(gather.message.find(fmt::format("rank {} of 3 never came", absent)) != std::string::npos,
                     gather.message);
             if (gather.elapsed > promise(kTimeout)) in_time = false;
           }))
        CHECK_MESSAGE(outcome.status == EPX_SUCCESS, outcome.message);
      return in_time.load();
    });
  }
}

// Sixty jobs of four ranks run, some at a time. Each survivor waits for at most one timeout, and names rank 0 alone.
TEST_CASE("survivors of a rank 0 that was killed at a random time name rank 0 and no other rank") {
  const TimeLimit limit(60);
  constexpr int kRanks = 4;
  constexpr int kJobsAtOnce = 5;
  static constexpr milliseconds kTimeout = 400ms;
  std::mt19937 random(static_cast<unsigned>(::getpid()));
  for (int round = 0; round < 12; ++round) {
    const TempDirectory directory;
    struct Job {
      std::unique_ptr<RankProcess> rank0;
      std::vector<std::unique_ptr<RankProcess>> survivors;
    };
    std::vector<Job> jobs(kJobsAtOnce);
    for (int i = 0; i < kJobsAtOnce; ++i) {
      Job& job = jobs[static_cast<size_t>(i)];
      const auto body = [&directory, i](int rank) {
        Bootstrap bootstrap(directory.path(), fmt::format("job-{}", i), rank, kRanks, kTimeout);
        run_rounds(bootstrap, rank, kRanks, 1'000'000, kTimeout);
      };
      for (int rank = 1; rank < kRanks; ++rank)
        job.survivors.push_back(std::make_unique<RankProcess>([=] {
          const Outcome outcome = outcome_of([&] { body(rank); });
          require(outcome.status == EPX_ERROR_TIMEOUT, outcome.message);
          // "job ...: rank 2 waited 400 ms for the others to come; rank 0 of 4 ..."; or rank 0 took, and never answered.
          const std::string who = outcome.message.substr(outcome.message.find(';') + 1);
          require(who.find("rank 0") != std::string::npos, outcome.message);
          for (int other = 1; other < kRanks; ++other)
            if (other != rank) require(who.find(fmt::format("rank {}", other)) == std::string::npos, outcome.message);
          require(who.find("ranks") == std::string::npos, outcome.message);
        }));
      job.rank0 = std::make_unique<RankProcess>([=] { body(0); });
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 8'000));
      job.rank0->kill();
    }
    for (const Job& job : jobs)
      for (const auto& survivor : job.survivors)
        CHECK(survivor->join() == 0);
    CHECK(names_in(directory.path()).empty()); // the survivors have removed rank 0's files
  }
}

TEST_SUITE_END();
