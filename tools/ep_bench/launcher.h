// SPDX-License-Identifier: Apache-2.0
// A Launcher knows how the processes of a run were started, and how they find each other.
#pragma once

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>

#include "epx/epx.hpp"
#include "tools/ep_bench/options.h"

namespace epx::bench {

// It initialises MPI for as long as it lives, when the options ask for it. It is the only part of ep_bench that uses MPI.
class Launcher {
public:
  explicit Launcher(const Options& options);
  ~Launcher(); // finalises MPI: everything that uses the bootstrap must be gone
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  int rank() const { return rank_; }

  // Collective. Throws epx::Error.
  epx::Bootstrap make_bootstrap(const Options& options, int64_t timeout_ms) const;

  // Ends all ranks, where the launcher can, after a failure that the others may not know of.
  void abandon(int exit_code) const;

private:
  bool uses_mpi_;
  int rank_;
};

// Writes `text` from one process only, before the options are known. It is collective under mpirun, unless the command line
// asks for a file bootstrap; then every process writes it.
void say_once(std::FILE* stream, const std::string& text, std::span<const char* const> arguments);

} // namespace epx::bench
