// SPDX-License-Identifier: Apache-2.0
// conformance --launcher mpi|env|ompi|threads [--transport host] [--ranks P] [--dir DIR] [doctest options]
//   mpi      ranks of MPI_COMM_WORLD, bootstrap over MPI
//   env      EPX_TEST_RANK, EPX_TEST_RANKS; file rendezvous in EPX_TEST_DIR (epx_test_launch sets them)
//   ompi     started by mpirun, file rendezvous in DIR
//   threads  P ranks as threads of this process
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <string>

#include "tests/multiprocess/conformance.h"
#include "tests/multiprocess/mpi_launcher.h"
#include "tests/support/check.h"
#include "tests/support/run_test_cases.h"

namespace epx::test {

namespace {

Launcher* current_launcher = nullptr;

std::unique_ptr<Launcher> make_launcher(std::map<std::string, std::string>& options) {
  const std::string transport = options.contains("--transport") ? options["--transport"] : "host";
  const std::string& kind = options["--launcher"];
  if (kind == "mpi") return make_mpi_launcher(transport);
  if (kind == "threads") return make_thread_launcher(transport, std::atoi(options["--ranks"].c_str()));
  if (kind == "ompi") {
    return make_file_launcher(transport, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", options["--dir"]);
  }
  check(kind == "env", "--launcher is \"{}\"; it must be mpi, env, ompi or threads", kind);
  const char* directory = std::getenv("EPX_TEST_DIR");
  check(directory != nullptr, "EPX_TEST_DIR is not set: start this through epx_test_launch");
  return make_file_launcher(transport, "EPX_TEST_RANK", "EPX_TEST_RANKS", directory);
}

} // namespace

Launcher& launcher() {
  return *current_launcher;
}

void on_every_rank(const std::function<void(const RankContext&)>& scenario) {
  const int64_t before = num_checks();
  std::string failure;
  try {
    launcher().each_rank(scenario);
  } catch (const std::exception& error) {
    failure = describe(error);
  }
  REQUIRE_MESSAGE(failure.empty(), failure); // this is an assertion, since abort-after counts only these
  REQUIRE(num_checks() > before);
}

bool is_on_host() {
  std::atomic<bool> is_host = false; // ranks may be threads
  launcher().each_rank([&](const RankContext& context) { is_host = context.device->transport() == EPX_TRANSPORT_HOST; });
  return is_host;
}

Case base_case() {
  Case test_case;
  GroupCase& group = test_case.group;
  group.num_ranks = launcher().num_ranks();
  group.num_experts = (5 * group.num_ranks + 1) / 2;
  group.max_tokens = 24;
  group.hidden_dim = 72;
  group.max_top_k = 4;
  group.max_alignment = 16;
  LayerCase& layer = test_case.layer;
  layer.top_k = 3;
  layer.alignment = 4;
  layer.tokens = TokenCount::ragged;
  layer.hidden = 64;
  layer.combine_hidden = 64;
  layer.dtype = EPX_BFLOAT16;
  layer.combine_dtype = EPX_BFLOAT16;
  return test_case;
}

void run_everywhere(const Case& test_case) {
  Workloads workloads(test_case);
  on_every_rank([&](const RankContext& context) {
    try {
      run_case(context, workloads);
    } catch (const std::exception& error) {
      fail_check("{}\n  in case {}", describe(error), describe(test_case));
    }
  });
}

void run_changed(const std::function<void(Case&)>& change) {
  Case test_case = base_case();
  change(test_case);
  run_everywhere(test_case);
}

void disagree(epx_operation operation, epx_operation its_operation, void (*change)(CallFields&), epx_status status,
              const std::vector<std::string>& words, bool has_fixed_rail_tokens, const CallFields& common) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kPatientMs = 60'000;    // no rank waits for so long
  constexpr std::chrono::seconds kSoon{15}; // much less than that
  constexpr int kCall = 2;                  // the number of the call that fails
  on_every_rank([&](const RankContext& context) {
    FaultRank rank(context, kPatientMs, 0, has_fixed_rail_tokens);
    const int last = context.num_ranks - 1;
    const epx_operation mine = context.rank == last ? its_operation : operation;
    CallFields fields = common;
    if (context.rank == last) change(fields);
    const auto begin = Clock::now();
    epx_status returned = rank.call(mine, fields);
    const epx_group_report report = GroupView(rank.group()).status(); // the device has ended the call
    check(Clock::now() - begin < kSoon, "ranks that disagree have waited");
    check(report.status == status, "the report says {}: \"{}\"", epx_status_string(report.status), report.message);
    check_equal(report.sequence, uint64_t{kCall}, "the failed call's number");
    if (returned == EPX_SUCCESS) returned = rank.call(mine, fields);
    if (operation == its_operation) check_failed(rank, returned, {status, operation, {}, kCall});
    check_status(returned, status, operation_name(mine));
    const std::string message = report.message;
    const bool knows = std::ranges::all_of(words, [&](const std::string& word) { return contains(message, word); }) &&
                       contains(message, "rank " + std::to_string(last));
    // A rank that has not found it itself when the group ends learns of it from one that has.
    check(knows || contains(message, "has ended the group with"), "the message is \"{}\"", message);
    const std::vector<uint64_t> all = context.gather(knows ? 1 : 0);
    check(std::ranges::count(all, 1) > 0, "no rank knows what differs");
    const std::vector<uint64_t> culprits = context.gather(static_cast<uint64_t>(int64_t{report.culprit} + 1));
    check(std::ranges::count(culprits, culprits.front()) == context.num_ranks,
          "the culprit is {} here and another on a peer", report.culprit);
    rank.destroy();
  });
}

bool has_variant(size_t index) {
  const int num_ranks = launcher().num_ranks();
  if (num_ranks == 1 || std::getenv("EPX_TEST_SHARES_VARIANTS") == nullptr) return true;
  return (index % 3 == 1) == (num_ranks == 4); // 4 are on two nodes
}

} // namespace epx::test

int main(int argc, char** argv) {
  std::map<std::string, std::string> options; // this program's; doctest ignores options that it does not know
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string(argv[i]).starts_with("--")) options[argv[i]] = argv[i + 1];
  }
  try {
    const std::unique_ptr<epx::test::Launcher> launcher = epx::test::make_launcher(options);
    epx::test::current_launcher = launcher.get();
    doctest::Context context(argc, argv);
    context.setOption("abort-after", 1); // ranks must not go on with different scenarios
    const int code = epx::test::run_test_cases(context, argc, argv);
    epx::test::current_launcher = nullptr;
    if (code != 0) std::_Exit(code); // peers may have ended, so no destructor may wait for them
    return 0;
  } catch (const epx::test::Skipped& reason) {
    std::fprintf(stderr, "conformance: skipped: %s\n", reason.what());
    return epx::test::kSkippedExitCode;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "conformance: %s\n", error.what());
    std::_Exit(1);
  }
}
