// SPDX-License-Identifier: Apache-2.0
// The document that --json writes: docs/ep_bench-json.md describes it.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/ep_bench/environment.h"
#include "tools/ep_bench/json_file.h"
#include "tools/ep_bench/sweep.h"

namespace epx::bench {

inline constexpr int kSchemaVersion = 2;

// Returns EPX_TUNING of the environment (docs/tuning.md); empty: it is not set.
std::string tuning_of_environment();

struct RunFacts {
  std::vector<std::string> command;
  std::string began; // UTC, "2026-11-28T15:00:00Z"
  int num_ranks = 0;
  MachineFacts machine;
  std::string tuning; // EPX_TUNING of the environment
};

// Returns the present time as RunFacts have it.
std::string utc_now();

// Returns the JSON of one start: "starts" of the document has it.
nlohmann::json start_json(int number, std::span<const PointResult> points);

// A Document is the file of --json of one run, to which it writes all points after each of them.
class Document {
public:
  // Opens the file, and with options.appends reads the starts that it has. The caller holds the facts that are known before the
  // run. Throws UsageError: the file cannot be written, or, where the run is to be appended, has another schema, machine, number
  // of ranks or other points.
  Document(const Sweep& sweep, RunFacts facts);

  // The file is written once a point is complete, so that a run of which nothing came leaves it as it was. To a pipe only the
  // last document is written. Throws RuntimeError.
  void write(std::span<const PointResult> points, bool is_last);

private:
  nlohmann::json to_json(std::span<const PointResult> points) const;

  RunFacts facts_;
  nlohmann::json earlier_; // the document that the run is appended to; null: none
  std::optional<JsonFile> file_;
};

} // namespace epx::bench
