// SPDX-License-Identifier: Apache-2.0
// Prints the table of --block, and makes its part of the JSON.
#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

#include "tools/ep_bench/block/results.h"
#include "tools/ep_bench/options.h"

namespace epx::bench {

std::string block_table(const BlockResults& results, const Options& options);
nlohmann::json block_json(const BlockResults& results, const Options& options);

} // namespace epx::bench
