// The file rendezvous. Ranks are threads where nobody dies, and processes where somebody does.
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

#include "runtime/base/error.h"
#include "tests/support/time_limit.h"
#include "transport/bootstrap/file.h"

namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using epx::test::TimeLimit;
using std::chrono::milliseconds;

constexpr milliseconds kPatient = 20s; // a test that has to wait this long has failed
constexpr milliseconds kShort = 400ms;
constexpr milliseconds kSlack = 3s; // what a loaded machine may add to a bounded wait

class TempDirectory {
public:
  TempDirectory() {
    std::string name = (fs::temp_directory_path() / "epx-file-bootstrap-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = name;
  }
  ~TempDirectory() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  const std::string& path() const { return path_; }
  fs::path job(const std::string& id) const { return fs::path(path_) / ("epx-" + id); }

private:
  std::string path_;
};

std::set<std::string> names_in(const fs::path& directory) {
  std::set<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    names.insert(it->path().filename().string());
  return names;
}

template <typename Condition>
bool wait_until(Condition condition, milliseconds limit = kPatient) {
  const Clock::time_point end = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() >= end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

// One rank's bootstrap, used as a caller of the C struct uses it.
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
    if (status != EPX_SUCCESS) throw epx::Error(status, message);
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

Outcome outcome_of(const std::function<void()>& body) {
  const Clock::time_point begin = Clock::now();
  Outcome outcome;
  try {
    body();
  } catch (const epx::Error& error) {
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

std::vector<Outcome> run_ranks(const std::vector<int>& ranks, const std::function<void(int)>& body) {
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

std::vector<int> all_ranks(int num_ranks) {
  std::vector<int> ranks(static_cast<size_t>(num_ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void check_success(const std::vector<Outcome>& outcomes) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    CAPTURE(rank);
    CHECK_MESSAGE(outcomes[rank].status == EPX_SUCCESS, outcomes[rank].message);
  }
}

void check_outcome(const Outcome& outcome, epx_status status, const std::vector<std::string>& parts) {
  CAPTURE(outcome.message);
  CHECK(outcome.status == status);
  for (const std::string& part : parts) {
    CAPTURE(part);
    CHECK(outcome.message.find(part) != std::string::npos);
  }
}

void require(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

// `rounds` all-gathers whose sizes and values differ by round; throws when a byte is wrong.
void run_rounds(Bootstrap& bootstrap, int rank, int num_ranks, int rounds, milliseconds timeout) {
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

void run_job(const std::string& directory, const std::string& job, int num_ranks, int rounds = 5) {
  check_success(run_ranks(all_ranks(num_ranks), [&](int rank) {
    Bootstrap bootstrap(directory, job, rank, num_ranks, kPatient);
    run_rounds(bootstrap, rank, num_ranks, rounds, kPatient);
  }));
}

// ---- Ranks that are processes -------------------------------------------------------------------------------------------

class RankProcess {
public:
  explicit RankProcess(const std::function<void()>& body) {
    std::fflush(nullptr); // what is buffered is the parent's to print
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

  // What waitpid says: 0 is success.
  int join() {
    int status = -1;
    if (pid_ > 0) ::waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }
  void stop() { ::kill(pid_, SIGSTOP); }
  void kill() {
    ::kill(pid_, SIGKILL);
    join();
  }

private:
  pid_t pid_ = -1;
};

// Kills processes that are at the door as `ranks` of `num_ranks`, once their hellos are there.
void leave_hellos(const TempDirectory& directory, const std::string& job, const std::vector<int>& ranks, int num_ranks) {
  for (const int rank : ranks) {
    const fs::path hello = directory.job(job) / fmt::format("hello.{}", rank);
    std::error_code ignored;
    fs::remove(hello, ignored);
    RankProcess process([&] { Bootstrap bootstrap(directory.path(), job, rank, num_ranks, kPatient); });
    CHECK(wait_until([&] { return fs::exists(hello); }));
    process.kill();
  }
}

} // namespace

TEST_SUITE_BEGIN("file_bootstrap");

TEST_CASE("ranks meet and gather, and leave nothing behind") {
  for (const int num_ranks : {1, 2, 3, 4, 7}) {
    CAPTURE(num_ranks);
    const TimeLimit limit(60);
    const TempDirectory directory;
    check_success(run_ranks(all_ranks(num_ranks), [&](int rank) {
      Bootstrap bootstrap(directory.path(), "job", rank, num_ranks, kPatient);
      require(bootstrap.get().struct_size == sizeof(epx_bootstrap), "struct_size");
      require(bootstrap.get().rank == rank && bootstrap.get().num_ranks == num_ranks, "rank or num_ranks");
      run_rounds(bootstrap, rank, num_ranks, 10, kPatient);
    }));
    CHECK(names_in(directory.path()).empty());
  }
}

TEST_CASE("make_file_bootstrap returns once all ranks have come") {
  const TimeLimit limit(30);
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
  const TimeLimit limit(30);
  const TempDirectory directory;
  std::vector<std::unique_ptr<RankProcess>> ranks;
  ranks.reserve(4);
  for (int rank = 0; rank < 4; ++rank)
    ranks.push_back(std::make_unique<RankProcess>([&, rank] {
      Bootstrap bootstrap(directory.path(), "job", rank, 4, kPatient);
      run_rounds(bootstrap, rank, 4, 10, kPatient);
    }));
  for (const auto& rank : ranks)
    CHECK(rank->join() == 0);
  CHECK(names_in(directory.path()).empty());
}

TEST_CASE("jobs of the same id may follow each other without a pause") {
  const TimeLimit limit(60);
  const TempDirectory directory;
  check_success(run_ranks(all_ranks(3), [&](int rank) {
    for (int job = 0; job < 30; ++job) {
      Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
      run_rounds(bootstrap, rank, 3, 2, kPatient);
    }
  }));
  CHECK(names_in(directory.path()).empty());
}

TEST_CASE("jobs of different ids share a directory") {
  const TimeLimit limit(60);
  const TempDirectory directory;
  check_success(run_ranks(all_ranks(6), [&](int i) {
    const int rank = i % 3;
    const int job = i / 3;
    Bootstrap bootstrap(directory.path(), fmt::format("job-{}", job), rank, 3, kPatient);
    for (int round = 0; round < 10; ++round) {
      const std::vector<int> all = bootstrap.all_gather<int>({1000 * job + rank}, kPatient);
      require(all == std::vector<int>{1000 * job, 1000 * job + 1, 1000 * job + 2}, "another job's data");
    }
  }));
  CHECK(names_in(directory.path()).empty());
}

TEST_CASE("a rank that leaves removes the directory, and those that stay create it again") {
  const TimeLimit limit(30);
  const TempDirectory directory;
  std::atomic<int> met{0};
  std::atomic<bool> removed{false};
  RankThread remover([&] {
    require(wait_until([&] { return met == 2; }), "the ranks do not meet");
    removed = fs::remove(directory.job("job"));
    require(removed, "the directory was not there");
  });
  check_success(run_ranks(all_ranks(2), [&](int rank) {
    Bootstrap bootstrap(directory.path(), "job", rank, 2, kPatient);
    ++met;
    require(wait_until([&] { return removed.load(); }), "the directory is not removed");
    run_rounds(bootstrap, rank, 2, 5, kPatient);
  }));
  CHECK(remover.join().status == EPX_SUCCESS);
  CHECK(names_in(directory.path()).empty());
}

TEST_CASE("files are private") {
  const TimeLimit limit(30);
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
    const TimeLimit limit(30);
    const TempDirectory directory;
    const std::vector<Outcome> outcomes =
        run_ranks(c.present, [&](int rank) { Bootstrap bootstrap(directory.path(), "job", rank, 3, kShort); });
    milliseconds longest{};
    for (const Outcome& outcome : outcomes) {
      check_outcome(outcome, EPX_ERROR_TIMEOUT, {"job 'job'", c.named + " never came", "400 ms"});
      CHECK(outcome.elapsed < kShort + kSlack);
      longest = std::max(longest, outcome.elapsed);
    }
    CHECK(longest >= kShort); // who comes a little later hears of it a little sooner
    CHECK(names_in(directory.path()).empty());
  }
}

TEST_CASE("a rank that loses patience first does not become the culprit") {
  const TimeLimit limit(30);
  const TempDirectory directory;
  RankThread rank0([&] { Bootstrap bootstrap(directory.path(), "job", 0, 3, kPatient); });
  RankThread rank1([&] { Bootstrap bootstrap(directory.path(), "job", 1, 3, kShort); });
  check_outcome(rank1.join(), EPX_ERROR_TIMEOUT, {"rank 2 of 3 never came"});
  check_outcome(rank0.join(), EPX_ERROR_TIMEOUT, {"rank 1 waited 400 ms", "rank 2 of 3 never came"});
  CHECK(rank0.join().elapsed < kShort + kSlack); // long before its own deadline
  CHECK(names_in(directory.path()).empty());
}

TEST_CASE("a rank that does not come to an all-gather is named by all, and learns it when it comes") {
  for (const int late : {0, 2}) {
    CAPTURE(late);
    const TimeLimit limit(30);
    const TempDirectory directory;
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
      if (first.status != EPX_SUCCESS) throw epx::Error(first.status, first.message);
    });
    for (const Outcome& outcome : outcomes)
      check_outcome(outcome, EPX_ERROR_TIMEOUT, {"all-gather 3", fmt::format("rank {} of 3 never came", late)});
    CHECK(names_in(directory.path()).empty());
  }
}

TEST_CASE("ranks that pass different sizes are told so") {
  const TimeLimit limit(30);
  const TempDirectory directory;
  const std::vector<Outcome> outcomes = run_ranks(all_ranks(3), [&](int rank) {
    Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
    bootstrap.all_gather<char>(std::vector<char>(rank == 2 ? 16 : 8), kPatient);
  });
  for (const Outcome& outcome : outcomes)
    check_outcome(outcome, EPX_ERROR_MISMATCH, {"rank 0 passes 8 bytes", "rank 2 passes 16"});
  CHECK(names_in(directory.path()).empty());
}

TEST_CASE("the callback keeps to its contract") {
  const TimeLimit limit(30);
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
  const TimeLimit limit(30);
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

TEST_CASE("a directory that cannot be used is an error at once, with its path and the system's words") {
  const TimeLimit limit(30);
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

TEST_CASE("a job directory that others could use is refused or made private") {
  const TimeLimit limit(30);
  const TempDirectory directory;
  const auto make = [&] { return outcome_of([&] { Bootstrap bootstrap(directory.path(), "job", 0, 1, kPatient); }); };
  const fs::path job = directory.job("job");

  fs::create_directory(directory.path() + "/elsewhere");
  fs::create_directory_symlink(directory.path() + "/elsewhere", job);
  check_outcome(make(), EPX_ERROR_SYSTEM, {job.string()});
  fs::remove(job);

  std::ofstream(job.string()) << "a file";
  check_outcome(make(), EPX_ERROR_SYSTEM, {job.string(), "Not a directory"});
  fs::remove(job);

  fs::create_directory(job);
  fs::permissions(job, fs::perms(0777));
  std::ofstream((job / "keep").string()) << "so that the directory stays";
  CHECK(make().status == EPX_SUCCESS);
  CHECK((fs::status(job).permissions() & fs::perms::mask) == fs::perms(0700));

  if (::geteuid() == 0) {
    REQUIRE(::chown(job.c_str(), 65534, 65534) == 0);
    check_outcome(make(), EPX_ERROR_SYSTEM, {job.string(), "user 65534"});
  }
}

TEST_CASE("what a dead job left behind does not disturb") {
  const TimeLimit limit(120);
  const TempDirectory directory;
  const fs::path job = directory.job("job");
  const auto run = [&](int num_ranks) {
    std::set<std::string> before = names_in(job);
    run_job(directory.path(), "job", num_ranks);
    for (const std::string& name : names_in(job)) {
      CAPTURE(name);
      CHECK(before.contains(name)); // nothing of its own is left
    }
  };

  SUBCASE("hellos of all ranks") {
    leave_hellos(directory, "job", all_ranks(3), 3);
    for (const int rank : all_ranks(3))
      CHECK(fs::exists(job / fmt::format("hello.{}", rank)));
    run(3);
    for (const std::string& name : names_in(job))
      CHECK_FALSE(name.starts_with("hello."));
  }
  SUBCASE("hellos of all ranks, while the live ranks come one by one") {
    leave_hellos(directory, "job", all_ranks(3), 3);
    check_success(run_ranks(all_ranks(3), [&](int rank) {
      std::this_thread::sleep_for(rank * 150ms);
      Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient);
      run_rounds(bootstrap, rank, 3, 5, kPatient);
    }));
  }
  SUBCASE("hellos of all ranks do not stand in for a live rank") {
    leave_hellos(directory, "job", all_ranks(3), 3);
    for (const Outcome& outcome :
         run_ranks({0, 1}, [&](int rank) { Bootstrap bootstrap(directory.path(), "job", rank, 3, kShort); }))
      check_outcome(outcome, EPX_ERROR_TIMEOUT, {"rank 2 of 3 never came"});
    leave_hellos(directory, "job", all_ranks(3), 3);
    check_outcome(outcome_of([&] { Bootstrap bootstrap(directory.path(), "job", 1, 3, kShort); }), EPX_ERROR_TIMEOUT,
                  {"rank 0 of 3 never came"});
  }
  SUBCASE("hellos of a larger and of a smaller job") {
    leave_hellos(directory, "job", {1, 2, 4, 6}, 7);
    run(3);
    run(3);
    leave_hellos(directory, "job", {1}, 2);
    run(4);
  }
  SUBCASE("a welcome that nobody took") {
    leave_hellos(directory, "job", {1}, 3);
    const auto welcomes = [&] {
      int count = 0;
      for (const std::string& name : names_in(job))
        count += name.starts_with("welcome.1.") ? 1 : 0;
      return count;
    };
    {
      RankProcess rank0([&] { Bootstrap bootstrap(directory.path(), "job", 0, 3, kPatient); });
      REQUIRE(wait_until([&] { return welcomes() == 1; }));
      rank0.kill();
    }
    run(3);
  }
  SUBCASE("parts and answers of an all-gather") {
    for (const int victim : {0, 1}) {
      const auto has = [&](const std::string& prefix) {
        for (const std::string& name : names_in(job))
          if (name.starts_with(prefix)) return true;
        return false;
      };
      // Rank 2 never comes to the first all-gather, so that the parts of the others lie there when they are killed.
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
      REQUIRE(wait_until([&] { return has("in.1.0.") && has("in.1.1."); }));
      (victim == 0 ? rank0 : rank1).kill();
      (victim == 0 ? rank1 : rank0).kill();
      rank2.kill();
      run(3);
    }
  }
  SUBCASE("an answer that nobody read") {
    const auto has = [&](const std::string& prefix) {
      for (const std::string& name : names_in(job))
        if (name.starts_with(prefix)) return true;
      return false;
    };
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
    REQUIRE(wait_until([&] { return has("in.1.1.") && has("in.1.2."); }));
    rank2.stop(); // it has handed in its part, and does not see the answer
    std::ofstream(go) << "go";
    REQUIRE(wait_until([&] { return has("out.1.2.") && !has("out.1.1."); }));
    rank0.kill();
    rank1.kill();
    rank2.kill();
    run(3);
  }
  SUBCASE("garbage under every name") {
    fs::create_directory(job);
    const std::string nonce = "0123456789abcdef0123456789abcdef";
    const std::vector<std::string> names = {
        "hello.0",           "hello.1",         "hello.2",          "hello.-1",
        "hello.99",          "hello.x",         "hello.2147483648", "welcome.1." + nonce,
        "reject.1." + nonce, "in.0.1." + nonce, "out.0.1." + nonce, "tmp." + nonce + ".0"};
    std::mt19937 random(1);
    for (const size_t bytes : {size_t{0}, size_t{5}, size_t{64}, size_t{200'000}}) {
      for (const std::string& name : names) {
        std::string garbage(bytes, '\0');
        for (char& c : garbage)
          c = static_cast<char>(random());
        std::ofstream((job / name).string(), std::ios::binary) << garbage;
      }
      run(3);
    }
  }
  SUBCASE("a truncated hello") {
    leave_hellos(directory, "job", {1, 2}, 3);
    fs::resize_file(job / "hello.1", 63);
    fs::resize_file(job / "hello.2", 65);
    run(3);
  }
}

TEST_CASE("old leftovers are cleared away by the next job that meets") {
  const TimeLimit limit(60);
  const TempDirectory directory;
  const fs::path job = directory.job("job");
  const std::vector<std::string> names = {"hello.0",   "hello.5",    "welcome.1.ab", "reject.1.ab",
                                          "in.1.2.ab", "out.1.2.ab", "tmp.ab.7"};
  fs::create_directory(job);
  for (const std::string& name : names) {
    std::ofstream((job / name).string()) << name;
    fs::last_write_time(job / name, fs::file_time_type::clock::now() - 2h);
  }
  std::ofstream((job / "in.1.1.cd").string()) << "not old enough to be dead for sure";
  run_job(directory.path(), "job", 2);
  CHECK(names_in(job) == std::set<std::string>{"in.1.1.cd"});
}

TEST_CASE("a hello that somebody clears away comes back") {
  const TimeLimit limit(30);
  const TempDirectory directory;
  const fs::path hello = directory.job("job") / "hello.1";
  RankThread rank1([&] { Bootstrap bootstrap(directory.path(), "job", 1, 2, kPatient); });
  REQUIRE(wait_until([&] { return fs::exists(hello); }));
  fs::remove(hello);
  CHECK(wait_until([&] { return fs::exists(hello); }));
  Bootstrap rank0(directory.path(), "job", 0, 2, kPatient);
  CHECK(rank1.join().status == EPX_SUCCESS);
}

TEST_CASE("two processes that claim one rank are both told") {
  for (const int rank : {0, 1}) {
    CAPTURE(rank);
    const TimeLimit limit(30);
    const TempDirectory directory;
    RankThread first([&] { Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient); });
    REQUIRE(wait_until([&] { return fs::exists(directory.job("job") / fmt::format("hello.{}", rank)); }));
    const Outcome second = outcome_of([&] { Bootstrap bootstrap(directory.path(), "job", rank, 3, kPatient); });
    const std::string sentence = fmt::format("two processes claim rank {}", rank);
    check_outcome(second, EPX_ERROR_MISMATCH, {"job 'job'", sentence});
    check_outcome(first.join(), EPX_ERROR_MISMATCH, {"job 'job'", sentence});
    CHECK(names_in(directory.path()).empty());
  }
}

TEST_CASE("who claims a rank that is in the session already is sent away, and the session goes on") {
  const TimeLimit limit(30);
  const TempDirectory directory;
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
  CHECK(names_in(directory.path()).empty());
}

TEST_CASE("ranks that disagree on num_ranks are told both values") {
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
    const TimeLimit limit(30);
    const TempDirectory directory;
    const std::vector<Outcome> outcomes = run_ranks(all_ranks(static_cast<int>(c.ranks.size())), [&](int i) {
      const Rank& rank = c.ranks[static_cast<size_t>(i)];
      Bootstrap bootstrap(directory.path(), "job", rank.rank, rank.num_ranks, kShort);
    });
    check_outcome(outcomes[0], EPX_ERROR_MISMATCH, c.parts);
    check_outcome(outcomes.back(), EPX_ERROR_MISMATCH, c.parts);
    if (c.ranks.size() == 3 && outcomes[1].status != EPX_ERROR_TIMEOUT) // unless it came after rank 0 had left
      check_outcome(outcomes[1], EPX_ERROR_MISMATCH, c.parts);
    CHECK(names_in(directory.path()).empty());
  }
}

TEST_CASE("two jobs of the same id at once end in errors or in whole sessions") {
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
    const TimeLimit limit(60);
    const TempDirectory directory;
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

TEST_CASE("a rank killed at any moment never hangs the others nor the next job") {
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
