// SPDX-License-Identifier: Apache-2.0
#include "runtime/layout/load.h"

#include <algorithm>
#include <vector>

namespace epx {

epx_load_report load_of(std::span<const int64_t> counts, const ExpertBlocks& experts, const ZoneRule& zones) {
  std::vector<int64_t> demands(static_cast<size_t>(experts.num_experts));
  for (size_t i = 0; i < counts.size(); ++i)
    demands[i % demands.size()] += counts[i];
  epx_load_report report{};
  for (int rank = 0; rank < experts.num_ranks; ++rank) {
    int64_t routes = 0;
    int64_t zone = 0;
    int64_t rows = 0; // with unlimited R
    for (int expert = experts.first_expert(rank); expert < experts.first_expert(rank + 1); ++expert) {
      const int64_t demand = demands[static_cast<size_t>(expert)];
      report.dropped += demand - zones.kept(zone, zone, demand);
      report.most_routes_of_expert = std::max(report.most_routes_of_expert, demand);
      zone += zones.rows(demand);
      rows += zone_rows(demand, zones.alignment);
      routes += demand;
    }
    report.routes += routes;
    report.rows_needed = std::max(report.rows_needed, rows);
    report.most_routes_of_rank = std::max(report.most_routes_of_rank, routes);
  }
  return report;
}

} // namespace epx
