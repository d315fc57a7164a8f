// SPDX-License-Identifier: Apache-2.0
// Reads a file of ep_bench --json: of its fields those that `ep_bench compare` needs. docs/ep_bench-json.md describes them all.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "epx/epx.h"
#include "tools/ep_bench/compare/estimate.h"

namespace epx::bench {

// A LineResult is of one line of a point, in all starts that have it.
struct LineResult {
  std::vector<StartMedian> starts;
  int64_t num_unconverged = 0; // of these starts, how many ended by --budget
};

// A Point is what was measured with one config, in all starts together.
struct Point {
  nlohmann::json config; // of its fields those that shape what a call does; the key by which points of two files pair
  std::string failure;   // empty; or of the first start that did not complete it "failed: SENTENCE" or "not run"
  std::map<std::string, LineResult> lines;
};

struct Machine {
  std::string host, cpu;
  int64_t cores = 0;
  std::optional<std::string> gpu, driver, nccl;
};

struct ResultFile {
  std::string name;
  bool is_complete = true;
  std::string library_version;
  int64_t num_ranks = 0;
  int64_t ranks_per_node = 0;
  epx_transport transport = EPX_TRANSPORT_HOST;
  Machine machine;
  int64_t num_starts = 0;
  std::vector<Point> points; // in the order of the first start that has them
};

// Throws UsageError with one sentence that has the name of the file and, where a field is at fault, its place and value.
ResultFile read_result_file(const std::string& name);

} // namespace epx::bench
