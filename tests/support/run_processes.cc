// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/check.h"
#include "tests/support/run_ranks.h"

namespace epx::test {

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kGraceAfterFailure{2'000}; // in which the other ranks can print what they saw
constexpr std::chrono::milliseconds kGraceAfterTerm{3'000};
constexpr std::chrono::milliseconds kPollInterval{20};

struct Child {
  pid_t pid = -1;
  int output = -1; // read end
  bool running = true;
  size_t reported = 0; // bytes of the output that on_line has seen
  ProcessResult result;
};

void throw_system(const char* what) {
  fail_check("{} failed: {}", what, std::strerror(errno));
}

[[noreturn]] void become_child(int rank, int output, const std::function<int(int)>& fn) {
  ::setpgid(0, 0); // so that its descendants can be killed with it
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::dup2(output, STDOUT_FILENO);
  ::dup2(output, STDERR_FILENO);
  ::close(output);
  const int code = fn(rank);
  std::fflush(nullptr);
  ::_exit(code);
}

Child start(int rank, const std::function<int(int)>& fn) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_system("pipe2");
  std::fflush(nullptr);
  Child child;
  child.result.rank = rank;
  child.pid = ::fork();
  if (child.pid < 0) throw_system("fork");
  if (child.pid == 0) {
    ::close(ends[0]);
    become_child(rank, ends[1], fn);
  }
  ::close(ends[1]);
  ::setpgid(child.pid, child.pid); // parent and child both call it, since either may run first
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  child.output = ends[0];
  return child;
}

void report_lines(Child& child, const ProcessOptions& options, bool at_end) {
  std::string& text = child.result.output;
  while (options.on_line && child.reported < text.size()) {
    size_t end = text.find('\n', child.reported);
    if (end == std::string::npos) {
      if (!at_end) return;
      end = text.size();
    }
    options.on_line(child.result.rank, std::string_view(text).substr(child.reported, end - child.reported));
    child.reported = end + 1;
  }
}

void read_output(Child& child, const ProcessOptions& options) {
  char buffer[4096];
  while (child.output >= 0) {
    const ssize_t bytes = ::read(child.output, buffer, sizeof(buffer));
    if (bytes > 0) {
      child.result.output.append(buffer, static_cast<size_t>(bytes));
      continue;
    }
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes == 0) {
      ::close(child.output);
      child.output = -1;
    }
    break; // the output has ended, or has no more bytes yet
  }
  report_lines(child, options, child.output < 0);
}

// Notices that the child has ended, and kills its descendants before its process number can be used again.
void reap(Child& child) {
  siginfo_t info = {};
  if (::waitid(P_PID, static_cast<id_t>(child.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return;
  ::kill(-child.pid, SIGKILL);
  int status = 0;
  ::waitpid(child.pid, &status, 0);
  child.running = false;
  if (WIFEXITED(status)) child.result.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) child.result.signal = WTERMSIG(status);
}

void stop_running(std::vector<Child>& children, int signal) {
  for (Child& child : children) {
    if (!child.running) continue;
    child.result.stopped = true;
    ::kill(-child.pid, signal);
  }
}

void wait_for_output(const std::vector<Child>& children) {
  std::vector<pollfd> polled;
  for (const Child& child : children) {
    if (child.output >= 0) polled.push_back({child.output, POLLIN, 0});
  }
  if (polled.empty()) {
    std::this_thread::sleep_for(kPollInterval);
  } else {
    ::poll(polled.data(), polled.size(), static_cast<int>(kPollInterval.count()));
  }
}

} // namespace

std::string ProcessResult::describe() const {
  std::string what = signal != 0 ? fmt::format("ended by signal {} ({})", signal, ::strsignal(signal))
                                 : fmt::format("exited with {}", exit_code);
  if (stopped) what += ", stopped by the launcher";
  return fmt::format("rank {} {}\n{}", rank, what, output);
}

std::vector<ProcessResult> spawn_processes(int num_ranks, const ProcessOptions& options,
                                           const std::function<int(int rank)>& fn) {
  std::vector<Child> children;
  for (int rank = 0; rank < num_ranks; ++rank)
    children.push_back(start(rank, fn));
  auto deadline = Clock::now() + options.time_limit;
  bool asked_to_end = false;
  bool failure_seen = false;
  const auto running = [](const Child& child) { return child.running; };

  while (std::ranges::any_of(children, running)) {
    wait_for_output(children);
    for (Child& child : children) {
      read_output(child, options);
      if (child.running) reap(child);
    }
    const auto now = Clock::now();
    const bool failed = std::ranges::any_of(children, [](const Child& c) { return !c.running && !c.result.succeeded(); });
    if (options.stop_at_first_failure && failed && !failure_seen) {
      failure_seen = true;
      deadline = std::min(deadline, now + kGraceAfterFailure);
    }
    if (options.stop != nullptr && *options.stop != 0 && !asked_to_end) deadline = now;
    if (now < deadline) continue;
    stop_running(children, asked_to_end ? SIGKILL : SIGTERM);
    asked_to_end = true;
    deadline = now + kGraceAfterTerm;
  }

  std::vector<ProcessResult> results;
  for (Child& child : children) {
    read_output(child, options);
    report_lines(child, options, true);
    if (child.output >= 0) ::close(child.output);
    results.push_back(std::move(child.result));
  }
  return results;
}

std::vector<ProcessResult> run_processes(int num_ranks, std::chrono::milliseconds time_limit,
                                         const std::function<void(int rank)>& fn) {
  ProcessOptions options;
  options.time_limit = time_limit;
  return spawn_processes(num_ranks, options, [&fn](int rank) {
    try {
      fn(rank);
      return 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", describe(error).c_str());
    } catch (...) {
      std::fprintf(stderr, "something unknown was thrown\n");
    }
    return 1;
  });
}

void check_all_succeeded(const std::vector<ProcessResult>& results) {
  for (const ProcessResult& result : results)
    check(result.succeeded(), "{}", result.describe());
}

} // namespace epx::test
