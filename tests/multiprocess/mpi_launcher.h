// SPDX-License-Identifier: Apache-2.0
// Ranks of MPI_COMM_WORLD, for the suites; throws CheckFailure in a build without MPI.
#pragma once

#include <memory>
#include <string>

#include "tests/support/launcher.h"

namespace epx::test {

std::unique_ptr<Launcher> make_mpi_launcher(const std::string& transport);

} // namespace epx::test
