// SPDX-License-Identifier: Apache-2.0
// Prints the tables, and makes the JSON of a point.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "epx/epx.h"
#include "tools/ep_bench/block/results.h"
#include "tools/ep_bench/environment.h"
#include "tools/ep_bench/figures.h"
#include "tools/ep_bench/native/native_figures.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/workload/verify.h"

namespace epx::bench {

// Results are everything that was measured of a point.
struct Results {
  Options options;
  int32_t library_version = 0;  // epx_version()
  epx_group_info group{};       // of rank 0
  double group_creation_ms = 0; // epx_group_create, the slowest rank
  int64_t handle_mem_bytes = 0;
  int64_t handle_mem_limit = 0; // the contract's formula, bytes
  double dropped_routes = 0;    // per iteration, all ranks together
  Figures figures;
  std::optional<NativeFigures> native;                // with --native
  std::optional<WrongCounts> wrong;                   // with --verify
  std::optional<BlockResults> block;                  // with --block
  std::array<uint64_t, EPX_MAX_EVENT_KINDS> events{}; // of all ranks, over all calls
  Environment environment;
};

std::string version_string(int32_t version); // "0.2.0"

// Returns 16 * (max_tokens_per_rank * K + R) + 8 * P * E + 64 KiB, or what epx_handle_mem_size tells for several nodes.
int64_t handle_memory_limit(const Options& options, const epx_group_info& group);

// Returns true when no element is wrong, the native layer agrees with the block, and the group reported no event that the
// options do not explain.
bool passed(const Results& results);

std::string to_table(const Results& results);

// Return what a document (document.h) has of a point: what its options ask for, and what was measured.
nlohmann::json config_json(const Options& options);
nlohmann::json to_json(const Results& results);

} // namespace epx::bench
