// SPDX-License-Identifier: Apache-2.0
// A Launcher knows which ranks of a suite this process is: one rank of several processes, or all ranks as threads.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "tests/support/group_run.h"

namespace epx::test {

class Launcher {
public:
  virtual ~Launcher() = default;
  virtual int num_ranks() const = 0;

  // Runs fn as each rank that lives in this process. Throws CheckFailure when one of them failed.
  virtual void each_rank(const std::function<void(const RankContext&)>& fn) = 0;
};

inline constexpr std::chrono::seconds kMeetTimeout{60};

// Ranks are processes that have their number in the environment (rank_variable, ranks_variable) and join through files.
std::unique_ptr<Launcher> make_file_launcher(const std::string& transport, const char* rank_variable,
                                             const char* ranks_variable, const std::string& directory);

// Ranks are threads of this process.
std::unique_ptr<Launcher> make_thread_launcher(const std::string& transport, int num_ranks);

// Ranks are processes that already have a bootstrap.
std::unique_ptr<Launcher> make_process_launcher(const std::string& transport, Bootstrap bootstrap);

} // namespace epx::test
