// SPDX-License-Identifier: Apache-2.0
// epx_test_launch -n P [--timeout S] [--ranks-per-node G] -- program args...
// Starts P processes without MPI. Each has EPX_TEST_RANK, EPX_TEST_RANKS and EPX_TEST_DIR (a fresh directory for the
// rendezvous) in its environment, and {rank}, {ranks}, {dir} replaced in its arguments. TMPDIR is a directory of this launch
// alone, because Open MPI keeps session directories there: of two mpirun that share one, the second may not start while the
// first removes it. With --ranks-per-node every G ranks are a node, which NCCL_HOSTID and EPX_TEST_RANKS_PER_NODE say. Ends all
// at the time limit, or soon after one has failed. Exits with 0 when all ranks did and left nothing behind, with 77 when all
// skipped, with 1 otherwise.
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include <unistd.h>

#include "tests/support/check.h"
#include "tests/support/run_ranks.h"
#include "tests/support/system_state.h"

namespace {

using namespace epx::test;

constexpr int kSkipped = kSkippedExitCode;

volatile std::sig_atomic_t stop_requested = 0;

struct Options {
  int num_ranks = 0;
  int timeout_s = 60;
  int ranks_per_node = 0; // 0: as the machine says
  std::vector<std::string> command;
};

Options parse(int argc, char** argv) {
  Options options;
  int i = 1;
  for (; i + 1 < argc && std::strcmp(argv[i], "--") != 0; i += 2) {
    const std::string name = argv[i];
    check(name == "-n" || name == "--timeout" || name == "--ranks-per-node", "unknown option {}", name);
    (name == "-n"          ? options.num_ranks
     : name == "--timeout" ? options.timeout_s
                           : options.ranks_per_node) = std::atoi(argv[i + 1]);
  }
  for (++i; i < argc; ++i)
    options.command.emplace_back(argv[i]);
  check(options.num_ranks >= 1 && options.timeout_s >= 1 && !options.command.empty(),
        "usage: epx_test_launch -n P [--timeout S] [--ranks-per-node G] -- program args...");
  return options;
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

int exec_rank(const Options& options, int rank, const std::string& directory, const std::string& temporary_files) {
  const std::string rank_text = std::to_string(rank);
  const std::string ranks_text = std::to_string(options.num_ranks);
  ::setenv("EPX_TEST_RANK", rank_text.c_str(), 1);
  ::setenv("EPX_TEST_RANKS", ranks_text.c_str(), 1);
  ::setenv("EPX_TEST_DIR", directory.c_str(), 1);
  ::setenv("TMPDIR", temporary_files.c_str(), 1);
  if (options.ranks_per_node > 0) {
    ::setenv("NCCL_HOSTID", ("node" + std::to_string(rank / options.ranks_per_node)).c_str(), 1);
    ::setenv("EPX_TEST_RANKS_PER_NODE", std::to_string(options.ranks_per_node).c_str(), 1);
  }
  std::vector<std::string> words = options.command;
  std::vector<char*> argv;
  for (std::string& word : words) {
    replace_all(word, "{rank}", rank_text);
    replace_all(word, "{ranks}", ranks_text);
    replace_all(word, "{dir}", directory);
    argv.push_back(word.data());
  }
  argv.push_back(nullptr);
  ::execvp(argv[0], argv.data());
  std::fprintf(stderr, "cannot run %s: %s\n", argv[0], std::strerror(errno));
  return 127;
}

void print_line(int rank, std::string_view line) {
  std::printf("[%d] %.*s\n", rank, static_cast<int>(line.size()), line.data());
  std::fflush(stdout);
}

int launch(const Options& options) {
  const TempDirectory directory;
  const TempDirectory temporary_files;
  const SharedMemoryWatch shared_memory;
  ProcessOptions process_options;
  process_options.time_limit = std::chrono::seconds(options.timeout_s);
  process_options.stop_at_first_failure = true;
  process_options.on_line = print_line;
  process_options.stop = &stop_requested;
  const auto results = spawn_processes(options.num_ranks, process_options, [&](int rank) {
    return exec_rank(options, rank, directory.path().string(), temporary_files.path().string());
  });

  int code = 0;
  if (std::ranges::all_of(results, [](const ProcessResult& result) { return result.exit_code == kSkipped; })) {
    return kSkipped;
  }
  for (ProcessResult result : results) {
    if (result.succeeded()) continue;
    result.output.clear(); // printed already
    std::printf("%s", result.describe().c_str());
    code = 1;
  }
  for (const std::string& name : shared_memory.leftovers()) {
    std::printf("left behind: /dev/shm/%s\n", name.c_str());
    code = 1;
  }
  if (code != 0) return code;
  for (const std::string& name : directory.entries()) {
    std::printf("left behind in the rendezvous directory: %s\n", name.c_str());
    code = 1;
  }
  return code;
}

} // namespace

int main(int argc, char** argv) {
  std::signal(SIGTERM, [](int) { stop_requested = 1; });
  std::signal(SIGINT, [](int) { stop_requested = 1; });
  try {
    return launch(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "epx_test_launch: %s\n", error.what());
    return 1;
  }
}
