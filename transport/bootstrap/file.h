// SPDX-License-Identifier: Apache-2.0
// The file rendezvous makes ranks known to each other through files in a directory; epx_bootstrap_file in epx.h is its
// contract.
#pragma once

#include <chrono>
#include <string>

#include "epx/epx.h"

namespace epx {

// Joins the other ranks and returns a bootstrap that owns its context (epx_bootstrap_free releases it). Throws StatusError.
epx_bootstrap make_file_bootstrap(const std::string& directory, const std::string& job_id, int rank, int num_ranks,
                                  std::chrono::milliseconds timeout);

} // namespace epx
