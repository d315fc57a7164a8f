// SPDX-License-Identifier: Apache-2.0
// These tests check the file rendezvous. Ranks are threads, and processes where one of them dies.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tests/unit/file_bootstrap_support.h"

namespace {

using namespace epx::test::files;

} // namespace

TEST_SUITE_BEGIN("file_bootstrap");

TEST_CASE("ranks join and gather, and leave nothing behind") {
  for (const int num_ranks : {1, 2, 3, 4, 7}) {
    CAPTURE(num_ranks);
    const CleanDirectory directory(60);
    check_success(run_ranks(all_ranks(num_ranks), [&](int rank) {
      Bootstrap bootstrap(directory.path(), "job", rank, num_ranks, kPatient);
      require(bootstrap.get().struct_size == sizeof(epx_bootstrap), "struct_size");
      require(bootstrap.get().rank == rank && bootstrap.get().num_ranks == num_ranks, "rank or num_ranks");
      run_rounds(bootstrap, rank, num_ranks, 10, kPatient);
    }));
  }
}

TEST_CASE("make_file_bootstrap returns once all ranks have come") {
  const TempDirectory directory;
  const auto meet = [&](int rank) { Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient); };
  RankThread rank0([&] { meet(0); });
  RankThread rank1([&] { meet(1); });
  std::this_thread::sleep_for(200ms);
  CHECK_FALSE(rank0.done());
  CHECK_FALSE(rank1.done());
  meet(2);
  CHECK(rank0.join().status == EPX_SUCCESS);
  CHECK(rank1.join().status == EPX_SUCCESS);
}

TEST_CASE("ranks are processes") {
  const CleanDirectory directory;
  std::vector<std::unique_ptr<RankProcess>> ranks;
  ranks.reserve(4);
  for (int rank = 0; rank < 4; ++rank)
    ranks.push_back(std::make_unique<RankProcess>([&, rank] {
      Bootstrap bootstrap(directory.path(), "job", rank, 4, kPatient);
      run_rounds(bootstrap, rank, 4, 10, kPatient);
    }));
  for (const auto& rank : ranks)
    CHECK(rank->join() == 0);
}

TEST_CASE("a forked child that releases its parent's bootstrap does not change the parent's") {
  const CleanDirectory directory;
  RankProcess peer([&] {
    Bootstrap bootstrap(directory.path(), "job", 1, 2, kPatient);
    run_rounds(bootstrap, 1, 2, 3, kPatient);
  });
  RankProcess parent([&] {
    Bootstrap bootstrap(directory.path(), "job", 0, 2, kPatient);
    const std::set<std::string> names = names_in(directory.job("job"));
    const auto alive_files = [](const std::set<std::string>& all) {
      return std::count_if(all.begin(), all.end(), [](const std::string& name) { return name.starts_with("alive.0."); });
    };
    require(alive_files(names) == 1, "rank 0 has no alive file");
    RankProcess child([&] {
      epx_bootstrap copy = bootstrap.get();
      epx_bootstrap_free(&copy);
      require(copy.context == nullptr && copy.release == nullptr, "the struct is not cleared");
    });
    require(child.join() == 0, "the child failed");
    require(alive_files(names_in(directory.job("job"))) == 1, "the child has removed the alive file of rank 0");
    run_rounds(bootstrap, 0, 2, 3, kPatient);
  });
  CHECK(parent.join() == 0);
  CHECK(peer.join() == 0);
}

TEST_CASE("jobs of the same id may follow each other without a pause") {
  const CleanDirectory directory(60);
  check_success(run_ranks(all_ranks(3), [&](int rank) {
    for (int job = 0; job < 30; ++job) {
      Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
      run_rounds(bootstrap, rank, 3, 2, kPatient);
    }
  }));
}

TEST_CASE("jobs of different ids share a directory") {
  const CleanDirectory directory(60);
  check_success(run_ranks(all_ranks(6), [&](int i) {
    const int rank = i % 3;
    const int job = i / 3;
    Bootstrap bootstrap(directory.path(), fmt::format("job-{}", job), rank, 3, kPatient);
    for (int round = 0; round < 10; ++round) {
      const std::vector<int> all = bootstrap.all_gather<int>({1000 * job + rank}, kPatient);
      require(all == std::vector<int>{1000 * job, 1000 * job + 1, 1000 * job + 2}, "another job's data");
    }
  }));
}

TEST_CASE("when the directory is removed, the ranks create it again") {
  const CleanDirectory directory;
  std::atomic<int> met{0};
  std::atomic<bool> removed{false};
  RankThread remover([&] {
    require(wait_until([&] { return met == 2; }), "the ranks do not join");
    removed = fs::remove_all(directory.job("job")) > 0;
    require(removed, "the directory was not there");
  });
  check_success(run_ranks(all_ranks(2), [&](int rank) {
    Bootstrap bootstrap(directory.path(), "job", rank, 2, kPatient);
    ++met;
    require(wait_until([&] { return removed.load(); }), "the directory is not removed");
    run_rounds(bootstrap, rank, 2, 5, kPatient);
  }));
  CHECK(remover.join().status == EPX_SUCCESS);
}

TEST_CASE("files are private") {
  const TempDirectory directory;
  const mode_t old_mask = ::umask(0); // so that the modes are the library's own
  std::atomic<bool> stop{false};
  std::atomic<int> files{0};
  std::atomic<int> wrong{0};
  std::thread observer([&] {
    while (!stop) {
      struct stat info {};
      if (::stat(directory.job("job").c_str(), &info) == 0 && (info.st_mode & 07777) != 0700) ++wrong;
      for (const std::string& name : names_in(directory.job("job"))) {
        if (::lstat((directory.job("job") / name).c_str(), &info) != 0) continue;
        ++files;
        if ((info.st_mode & 07777) != 0600) ++wrong;
      }
      std::this_thread::sleep_for(500us);
    }
  });
  run_job(directory.path(), "job", 3, 20);
  stop = true;
  observer.join();
  ::umask(old_mask);
  CHECK(files > 0);
  CHECK(wrong == 0);
}

TEST_CASE("ranks that never come are named by all who wait") {
  struct Case {
    std::vector<int> present;
    std::string named;
  };
  for (const Case& c : {Case{{1, 2}, "rank 0 of 3"}, Case{{0, 1}, "rank 2 of 3"}, Case{{0}, "ranks 1, 2 of 3"},
                        Case{{2}, "ranks 0, 1 of 3"}, Case{{0, 2}, "rank 1 of 3"}}) {
    CAPTURE(c.named);
    const CleanDirectory directory;
    const std::vector<Outcome> outcomes =
        run_ranks(c.present, [&](int rank) { Bootstrap bootstrap(directory.path(), "job", rank, 3, kShort); });
    milliseconds longest{};
    for (const Outcome& outcome : outcomes) {
      check_outcome(outcome, EPX_ERROR_TIMEOUT, {"job 'job'", c.named + " never came", "1000 ms"});
      CHECK(outcome.elapsed < kShort + kSlack);
      longest = std::max(longest, outcome.elapsed);
    }
    CHECK(longest >= kShort); // a rank that joins a little later waits a little less
  }
}

TEST_CASE("a rank that times out first is not named by the others") {
  const CleanDirectory directory;
  RankThread rank0([&] { Bootstrap bootstrap(directory.path(), "job", 0, 3, kPatient); });
  RankThread rank1([&] { Bootstrap bootstrap(directory.path(), "job", 1, 3, kShort); });
  check_outcome(rank1.join(), EPX_ERROR_TIMEOUT, {"rank 2 of 3 never came"});
  check_outcome(rank0.join(), EPX_ERROR_TIMEOUT, {"rank 1 waited 1000 ms", "rank 2 of 3 never came"});
  CHECK(rank0.join().elapsed < kShort + kSlack); // long before its own deadline
}

TEST_CASE("a rank that does not come to an all-gather is named by all, and its late call fails") {
  for (const int late : {0, 2}) {
    CAPTURE(late);
    const CleanDirectory directory;
    std::atomic<int> failed{0};
    std::atomic<bool> late_is_done{false};
    const std::vector<Outcome> outcomes = run_ranks(all_ranks(3), [&](int rank) {
      Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
      run_rounds(bootstrap, rank, 3, 2, kPatient);
      if (rank == late) require(wait_until([&] { return failed == 2; }), "nobody has failed");
      const Outcome first = outcome_of([&] { bootstrap.all_gather<int>({rank}, kShort); });
      ++failed;
      if (rank == late) late_is_done = true;
      const Outcome again = outcome_of([&] { bootstrap.all_gather<int>({rank}, kShort); });
      require(again.status == first.status && again.message == first.message, "a failed bootstrap stays failed");
      require(wait_until([&] { return late_is_done.load(); }), "the late rank does not return");
      if (first.status != EPX_SUCCESS) throw epx::StatusError(first.status, first.message);
    });
    for (const Outcome& outcome : outcomes)
      check_outcome(outcome, EPX_ERROR_TIMEOUT, {"all-gather 3", fmt::format("rank {} of 3 never came", late)});
  }
}

TEST_CASE("ranks that pass different sizes get an error") {
  const CleanDirectory directory;
  const std::vector<Outcome> outcomes = run_ranks(all_ranks(3), [&](int rank) {
    Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
    bootstrap.all_gather<char>(std::vector<char>(rank == 2 ? 16 : 8), kPatient);
  });
  for (const Outcome& outcome : outcomes)
    check_outcome(outcome, EPX_ERROR_MISMATCH, {"rank 0 passes 8 bytes", "rank 2 passes 16"});
}

TEST_CASE("the callback keeps to its contract") {
  const TempDirectory directory;
  Bootstrap alone(directory.path(), "job", 0, 1, kPatient);
  const epx_bootstrap& c = alone.get();
  char message[8];
  std::memset(message, 'x', sizeof(message));
  CHECK(c.all_gather(c.context, "a", message, 1, 0, message, 5) == EPX_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(message, 5) == std::string("time\0", 5));
  CHECK(message[5] == 'x');
  CHECK(c.all_gather(c.context, "a", nullptr, 1, 100, nullptr, 0) == EPX_ERROR_INVALID_ARGUMENT);
  CHECK(c.all_gather(c.context, nullptr, nullptr, 0, 100, nullptr, 0) == EPX_SUCCESS);
  CHECK(alone.all_gather<int>({42}, milliseconds::max()) == std::vector<int>{42});
}

TEST_CASE("arguments are checked") {
  const TempDirectory directory;
  const auto make = [&](const std::string& job, int rank, int num_ranks, milliseconds timeout) {
    return outcome_of([&] { Bootstrap bootstrap(directory.path(), job, rank, num_ranks, timeout); });
  };
  check_outcome(make("", 0, 1, kShort), EPX_ERROR_INVALID_ARGUMENT, {"job_id", "0 characters"});
  check_outcome(make(std::string(65, 'a'), 0, 1, kShort), EPX_ERROR_INVALID_ARGUMENT, {"job_id", "65 characters"});
  check_outcome(make("a/b", 0, 1, kShort), EPX_ERROR_INVALID_ARGUMENT, {"job_id", "a/b"});
  check_outcome(make("a b", 0, 1, kShort), EPX_ERROR_INVALID_ARGUMENT, {"job_id", "a b"});
  check_outcome(make("job", -1, 2, kShort), EPX_ERROR_INVALID_ARGUMENT, {"rank is -1", "0..1"});
  check_outcome(make("job", 2, 2, kShort), EPX_ERROR_INVALID_ARGUMENT, {"rank is 2", "0..1"});
  check_outcome(make("job", 0, 0, kShort), EPX_ERROR_INVALID_ARGUMENT, {"num_ranks is 0"});
  check_outcome(make("job", 0, 1, 0ms), EPX_ERROR_INVALID_ARGUMENT, {"timeout_ms is 0"});
  check_outcome(outcome_of([] { Bootstrap bootstrap("", "job", 0, 1, kShort); }), EPX_ERROR_INVALID_ARGUMENT,
                {"directory"});
  CHECK(names_in(directory.path()).empty());
  for (const std::string& job : {std::string("."), std::string(".."), std::string(64, 'Z'), std::string("A-z_0.9")})
    CHECK(make(job, 0, 1, milliseconds::max()).status == EPX_SUCCESS);
  CHECK(names_in(directory.path()).empty());
}

TEST_CASE("a directory that cannot be used is an error at once, with its path and the system's message") {
  const TempDirectory directory;
  const auto make = [&](const std::string& parent, int num_ranks) {
    return outcome_of([&] { Bootstrap bootstrap(parent, "job", 0, num_ranks, kPatient); });
  };
  const std::string missing = directory.path() + "/missing";
  const std::string plain = directory.path() + "/plain";
  std::ofstream(plain) << "not a directory";
  for (const int num_ranks : {1, 2}) {
    check_outcome(make(missing, num_ranks), EPX_ERROR_SYSTEM, {missing, "No such file or directory"});
    check_outcome(make(plain, num_ranks), EPX_ERROR_SYSTEM, {plain, "Not a directory"});
  }

  const std::string read_only = directory.path() + "/read-only";
  fs::create_directory(read_only);
  fs::permissions(directory.path(), fs::perms(0755));
  fs::permissions(read_only, fs::perms(0555));
  RankProcess child([&] {
    if (::geteuid() == 0) require(::setgid(65534) == 0 && ::setuid(65534) == 0, "setuid"); // root may write anywhere
    const Outcome outcome = make(read_only, 2);
    require(outcome.status == EPX_ERROR_SYSTEM, outcome.message);
    require(outcome.message.find(read_only) != std::string::npos, outcome.message);
    require(outcome.message.find("Permission denied") != std::string::npos, outcome.message);
  });
  CHECK(child.join() == 0);
}

TEST_CASE("a hello that is removed is written again") {
  const TempDirectory directory;
  const fs::path hello = directory.job("job") / "hello.1";
  RankThread rank1([&] { Bootstrap bootstrap(directory.path(), "job", 1, 2, kPatient); });
  REQUIRE(wait_until([&] { return fs::exists(hello); }));
  fs::remove(hello);
  CHECK(wait_until([&] { return fs::exists(hello); }));
  Bootstrap rank0(directory.path(), "job", 0, 2, kPatient);
  CHECK(rank1.join().status == EPX_SUCCESS);
}

TEST_CASE("two processes that claim one rank are both rejected") {
  for (const int rank : {0, 1}) {
    CAPTURE(rank);
    const CleanDirectory directory;
    RankThread first([&] { Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient); });
    REQUIRE(wait_until([&] { return fs::exists(directory.job("job") / fmt::format("hello.{}", rank)); }));
    const Outcome second = outcome_of([&] { Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient); });
    const std::string sentence = fmt::format("two processes claim rank {}", rank);
    check_outcome(second, EPX_ERROR_MISMATCH, {"job 'job'", sentence});
    check_outcome(first.join(), EPX_ERROR_MISMATCH, {"job 'job'", sentence});
  }
}

TEST_CASE("a process that claims a rank of a running session is refused, and the session continues") {
  const CleanDirectory directory;
  const auto rank_body = [&](int rank) {
    Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
    run_rounds(bootstrap, rank, 3, 5, kPatient);
  };
  const fs::path job = directory.job("job");
  RankThread rank0([&] { rank_body(0); });
  RankThread rank1([&] { rank_body(1); });
  REQUIRE(wait_until([&] {
    for (const std::string& name : names_in(job))
      if (name.starts_with("in.0.1.")) return true;
    return false;
  }));
  REQUIRE(wait_until([&] { return !fs::exists(job / "hello.1"); }));
  std::this_thread::sleep_for(20ms); // rank 0 looks every 5 ms
  check_outcome(outcome_of([&] { rank_body(1); }), EPX_ERROR_MISMATCH, {"two processes claim rank 1"});
  rank_body(2);
  CHECK(rank0.join().status == EPX_SUCCESS);
  CHECK(rank1.join().status == EPX_SUCCESS);
}

TEST_CASE("when ranks disagree on num_ranks, all report both values") {
  struct Rank {
    int rank;
    int num_ranks;
  };
  struct Case {
    std::vector<Rank> ranks;
    std::vector<std::string> parts;
  };
  for (const Case& c : {Case{{{0, 2}, {1, 3}}, {"rank 0 has num_ranks 2", "rank 1 has num_ranks 3"}},
                        Case{{{0, 3}, {1, 2}}, {"rank 0 has num_ranks 3", "rank 1 has num_ranks 2"}},
                        Case{{{0, 3}, {1, 3}, {5, 6}}, {"rank 0 has num_ranks 3", "rank 5 has num_ranks 6"}}}) {
    const CleanDirectory directory;
    const std::vector<Outcome> outcomes = run_ranks(all_ranks(static_cast<int>(c.ranks.size())), [&](int i) {
      const Rank& rank = c.ranks[static_cast<size_t>(i)];
      Bootstrap bootstrap(directory.path(), "job", rank.rank, rank.num_ranks, kShort);
    });
    check_outcome(outcomes[0], EPX_ERROR_MISMATCH, c.parts);
    check_outcome(outcomes.back(), EPX_ERROR_MISMATCH, c.parts);
    if (c.ranks.size() == 3 && outcomes[1].status != EPX_ERROR_TIMEOUT) // unless it came after rank 0 had left
      check_outcome(outcomes[1], EPX_ERROR_MISMATCH, c.parts);
  }
}

TEST_CASE("two jobs of the same id at once end in errors or in complete sessions") {
  const TimeLimit limit(120);
  std::mt19937 random(7);
  for (int repeat = 0; repeat < 9; ++repeat) {
    CAPTURE(repeat);
    constexpr int kRanks = 3;
    const TempDirectory directory;
    std::vector<milliseconds> delay(size_t{2} * kRanks);
    for (milliseconds& d : delay)
      d = milliseconds(random() % 30);
    std::vector<std::vector<int>> gathered(size_t{2} * kRanks);
    const std::vector<Outcome> outcomes = run_ranks(all_ranks(2 * kRanks), [&](int i) {
      std::this_thread::sleep_for(delay[static_cast<size_t>(i)]);
      Bootstrap bootstrap(directory.path(), "job", i % kRanks, kRanks, kShort);
      std::vector<int> first = bootstrap.all_gather<int>({i}, kShort);
      require(bootstrap.all_gather<int>({i}, kShort) == first, "the session has changed");
      gathered[static_cast<size_t>(i)] = std::move(first);
    });
    for (int i = 0; i < 2 * kRanks; ++i) {
      const Outcome& outcome = outcomes[static_cast<size_t>(i)];
      CAPTURE(outcome.message);
      CHECK(outcome.elapsed < 3 * kShort + kSlack);
      if (outcome.status != EPX_SUCCESS) {
        CHECK((outcome.status == EPX_ERROR_MISMATCH || outcome.status == EPX_ERROR_TIMEOUT));
        continue;
      }
      const std::vector<int>& members = gathered[static_cast<size_t>(i)];
      REQUIRE(members.size() == kRanks);
      CHECK(members[static_cast<size_t>(i % kRanks)] == i);
      for (int rank = 0; rank < kRanks; ++rank) {
        const int member = members[static_cast<size_t>(rank)];
        CHECK(member % kRanks == rank);
        if (outcomes[static_cast<size_t>(member)].status == EPX_SUCCESS)
          CHECK(gathered[static_cast<size_t>(member)] == members);
      }
    }
  }
}

TEST_CASE("a killed rank is named, and the next job of the same id succeeds") {
  for (const int victim : {0, 1, 2}) {
    CAPTURE(victim);
    const TempDirectory directory(60);
    std::vector<std::unique_ptr<RankProcess>> ranks;
    ranks.reserve(4);
    for (int rank = 0; rank < 3; ++rank)
      ranks.push_back(std::make_unique<RankProcess>([&, rank] {
        Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
        run_rounds(bootstrap, rank, 3, 2, kPatient);
        if (rank == victim) ::raise(SIGKILL);
        const Outcome outcome = outcome_of([&] { bootstrap.all_gather<int>({rank}, kShort); });
        require(outcome.status == EPX_ERROR_TIMEOUT, outcome.message);
        require(outcome.message.find(fmt::format("rank {} of 3", victim)) != std::string::npos, outcome.message);
        require(outcome.elapsed < kShort + kSlack, "took too long");
      }));
    for (int rank = 0; rank < 3; ++rank) {
      const int status = ranks[static_cast<size_t>(rank)]->join();
      if (rank == victim)
        CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
      else
        CHECK(status == 0);
    }
    CHECK(names_in(directory.path()).empty()); // it was killed between two rounds, so that it had no file
    run_job(directory.path(), "job", 3);
    CHECK(names_in(directory.path()).empty());
  }
}

TEST_CASE("a rank killed at a random time makes neither the others nor the next job hang") {
  const TimeLimit limit(120);
  std::mt19937 random(11);
  for (int repeat = 0; repeat < 9; ++repeat) {
    CAPTURE(repeat);
    const TempDirectory directory;
    std::vector<std::unique_ptr<RankProcess>> ranks;
    ranks.reserve(4);
    for (int rank = 0; rank < 3; ++rank)
      ranks.push_back(std::make_unique<RankProcess>([&, rank] {
        const Outcome outcome = outcome_of([&] {
          Bootstrap bootstrap(directory.path(), "job", rank, 3, kShort);
          run_rounds(bootstrap, rank, 3, 1'000'000, kShort);
        });
        require(outcome.status == EPX_ERROR_TIMEOUT, outcome.message);
      }));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 40'000));
    ranks[static_cast<size_t>(repeat % 3)]->kill();
    for (int rank = 0; rank < 3; ++rank)
      if (rank != repeat % 3) CHECK(ranks[static_cast<size_t>(rank)]->join() == 0);
    run_job(directory.path(), "job", 3);
  }
}

TEST_SUITE_END();
