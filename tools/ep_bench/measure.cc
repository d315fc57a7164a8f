// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/measure.h"

#include <chrono>
#include <map>

#include "tools/ep_bench/copy_baseline.h"
#include "tools/ep_bench/row_format.h"

namespace epx::bench {
namespace {

int64_t now_ns() {
  using std::chrono::steady_clock;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// Times one host call that has finished when it returns.
template <typename Action>
Timing timed(Action&& action) {
  Timing timing;
  timing.begin_ns = now_ns();
  action();
  timing.end_ns = now_ns();
  return timing;
}

// Divides the rows evenly over the ranks, so that the copies take no longer on one rank than on another.
int64_t even_share(int64_t rows, int num_ranks) {
  return (rows + num_ranks - 1) / num_ranks;
}

// Returns the rows that this rank copies before an operation in a set: [operation][set].
std::vector<std::vector<int64_t>> copied_rows(const Survey& survey, const Options& options, int num_ranks) {
  std::vector<std::vector<int64_t>> rows;
  for (const Line& line : operations_of(options.layout)) {
    rows.emplace_back();
    for (const Traffic& traffic : survey.sets)
      rows.back().push_back(
          even_share(written_rows(line.operation, traffic, options.combine_precision, options.layout), num_ranks));
  }
  return rows;
}

// A memcpy writes what the operation does.
int64_t copied_row_bytes(const Options& options, const Line& line) {
  return row_bytes_of(options, line.operation).received;
}

// Copies `rows` rows of the operation's own input, scattered as the operation's are, by plain memcpy.
void copy_like(epx_operation operation, CopyBaseline& baseline, const MeasuredGroup& measured, const InputSet& set,
               int64_t rows) {
  switch (operation) {
  case EPX_OP_DISPATCH:
    return baseline.scatter(set.by_token.tokens, rows);
  case EPX_OP_COMBINE:
    return baseline.gather(measured.expert_rows().expert_out.bytes(), rows);
  case EPX_OP_COMBINE_BWD:
    return baseline.scatter(set.by_token.grad_out, rows);
  case EPX_OP_DISPATCH_BWD:
    return baseline.gather(measured.expert_rows().grad_recv.bytes(), rows);
  default:
    return;
  }
}

std::vector<Series> gather_by_rank(const Series& mine, const Peers& peers) {
  const Series all = peers.gather(std::span<const Timing>(mine));
  std::vector<Series> ranks;
  ranks.reserve(peers.num_ranks());
  for (int rank = 0; rank < peers.num_ranks(); ++rank)
    ranks.emplace_back(all.begin() + rank * mine.size(), all.begin() + (rank + 1) * mine.size());
  return ranks;
}

} // namespace

Measurements measure(MeasuredGroup& measured, std::span<const InputSet> sets, const Survey& survey, const Options& options,
                     const Peers& peers, Sampler& sampler) {
  const auto rows = copied_rows(survey, options, peers.num_ranks());
  const std::span<const Line> lines = operations_of(options.layout);
  std::map<int64_t, CopyBaseline> baselines; // by bytes of a row
  std::vector<TokenTensors> tensors;
  peers.together([&] {
    std::map<int64_t, std::vector<int64_t>> row_counts;
    for (size_t op = 0; op < lines.size(); ++op) {
      std::vector<int64_t>& counts = row_counts[copied_row_bytes(options, lines[op])];
      counts.insert(counts.end(), rows[op].begin(), rows[op].end());
    }
    for (const auto& [bytes, counts] : row_counts)
      baselines.emplace(bytes, CopyBaseline(counts, bytes, options.seed));
    for (const InputSet& set : sets)
      tensors.push_back(measured.tensors_of(set.by_token));
  });

  std::vector<Series> calls(lines.size()), copies(lines.size());
  Failure failure; // the last call's; the next barrier carries it to the other ranks
  while (sampler.next()) {
    const size_t set = sampler.iteration() % sets.size();
    measured.load(sets[set].by_row);
    for (size_t op = 0; op < lines.size(); ++op) {
      const bool keep = sampler.is_timed();
      if (lines[op].moves_rows()) {
        peers.start_together(failure);
        CopyBaseline& baseline = baselines.at(copied_row_bytes(options, lines[op]));
        const Timing timing = timed([&] { copy_like(lines[op].operation, baseline, measured, sets[set], rows[op][set]); });
        if (keep) copies[op].push_back(timing);
      }
      peers.start_together(failure);
      const Timing timing = timed([&] { failure = attempt([&] { measured.call(lines[op], tensors[set]); }); });
      sampler.add(op, timing.end_ns - timing.begin_ns);
      if (keep) calls[op].push_back(timing);
    }
  }
  peers.agree(failure);

  Measurements measurements(lines.size());
  for (size_t op = 0; op < lines.size(); ++op) {
    measurements[op].call = gather_by_rank(calls[op], peers);
    if (!copies[op].empty()) measurements[op].copy = gather_by_rank(copies[op], peers);
  }
  return measurements;
}

std::vector<Series> gather_durations(std::span<const int64_t> mine_ns, const Peers& peers) {
  const std::vector<int64_t> all = peers.gather(mine_ns);
  std::vector<Series> ranks(static_cast<size_t>(peers.num_ranks()));
  for (size_t i = 0; i < all.size(); ++i)
    ranks[i / mine_ns.size()].push_back({.begin_ns = 0, .end_ns = all[i]});
  return ranks;
}

} // namespace epx::bench
