// SPDX-License-Identifier: Apache-2.0
// Runs ep_bench several times, each in a new process (--starts).
#pragma once

#include <span>

#include "tools/ep_bench/options.h"

namespace epx::bench {

// Starts options.starts processes one after another with this program's arguments and no --starts: they meet under a job id of
// their own each, and from the second on append to the file of --json. It ends with the first that fails, and returns that
// one's exit status. Signals that another process sends are passed on. Throws RuntimeError, and UsageError for a job id that is too
// long to be continued.
int run_starts(std::span<const char* const> arguments, const Options& options);

} // namespace epx::bench
