// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/launcher.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

#if defined(EPX_BENCH_HAS_MPI)
#include "epx/epx_mpi.hpp"
#endif
#include "tools/ep_bench/errors.h"

namespace epx::bench {
namespace {

#if defined(EPX_BENCH_HAS_MPI)

// Returns this process's rank.
int initialise_mpi() {
  int rank = 0;
  if (MPI_Init(nullptr, nullptr) != MPI_SUCCESS || MPI_Comm_rank(MPI_COMM_WORLD, &rank) != MPI_SUCCESS)
    throw RuntimeError("MPI_Init failed");
  return rank;
}

void synchronise_mpi() {
  MPI_Barrier(MPI_COMM_WORLD);
}
void finalise_mpi() {
  MPI_Finalize();
}
void abort_mpi(int exit_code) {
  MPI_Abort(MPI_COMM_WORLD, exit_code);
}

// mpirun of Open MPI, and of MPICH and its kin, set these variables for their processes.
bool under_mpirun() {
  return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr || std::getenv("PMI_SIZE") != nullptr;
}

#else

int initialise_mpi() {
  throw RuntimeError("this ep_bench was built without MPI");
}
void synchronise_mpi() {}
void finalise_mpi() {}
void abort_mpi(int) {}
bool under_mpirun() {
  return false;
}

#endif

} // namespace

Launcher::Launcher(const Options& options)
    : uses_mpi_(options.bootstrap_directory.empty()), rank_(uses_mpi_ ? initialise_mpi() : options.rank) {}

Launcher::~Launcher() {
  if (uses_mpi_) finalise_mpi();
}

void Launcher::abandon(int exit_code) const {
  if (uses_mpi_) abort_mpi(exit_code);
}

void say_once(std::FILE* stream, const std::string& text, std::span<const char* const> arguments) {
  const bool meet_by_file = std::ranges::any_of(
      arguments, [](std::string_view argument) { return argument.find("file:") != std::string_view::npos; });
  if (!under_mpirun() || meet_by_file) {
    fmt::print(stream, "{}", text);
    return;
  }
  if (initialise_mpi() == 0) {
    fmt::print(stream, "{}", text);
    std::fflush(stream);
  }
  synchronise_mpi(); // mpirun may kill all ranks as soon as one has ended
  finalise_mpi();
}

epx::Bootstrap Launcher::make_bootstrap(const Options& options, int64_t timeout_ms) const {
  const std::chrono::milliseconds timeout(timeout_ms);
#if defined(EPX_BENCH_HAS_MPI)
  if (uses_mpi_) return bootstrap_mpi(MPI_COMM_WORLD, timeout);
#endif
  return bootstrap_file(options.bootstrap_directory, options.job_id, options.rank, options.num_ranks, timeout);
}

} // namespace epx::bench
