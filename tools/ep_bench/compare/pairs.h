// SPDX-License-Identifier: Apache-2.0
// Pairs the points of two files by what their calls do, and compares them line by line.
#pragma once

#include <string>
#include <vector>

#include "tools/ep_bench/compare/estimate.h"
#include "tools/ep_bench/compare/result_file.h"

namespace epx::bench {

// A Row is one line of a point that both files have.
struct Row {
  std::vector<std::string> labels; // by Pairs::columns
  std::string line;
  Estimate a, b;
  Comparison comparison;
};

struct Pairs {
  std::vector<std::string> columns; // fields of a config: tokens, layout, and what else tells the points apart
  std::vector<Row> rows;
  std::vector<std::string> unpaired; // sentences: points and lines of one file alone, and what did not complete
};

// Throws UsageError: the files are of other numbers of ranks, of nodes or another transport; they are of other models of CPU or GPU, unless
// `any_machine`; no line is in both.
Pairs pair(const ResultFile& a, const ResultFile& b, bool any_machine);

// Returns sentences on what else of the machines differs, and does not forbid to compare.
std::vector<std::string> differences(const Machine& a, const Machine& b);

// Returns "4096, rank-major, dispatch".
std::string name_of(const Row& row);

} // namespace epx::bench
