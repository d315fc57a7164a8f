// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/starts.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/interrupt.h"

namespace epx::bench {
namespace {

constexpr std::string_view kStarts = "--starts";

volatile pid_t child = 0;

// A terminal sends SIGINT to the child by itself, and a second one would end it at once.
extern "C" void pass_on(int signal, siginfo_t* info, void* /*context*/) {
  if (child > 0 && info->si_code == SI_USER) kill(child, signal);
}

std::vector<std::string> arguments_of_start(std::span<const char* const> arguments, const Options& options, int start) {
  std::vector<std::string> all;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    if (argument == kStarts) {
      ++i; // its value
      continue;
    }
    if (!argument.starts_with(fmt::format("{}=", kStarts))) all.emplace_back(argument);
  }
  all.insert(all.end(), {"--job-id", fmt::format("{}.{}", options.job_id, start)});
  if (start > 0) all.emplace_back("--append");
  return all;
}

// Returns the exit status of the process, or 128 + the number of the signal that ended it.
int run_process(const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (const std::string& argument : arguments)
    argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, argv.data(), environ);
  if (error != 0) throw RuntimeError(fmt::format("--starts: posix_spawn: {}", std::strerror(error)));
  child = pid;
  int status = 0;
  while (waitpid(pid, &status, 0) < 0)
    if (errno != EINTR) throw RuntimeError(fmt::format("--starts: waitpid: {}", std::strerror(errno)));
  child = 0;
  return WIFSIGNALED(status) ? kExitSignal + WTERMSIG(status) : WEXITSTATUS(status);
}

} // namespace

int run_starts(std::span<const char* const> arguments, const Options& options) {
  constexpr size_t kMaxJobId = 60; // epx_bootstrap_file takes 64
  if (options.job_id.size() > kMaxJobId)
    throw UsageError(
        fmt::format("--job-id is '{}' and --starts is {}; it must be at most {} characters, as each start adds its "
                    "number",
                    options.job_id, options.starts, kMaxJobId));
  struct sigaction action {};
  action.sa_sigaction = &pass_on;
  action.sa_flags = SA_SIGINFO;
  for (const int signal : {SIGINT, SIGTERM})
    sigaction(signal, &action, nullptr);
  for (int start = 0; start < options.starts; ++start)
    if (const int status = run_process(arguments_of_start(arguments, options, start)); status != 0) return status;
  return 0;
}

} // namespace epx::bench
