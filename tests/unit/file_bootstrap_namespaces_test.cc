// SPDX-License-Identifier: Apache-2.0
// Ranks on two machines that share a rendezvous directory: two mount and PID namespaces, each with its own /proc and the
// directory at another path. Processes of one cannot see those of the other. They need root.
#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include <fmt/format.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/file_bootstrap_support.h"
#include "transport/bootstrap/bootstrap_exchange.h"
#include "transport/control/control_connection.h"

namespace epx::test::files {
namespace {

constexpr int kRanks = 4; // two on each machine
using RankBody = std::function<void(const std::string& directory, int rank)>;

// Runs the body in the first process of new namespaces, where `shared` is mounted at `mount_point` and /proc shows that
// process alone.
void run_on_machine(const fs::path& shared, const fs::path& mount_point, int rank, const RankBody& body) {
  require(::unshare(CLONE_NEWPID | CLONE_NEWNS) == 0, fmt::format("unshare: {}", std::strerror(errno)));
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30); // which the first process of a namespace must handle to be ended by it
    std::signal(SIGALRM, [](int) { ::_exit(1); });
    const Outcome outcome = outcome_of([&] {
      require(::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                  ::mount("proc", "/proc", "proc", 0, nullptr) == 0 &&
                  ::mount(shared.c_str(), mount_point.c_str(), nullptr, MS_BIND, nullptr) == 0,
              fmt::format("mount: {}", std::strerror(errno)));
      body(mount_point, rank);
    });
    if (outcome.status != EPX_SUCCESS) fmt::print(stderr, "rank {}: {}\n", rank, outcome.message);
    ::_exit(outcome.status);
  }
  int status = 0;
  require(::waitpid(child, &status, 0) == child && status == 0, fmt::format("the rank ended with status {}", status));
}

// Runs ranks 0 and 1 on one machine, and 2 and 3 each on another one. All of them must succeed.
void run_on_machines(const RankBody& body) {
  const TempDirectory shared, mounts;
  std::vector<std::unique_ptr<RankProcess>> processes;
  for (int rank = 0; rank < kRanks; ++rank) {
    const fs::path mount_point = fs::path(mounts.path()) / std::to_string(rank);
    fs::create_directory(mount_point);
    processes.push_back(std::make_unique<RankProcess>([&shared, mount_point, rank, &body] {
      if (rank < 2)
        body(shared.path(), rank);
      else
        run_on_machine(shared.path(), mount_point, rank, body);
    }));
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    CAPTURE(rank);
    CHECK(processes[static_cast<size_t>(rank)]->join() == 0);
  }
  CHECK(names_in(shared.path()).empty());
}

bool may_unshare() {
  if (::geteuid() != 0) return false;
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::unshare(CLONE_NEWPID | CLONE_NEWNS) == 0 ? 0 : 1);
  int status = 1;
  return ::waitpid(child, &status, 0) == child && status == 0;
}

} // namespace

TEST_CASE("file rendezvous: ranks of several mount and PID namespaces meet, and leave nothing" *
          doctest::skip(!may_unshare())) {
  run_on_machines([](const std::string& directory, int rank) {
    Bootstrap bootstrap(directory, "machines", rank, kRanks, kPatient);
    run_rounds(bootstrap, rank, kRanks, 10, kPatient);
  });
}

TEST_CASE("file rendezvous: a rank of another PID namespace that never comes is named" * doctest::skip(!may_unshare())) {
  run_on_machines([](const std::string& directory, int rank) {
    constexpr int kAbsent = 3;
    if (rank == kAbsent) return;
    const Outcome outcome =
        outcome_of([&] { Bootstrap bootstrap(directory, "machines", rank, kRanks, milliseconds(3000)); });
    require(outcome.status == EPX_ERROR_TIMEOUT, fmt::format("status {}: {}", outcome.status, outcome.message));
    require(rank != 0 || outcome.message.find("rank 3") != std::string::npos, outcome.message);
  });
}

TEST_CASE("the control connection joins ranks of several PID namespaces, and names one that dies" *
          doctest::skip(!may_unshare())) {
  run_on_machines([](const std::string& directory, int rank) {
    constexpr int kVictim = 2;
    std::optional<Bootstrap> bootstrap;
    bootstrap.emplace(directory, "machines", rank, kRanks, kPatient);
    BootstrapExchange exchange(bootstrap->get(), kPatient.count());
    std::atomic<int> culprit = -1;
    ControlConnection control(rank, kRanks, std::chrono::seconds(20), exchange);
    control.deliver_to([&](const Verdict& verdict) { culprit = verdict.cause == Cause::died ? verdict.culprit : -2; });
    run_rounds(*bootstrap, rank, kRanks, 1, kPatient); // all watch
    bootstrap.reset();
    if (rank == kVictim) ::_exit(0); // without a goodbye
    require(wait_until([&] { return culprit != -1; }), "no verdict has come");
    require(culprit == kVictim, fmt::format("rank {} is named", culprit.load()));
  });
}

} // namespace epx::test::files
