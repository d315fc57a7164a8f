// SPDX-License-Identifier: Apache-2.0
// Kills a random rank at a random time between the start and the end of its job, again and again, equally often in each stage
// of the job, however short. In every case each survivor ends, with all its work done, or with a sentence that names the rank
// that was killed.
//
//   random_kills [--kills N] [--ranks P] [--seed S] [--check-rendezvous yes] [--check-leftovers yes]
//
// --check-rendezvous also demands that rank 0 is named when it is killed while the ranks join through files, and
// --check-leftovers that nothing is left in /dev/shm, and nothing in the directory that the ranks joined in by a job of which a
// rank has timed out waiting for the one that was killed. Where all others had ended before the kill, no rank was left to
// remove its files, and the next start of the job has to.
#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <sys/types.h>
#include <unistd.h>

#include "tests/multiprocess/fault_rank.h"
#include "tests/multiprocess/shared_board.h"
#include "tests/support/check.h"
#include "tests/support/rng.h"
#include "tests/support/run_ranks.h"
#include "tests/support/system_state.h"

namespace epx::test {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr int kMaxRanks = 8;
constexpr int kMaxJobs = 6; // at a time
constexpr int64_t kTimeoutMs = 2'000;
constexpr auto kTimeLimit = 40s;
constexpr int kRounds = 6;

struct Options {
  int kills = 24;
  int ranks = 2;
  uint64_t seed = 1;
  bool check_rendezvous = false;
  bool check_leftovers = false;
};

// The stage that a rank is in.
enum Stage : int32_t { kRendezvous, kCreation, kCalls, kDestruction, kFreeing, kEnded, kNumStages };
constexpr std::array<const char*, kNumStages> kStageNames = {"rendezvous",  "creation", "calls",
                                                             "destruction", "freeing",  "the end"};

struct Life {
  std::atomic<int32_t> pid; // 0: not started yet
  std::atomic<int32_t> stage;
  std::array<std::atomic<int64_t>, kNumStages> begun; // microseconds on the steady clock
};
struct Job {
  std::array<Life, kMaxRanks> lives;
};
struct Jobs {
  std::array<Job, kMaxJobs> jobs;
};

// Whether the sentence names `rank`: as "rank 2" or in "ranks 0, 2".
bool names_rank(const std::string& sentence, int rank) {
  for (size_t at = sentence.find("rank"); at != std::string::npos; at = sentence.find("rank", at + 1)) {
    const char* text = sentence.c_str() + at + 4;
    if (*text == 's') ++text;
    while (*text == ' ' && std::isdigit(static_cast<unsigned char>(text[1])) != 0) {
      char* end = nullptr;
      if (std::strtol(text, &end, 10) == rank) return true;
      text = *end == ',' ? end + 1 : end;
    }
  }
  return false;
}

// Runs one rank from start to end. Returns the sentence of the call that failed; "" when none did.
std::string live(const std::string& directory, const std::string& name, int number, const Options& options, int victim,
                 Life& life) {
  const auto begin = [&](Stage stage) {
    life.begun[stage] = Clock::now().time_since_epoch() / 1us;
    life.stage = stage;
  };
  begin(kRendezvous);
  life.pid = ::getpid();
  const auto failed = [&](const char* call, epx_status status) {
    const std::string sentence = epx_last_error();
    check(status == EPX_ERROR_TIMEOUT, "{} returned {} (\"{}\") instead of EPX_ERROR_TIMEOUT", call,
          epx_status_string(status), sentence);
    check(number != victim, "the victim itself gave up: \"{}\"", sentence);
    if (life.stage == kRendezvous && victim == 0 && !options.check_rendezvous) return sentence;
    check(names_rank(sentence, victim), "{} does not name rank {}, which was killed: \"{}\"", call, victim, sentence);
    return sentence;
  };

  epx_bootstrap bootstrap = {};
  epx_status status = epx_bootstrap_file(directory.c_str(), name.c_str(), number, options.ranks, kTimeoutMs, &bootstrap);
  if (status != EPX_SUCCESS) return failed("epx_bootstrap_file", status);
  begin(kCreation);

  std::string sentence;
  const auto device = make_device("host", number, 1);
  FaultRank rank({number, options.ranks, &bootstrap, device.get()}, kTimeoutMs, FaultRank::MayFail{});
  if (rank.group() == nullptr) {
    sentence = failed("epx_group_create", rank.created());
  } else {
    begin(kCalls);
    for (int round = 0; round < kRounds && sentence.empty(); ++round) {
      for (const epx_operation operation :
           {EPX_OP_PREPARE, EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_COMBINE_BWD, EPX_OP_DISPATCH_BWD, EPX_OP_MEM_ALLOC}) {
        status = rank.call(operation);
        if (status == EPX_SUCCESS) continue;
        sentence = failed(operation_name(operation), status);
        const epx_group_report report = GroupView(rank.group()).status();
        check(report.culprit == victim, "the report names rank {} instead of rank {}: \"{}\"", report.culprit, victim,
              report.message);
        break;
      }
      std::this_thread::sleep_for(1ms);
    }
    begin(kDestruction);
    rank.destroy();
    begin(kFreeing);
  }
  epx_bootstrap_free(&bootstrap);
  begin(kEnded);
  if (number == victim) std::this_thread::sleep_for(kTimeLimit); // no other process may get its number before the kill
  return sentence;
}

struct Kill {
  int victim; // -1: none, which measures how long the stages take
  Stage stage;
  std::chrono::microseconds after; // the stage has begun
};
using Durations = std::array<int64_t, kNumStages>; // microseconds

// Runs jobs at the same time, with a killer process for each. Throws when a survivor ends in another way than it has to.
class Batch {
public:
  Batch(const Options& options, int number, std::vector<Kill> kills)
      : options_(options), number_(number), kills_(std::move(kills)) {}

  void run() {
    const SharedMemoryWatch shared_memory;
    const TempDirectory directory;
    const int per_job = options_.ranks + 1;
    const int num_jobs = static_cast<int>(kills_.size());
    const std::vector<ProcessResult> results = run_processes(num_jobs * per_job, kTimeLimit, [&](int process) {
      const int number = process / per_job;
      const int rank = process % per_job;
      const Kill& kill = kills_[static_cast<size_t>(number)];
      if (rank == options_.ranks) {
        kill_victim(kill, life_of(number, kill.victim));
        return;
      }
      std::printf("%s\n",
                  live(directory.path(), job_name(number), rank, options_, kill.victim, life_of(number, rank)).c_str());
    });
    std::string wrong;
    for (const ProcessResult& result : results) {
      const Kill& kill = kills_[static_cast<size_t>(result.rank / per_job)];
      const bool is_victim = result.rank % per_job == kill.victim;
      if (result.succeeded() || (is_victim && result.signal == SIGKILL && !result.stopped)) continue;
      wrong +=
          fmt::format("\nbatch {}, job {}, rank {}, killed rank {} {} us into {}: {}", number_, result.rank / per_job,
                      result.rank % per_job, kill.victim, kill.after.count(), kStageNames[kill.stage], result.describe());
    }
    if (options_.check_leftovers) {
      for (const std::string& name : shared_memory.leftovers())
        wrong += fmt::format("\nbatch {}: /dev/shm/{} is left", number_, name);
      for (int number = 0; number < num_jobs; ++number)
        wrong += look_for_leftovers(directory, number, results);
      for (const std::string& name : directory.entries())
        wrong += fmt::format("\nbatch {}: {} is left in the rendezvous directory", number_, name);
    }
    check(wrong.empty(), "{}", wrong);
  }

  int restarts() const { return restarts_; }

  // Returns how long each stage takes on average.
  Durations average() const {
    Durations sums{};
    for (const Job& job : board_->jobs)
      for (const Life& life : job.lives)
        for (size_t stage = kRendezvous; stage < kEnded; ++stage)
          sums[stage] += life.begun[stage + 1] - life.begun[stage];
    for (int64_t& sum : sums)
      sum /= static_cast<int64_t>(kills_.size()) * options_.ranks;
    return sums;
  }

  // Counts the stages in which the victims were when they were killed.
  void count_stages(std::array<int, kNumStages>& counts) const {
    for (size_t i = 0; i < kills_.size(); ++i)
      ++counts[static_cast<size_t>(board_->jobs[i].lives[static_cast<size_t>(kills_[i].victim)].stage)];
  }

private:
  static std::string job_name(int job) { return "kill" + std::to_string(job); }

  Life& life_of(int job, int rank) const {
    return board_->jobs[static_cast<size_t>(job)].lives[static_cast<size_t>(std::max(rank, 0))];
  }

  // Starts the job again where it has left files that no survivor could remove. Returns what is wrong.
  std::string look_for_leftovers(const TempDirectory& directory, int job, const std::vector<ProcessResult>& results) {
    const std::string name = job_name(job);
    if (!std::filesystem::exists(directory.path() / ("epx-" + name))) return "";
    const Kill& kill = kills_[static_cast<size_t>(job)];
    for (int rank = 0; rank < options_.ranks; ++rank) {
      const ProcessResult& result = results[static_cast<size_t>(job * (options_.ranks + 1) + rank)];
      if (rank != kill.victim && result.output.find_first_not_of('\n') != std::string::npos)
        return fmt::format(
            "\nbatch {}, job {}: rank {} outlived rank {}, killed {} us into {}, and has not removed its files", number_,
            job, rank, kill.victim, kill.after.count(), kStageNames[kill.stage]);
    }
    epx_bootstrap bootstrap = {};
    check_ok(epx_bootstrap_file(directory.path().c_str(), name.c_str(), 0, 1, kTimeoutMs, &bootstrap),
             "epx_bootstrap_file");
    epx_bootstrap_free(&bootstrap);
    ++restarts_;
    return "";
  }

  static void kill_victim(const Kill& kill, const Life& life) {
    if (kill.victim < 0) return;
    const auto deadline = Clock::now() + 20s;
    while (life.pid == 0 || life.stage < kill.stage) {
      check(Clock::now() < deadline, "the victim does not come to {}", kStageNames[kill.stage]);
      std::this_thread::sleep_for(20us);
    }
    std::this_thread::sleep_for(kill.after);
    ::kill(life.pid, SIGKILL);
  }

  const Options& options_;
  int number_;
  std::vector<Kill> kills_;
  SharedBoard<Jobs> board_;
  int restarts_ = 0; // jobs that were started again since they had left files
};

void run_campaign(const Options& options) {
  Rng rng(mix(options.seed, static_cast<uint64_t>(options.ranks)));
  Batch measured(options, 0, std::vector<Kill>(kMaxJobs, Kill{-1, kRendezvous, {}}));
  measured.run();
  const Durations durations = measured.average();
  check(durations[kCalls] > 0, "no rank has made its calls");

  std::array<int, kNumStages> stages{};
  const auto begin = Clock::now();
  int batches = 0;
  int restarts = 0;
  for (int killed = 0; killed < options.kills; killed += kMaxJobs) {
    std::vector<Kill> kills;
    for (int i = 0; i < std::min(kMaxJobs, options.kills - killed); ++i) {
      const auto stage = static_cast<Stage>(rng.below(kEnded));
      const auto victim = static_cast<int>(rng.below(options.ranks));
      kills.push_back({victim, stage, std::chrono::microseconds(rng.below(durations[stage] + 1))});
    }
    Batch batch(options, ++batches, kills);
    batch.run();
    batch.count_stages(stages);
    restarts += batch.restarts();
  }
  std::string text = options.check_leftovers ? fmt::format(", {} left to the next start", restarts) : "";
  for (size_t stage = 0; stage < stages.size(); ++stage)
    text += fmt::format(", {} in {}", stages[stage], kStageNames[stage]);
  std::printf("%d kills of one of %d ranks, seed %llu, %lld s%s\n", options.kills, options.ranks,
              static_cast<unsigned long long>(options.seed), static_cast<long long>((Clock::now() - begin) / 1s),
              text.c_str());
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const std::string value = argv[i + 1];
    if (name == "--kills")
      options.kills = std::stoi(value);
    else if (name == "--ranks")
      options.ranks = std::stoi(value);
    else if (name == "--seed")
      options.seed = std::stoull(value);
    else if (name == "--check-rendezvous")
      options.check_rendezvous = value == "yes";
    else if (name == "--check-leftovers")
      options.check_leftovers = value == "yes";
    else
      fail_check("no option {}", name);
  }
  check(argc % 2 == 1, "{} has no value", argv[argc - 1]);
  check(options.ranks >= 2 && options.ranks <= kMaxRanks, "--ranks is {}; it must be 2..{}", options.ranks, kMaxRanks);
  return options;
}

} // namespace
} // namespace epx::test

int main(int argc, char** argv) {
  try {
    epx::test::run_campaign(epx::test::parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "random_kills: %s\n", error.what());
    return 1;
  }
}
