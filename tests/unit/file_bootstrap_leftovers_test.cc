// SPDX-License-Identifier: Apache-2.0
// Files that dead jobs left in a rendezvous directory do not disturb the next job, which removes them if they are certainly
// dead.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tests/unit/file_bootstrap_support.h"
#include "transport/bootstrap/file_messages.h"
#include "transport/bootstrap/rendezvous_names.h"

namespace {

using namespace epx::test::files;

bool any_name(const fs::path& job, const std::string& prefix) {
  const std::set<std::string> names = names_in(job);
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) { return name.starts_with(prefix); });
}

// A job follows a dead one. If that one ran on this host, no file is left in the end; if it ran elsewhere, all files stay
// except the hellos, which live ranks replace by their own, and the welcomes for these, which rank 0 replaces.
void follow_dead_jobs(bool elsewhere) {
  const TempDirectory directory(120);
  const fs::path job = directory.job("job");
  const auto bury = [&] {
    CHECK(any_name(job, "alive."));
    if (elsewhere) move_to_another_host(job);
  };
  const auto run = [&](int num_ranks) {
    std::set<std::string> before = names_in(job);
    run_job(directory.path(), "job", num_ranks);
    const std::set<std::string> after = names_in(job);
    CHECK(after.empty() == !elsewhere);
    for (const std::string& name : after) {
      CAPTURE(name);
      CHECK(before.contains(name)); // the job's own files have been removed
    }
    for (const std::string& name : before) {
      CAPTURE(name);
      if (elsewhere && !name.starts_with("hello.") && !name.starts_with("welcome.")) CHECK(after.contains(name));
    }
  };

  SUBCASE("hellos of all ranks") {
    leave_hellos(directory, "job", all_ranks(3), 3);
    for (const int rank : all_ranks(3))
      CHECK(fs::exists(job / fmt::format("hello.{}", rank)));
    bury();
    run(3);
    CHECK_FALSE(any_name(job, "hello."));
  }
  SUBCASE("hellos of all ranks, while the live ranks come one by one") {
    leave_hellos(directory, "job", all_ranks(3), 3);
    bury();
    check_success(run_ranks(all_ranks(3), [&](int rank) {
      std::this_thread::sleep_for(rank * 150ms);
      Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
      run_rounds(bootstrap, rank, 3, 5, kPatient);
    }));
  }
  SUBCASE("hellos of all ranks do not stand in for a live rank") {
    leave_hellos(directory, "job", all_ranks(3), 3);
    bury();
    for (const Outcome& outcome :
         run_ranks({0, 1}, [&](int rank) { Bootstrap bootstrap(directory.path(), "job", rank, 3, kShort); }))
      check_outcome(outcome, EPX_ERROR_TIMEOUT, {"rank 2 of 3 never came"});
    leave_hellos(directory, "job", all_ranks(3), 3);
    bury();
    check_outcome(outcome_of([&] { Bootstrap bootstrap(directory.path(), "job", 1, 3, kShort); }), EPX_ERROR_TIMEOUT,
                  {elsewhere ? "rank 0 of 3 never came" : "ranks 0, 2 of 3 never came"});
    CHECK(names_in(directory.path()).empty() == !elsewhere);
  }
  SUBCASE("hellos of a larger and of a smaller job") {
    leave_hellos(directory, "job", {1, 2, 4, 6}, 7);
    bury();
    run(3);
    run(3);
    leave_hellos(directory, "job", {1}, 2);
    bury();
    run(4);
  }
  SUBCASE("a welcome that no rank read") {
    {
      RankProcess rank1([&] { Bootstrap bootstrap(directory.path(), "job", 1, 3, kPatient); });
      REQUIRE(wait_until([&] { return any_name(job, "hello.1"); }));
      rank1.stop();
      RankProcess rank0([&] { Bootstrap bootstrap(directory.path(), "job", 0, 3, kPatient); });
      REQUIRE(wait_until([&] { return any_name(job, "welcome.1."); }));
    }
    bury();
    run(3);
  }
  SUBCASE("parts and answers of an all-gather") {
    for (const int victim : {0, 1}) {
      // Rank 2 never comes to the first all-gather, so that the contributions of the others lie there when they are killed.
      RankProcess rank2([&] {
        Bootstrap bootstrap(directory.path(), "job", 2, 3, kPatient);
        ::pause();
      });
      RankProcess rank0([&] {
        Bootstrap bootstrap(directory.path(), "job", 0, 3, kPatient);
        bootstrap.all_gather<int>({0}, kPatient);
      });
      RankProcess rank1([&] {
        Bootstrap bootstrap(directory.path(), "job", 1, 3, kPatient);
        bootstrap.all_gather<int>({1}, kPatient);
      });
      REQUIRE(wait_until([&] { return any_name(job, "in.1.0.") && any_name(job, "in.1.1."); }));
      (victim == 0 ? rank0 : rank1).kill();
      (victim == 0 ? rank1 : rank0).kill();
      rank2.kill();
      bury();
      run(3);
    }
  }
  SUBCASE("an answer that no rank read") {
    const std::string go = directory.path() + "/go";
    const auto rank_body = [&](int rank) {
      Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
      if (rank == 0) require(wait_until([&] { return fs::exists(go); }), "no sign to go on");
      bootstrap.all_gather<int>({rank}, kPatient);
      ::pause();
    };
    RankProcess rank0([&] { rank_body(0); });
    RankProcess rank1([&] { rank_body(1); });
    RankProcess rank2([&] { rank_body(2); });
    REQUIRE(wait_until([&] { return any_name(job, "in.1.1.") && any_name(job, "in.1.2."); }));
    rank2.stop(); // rank 2 has written its contribution, and does not read the answer
    std::ofstream(go) << "go";
    REQUIRE(wait_until([&] { return any_name(job, "out.1.2.") && !any_name(job, "out.1.1."); }));
    rank0.kill();
    rank1.kill();
    rank2.kill();
    bury();
    run(3);
  }
  SUBCASE("damaged hellos") {
    leave_hellos(directory, "job", {1, 2}, 3);
    bury();
    fs::resize_file(job / "hello.1", epx::kHeaderBytes - 1);
    fs::resize_file(job / "hello.2", epx::kHeaderBytes + 1);
    run(3);
  }
}

} // namespace

TEST_SUITE_BEGIN("file_bootstrap");

TEST_CASE("a job follows dead ones of this host") {
  follow_dead_jobs(false);
}

TEST_CASE("a job follows dead ones of another host") {
  follow_dead_jobs(true);
}

TEST_CASE("jobs killed at a random time leave no file once the next has started") {
  const TimeLimit limit(60);
  std::mt19937 random(3);
  const CleanDirectory directory;
  for (int repeat = 0; repeat < 20; ++repeat) {
    CAPTURE(repeat);
    {
      std::vector<std::unique_ptr<RankProcess>> ranks;
      for (int rank = 0; rank < 3; ++rank)
        ranks.push_back(std::make_unique<RankProcess>([&, rank] {
          Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
          run_rounds(bootstrap, rank, 3, 1'000'000, kPatient);
        }));
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    }
    Bootstrap alone(directory.path(), "job", 0, 1, kShort);
    CHECK(names_in(directory.job("job")).empty());
  }
}

TEST_CASE("the last survivor removes a killed rank's files") {
  const TempDirectory directory(60);
  for (const int victim : {0, 1}) {
    CAPTURE(victim);
    std::vector<std::unique_ptr<RankProcess>> ranks;
    for (int rank = 0; rank < 3; ++rank)
      ranks.push_back(std::make_unique<RankProcess>([&, rank] {
        Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
        if (rank == victim) ::pause();
        const Outcome outcome = outcome_of([&] { bootstrap.all_gather<int>({rank}, kShort); });
        require(outcome.status == EPX_ERROR_TIMEOUT, outcome.message);
      }));
    REQUIRE(wait_until([&] { return any_name(directory.job("job"), fmt::format("in.1.{}.", 1 - victim)); }));
    ranks[static_cast<size_t>(victim)]->kill();
    for (const auto& rank : ranks)
      rank->join();
    CHECK(names_in(directory.path()).empty());
  }
}

TEST_CASE("files of a live job are never taken for a dead one's") {
  const CleanDirectory directory(60);
  const fs::path job = directory.job("job");
  const auto rank_body = [&](int rank) {
    Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
    run_rounds(bootstrap, rank, 3, 5, kPatient);
  };
  RankProcess rank0([&] { rank_body(0); });
  RankProcess rank1([&] { rank_body(1); });
  REQUIRE(wait_until([&] { return any_name(job, "in.0.0.") && any_name(job, "in.0.1."); }));
  REQUIRE(wait_until([&] { return !any_name(job, "hello.1"); }));
  rank0.stop();
  rank1.stop();
  const std::set<std::string> before = names_in(job);
  for (int repeat = 0; repeat < 3; ++repeat) // a rank looks for leftovers when it joins and when it leaves
    Bootstrap(directory.path(), "job", 0, 1, kShort);
  CHECK(names_in(job) == before);
  // A dead rank beside a live one does not make the job a dead one.
  leave_hellos(directory, "job", {2}, 3);
  const std::set<std::string> with_dead = names_in(job);
  CHECK(with_dead.size() > before.size());
  Bootstrap(directory.path(), "job", 0, 1, kShort);
  for (const std::string& name : before)
    CHECK(names_in(job).contains(name));
  rank0.go_on();
  rank1.go_on();
  RankProcess rank2([&] { rank_body(2); });
  CHECK(rank0.join() == 0);
  CHECK(rank1.join() == 0);
  CHECK(rank2.join() == 0);
}

TEST_CASE("nothing is removed that another host, boot or PID namespace wrote") {
  const TimeLimit limit(60);
  epx::ProcessOrigin elsewhere[3] = {epx::this_process_origin(), epx::this_process_origin(), epx::this_process_origin()};
  REQUIRE(elsewhere[0].known());
  elsewhere[0].host[0] ^= 1;
  elsewhere[1].boot_id[0] ^= 1;
  elsewhere[2].pid_namespace ^= 1;
  for (const epx::ProcessOrigin& origin : elsewhere) {
    const TempDirectory directory;
    const fs::path job = directory.job("job");
    REQUIRE(::mkdir(job.c_str(), 0700) == 0);
    const std::set<std::string> names = {"alive.1." + kNonce, "in.0.1." + kNonce, "hello.9",
                                         epx::temporary_name(origin.hash(), kNonce, 0)};
    for (const std::string& name : names) {
      const auto kind = name.starts_with("alive") ? epx::MessageKind::kAlive
                        : name.starts_with("in")  ? epx::MessageKind::kIn
                                                  : epx::MessageKind::kHello;
      std::ofstream((job / name).string(), std::ios::binary)
          << epx::encode({kind, 1, 3, EPX_SUCCESS, kNonce, "", {}}, origin);
      fs::last_write_time(job / name, fs::file_time_type::clock::now() - 100h);
    }
    run_job(directory.path(), "job", 2);
    CHECK(names_in(job) == names);
  }
}

// A file of another host may belong to a live rank, so that the job is not certainly dead.
TEST_CASE("old leftovers of this host are removed by the next job whose ranks join") {
  const TempDirectory directory(60);
  const fs::path job = directory.job("job");
  REQUIRE(::mkdir(job.c_str(), 0700) == 0);
  const epx::ProcessOrigin here = epx::this_process_origin();
  epx::ProcessOrigin elsewhere = here;
  elsewhere.host[0] ^= 1;
  const auto put = [&](const std::string& name, const epx::ProcessOrigin& origin, std::chrono::hours age) {
    std::ofstream((job / name).string(), std::ios::binary)
        << epx::encode({epx::MessageKind::kIn, 1, 3, EPX_SUCCESS, kNonce, "", {}}, origin);
    fs::last_write_time(job / name, fs::file_time_type::clock::now() - age);
  };
  for (const char* name : {"hello.5", "hello.0"})
    put(name, here, 2h);
  for (const std::string name : {"alive.2.", "welcome.1.", "reject.1.", "in.1.2.", "quit.1.2.", "out.1.2."})
    put(name + kNonce, here, 2h);
  const fs::path unfinished = job / epx::temporary_name(here.hash(), kNonce, 7);
  put(unfinished.filename().string(), here, 0h);
  fs::resize_file(unfinished, 5);
  fs::last_write_time(unfinished, fs::file_time_type::clock::now() - 2h);
  put("alive.3." + kNonce, elsewhere, 2h);
  put("in.1.3." + kNonce, elsewhere, 2h);
  put("in.1.1." + kNonce, here, 0h); // too new to be certainly dead
  run_job(directory.path(), "job", 2);
  CAPTURE(fmt::format("{}", fmt::join(names_in(job), " ")));
  CHECK(names_in(job) == std::set<std::string>{"alive.3." + kNonce, "in.1.3." + kNonce, "in.1.1." + kNonce});
}

TEST_SUITE_END();
