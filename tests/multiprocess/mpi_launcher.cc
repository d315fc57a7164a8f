// SPDX-License-Identifier: Apache-2.0
#include "tests/multiprocess/mpi_launcher.h"

#include "tests/support/check.h"

#ifdef EPX_TEST_WITH_MPI
#include "epx/epx_mpi.hpp"
#endif

namespace epx::test {

#ifdef EPX_TEST_WITH_MPI

namespace {

// MPI lives as long as the launcher.
class MpiLauncher final : public Launcher {
public:
  explicit MpiLauncher(const std::string& transport) {
    check(MPI_Init(nullptr, nullptr) == MPI_SUCCESS, "MPI_Init failed");
    ranks_ = make_process_launcher(transport, bootstrap_mpi(MPI_COMM_WORLD, kMeetTimeout));
  }
  MpiLauncher(const MpiLauncher&) = delete;
  MpiLauncher& operator=(const MpiLauncher&) = delete;
  ~MpiLauncher() override {
    ranks_.reset(); // frees the bootstrap
    MPI_Finalize();
  }

  int num_ranks() const override { return ranks_->num_ranks(); }
  void each_rank(const std::function<void(const RankContext&)>& fn) override { ranks_->each_rank(fn); }

private:
  std::unique_ptr<Launcher> ranks_;
};

} // namespace

std::unique_ptr<Launcher> make_mpi_launcher(const std::string& transport) {
  return std::make_unique<MpiLauncher>(transport);
}

#else

std::unique_ptr<Launcher> make_mpi_launcher(const std::string& /*transport*/) {
  fail_check("this build has no MPI");
}

#endif

} // namespace epx::test
