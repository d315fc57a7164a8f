// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/native/native_plan.h"

#include <cstddef>

namespace epx::bench {

SourceOrder source_order(std::span<const int64_t> topk_idx, int top_k, int32_t num_experts) {
  SourceOrder order{std::vector<int32_t>(static_cast<size_t>(num_experts)), std::vector<int32_t>(topk_idx.size()),
                    std::vector<int32_t>(topk_idx.size())};
  for (const int64_t expert : topk_idx)
    ++order.counts[static_cast<size_t>(expert)];
  std::vector<int32_t> next(order.counts.size()); // packed row of each expert's next route
  std::exclusive_scan(order.counts.begin(), order.counts.end(), next.begin(), 0);
  for (size_t route = 0; route < topk_idx.size(); ++route) {
    const int32_t row = next[static_cast<size_t>(topk_idx[route])]++;
    order.packed_row[route] = row;
    order.packed_from[static_cast<size_t>(row)] = static_cast<int32_t>(route / static_cast<size_t>(top_k));
  }
  return order;
}

RowsByPeer rows_by_peer(std::span<const int32_t> counts, std::span<const int32_t> arriving,
                        std::span<const int32_t> first_experts) {
  const size_t num_ranks = first_experts.size() - 1, local_experts = arriving.size() / num_ranks;
  RowsByPeer rows;
  for (size_t peer = 0; peer < num_ranks; ++peer) {
    const auto first = static_cast<size_t>(first_experts[peer]), end = static_cast<size_t>(first_experts[peer + 1]);
    const std::span<const int32_t> sent = counts.subspan(first, end - first),
                                   received = arriving.subspan(peer * local_experts, local_experts);
    rows.sent.push_back(std::reduce(sent.begin(), sent.end(), int64_t{0}));
    rows.received.push_back(std::reduce(received.begin(), received.end(), int64_t{0}));
  }
  return rows;
}

void fill_arrival_order(std::span<const int32_t> arriving, int num_ranks, std::span<int32_t> rows) {
  const size_t local_experts = arriving.size() / static_cast<size_t>(num_ranks);
  std::vector<int32_t> first(arriving.size()); // [P, E_l] the first arrived row of each
  std::exclusive_scan(arriving.begin(), arriving.end(), first.begin(), 0);
  auto next = rows.begin();
  for (size_t expert = 0; expert < local_experts; ++expert)
    for (size_t i = expert; i < arriving.size(); i += local_experts) {
      std::iota(next, next + arriving[i], first[i]);
      next += arriving[i];
    }
}

} // namespace epx::bench
