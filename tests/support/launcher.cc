// SPDX-License-Identifier: Apache-2.0
#include "tests/support/launcher.h"

#include <cstdlib>
#include <utility>

#include "tests/support/check.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"

namespace epx::test {

namespace {

class ProcessLauncher final : public Launcher {
public:
  ProcessLauncher(const std::string& transport, Bootstrap bootstrap)
      : bootstrap_(std::move(bootstrap)), device_(make_device(transport, bootstrap_.rank(), bootstrap_.num_ranks())) {}

  int num_ranks() const override { return bootstrap_.num_ranks(); }
  void each_rank(const std::function<void(const RankContext&)>& fn) override {
    fn({bootstrap_.rank(), bootstrap_.num_ranks(), bootstrap_.get(), device_.get()});
  }

private:
  Bootstrap bootstrap_;
  std::unique_ptr<Device> device_;
};

class ThreadLauncher final : public Launcher {
public:
  ThreadLauncher(std::string transport, int num_ranks) : transport_(std::move(transport)), num_ranks_(num_ranks) {}

  int num_ranks() const override { return num_ranks_; }
  void each_rank(const std::function<void(const RankContext&)>& fn) override {
    LocalRendezvous rendezvous(num_ranks_);
    run_threads(num_ranks_, [&](int rank) {
      const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
      const std::unique_ptr<Device> device = make_device(transport_, rank, num_ranks_);
      fn({rank, num_ranks_, &bootstrap, device.get()});
    });
  }

private:
  std::string transport_;
  int num_ranks_;
};

int number_from(const char* variable) {
  const char* text = std::getenv(variable);
  check(text != nullptr && *text != '\0', "{} is not set: start this through a launcher", variable);
  return std::atoi(text);
}

} // namespace

std::unique_ptr<Launcher> make_process_launcher(const std::string& transport, Bootstrap bootstrap) {
  return std::make_unique<ProcessLauncher>(transport, std::move(bootstrap));
}

std::unique_ptr<Launcher> make_file_launcher(const std::string& transport, const char* rank_variable,
                                             const char* ranks_variable, const std::string& directory) {
  return make_process_launcher(
      transport, bootstrap_file(directory, "suite", number_from(rank_variable), number_from(ranks_variable), kMeetTimeout));
}

std::unique_ptr<Launcher> make_thread_launcher(const std::string& transport, int num_ranks) {
  return std::make_unique<ThreadLauncher>(transport, num_ranks);
}

} // namespace epx::test
