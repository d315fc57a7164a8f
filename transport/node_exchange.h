// SPDX-License-Identifier: Apache-2.0
// A NodeExchange gathers the records of one node's ranks, by an exchange of all ranks.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "transport/exchange.h"

namespace epx {

// All ranks of all nodes make the same exchanges, each with those of its own node. A failure on any node fails all ranks.
class NodeExchange final : public Exchange {
public:
  // `all` must outlive the exchange. `rank` is this rank's in `all`.
  NodeExchange(Exchange& all, int rank, int ranks_per_node)
      : all_(all), first_rank_(rank / ranks_per_node * ranks_per_node), num_ranks_(ranks_per_node) {}

protected:
  std::vector<ExchangeRecord> gather(ExchangeRecord mine) override {
    std::vector<ExchangeRecord> records = gather_all(mine);
    int32_t flags = 0;
    for (const ExchangeRecord& record : records)
      flags |= record.flags;
    const auto first = records.begin() + first_rank_;
    std::vector<ExchangeRecord> of_node(first, first + num_ranks_);
    of_node.front().flags = flags;
    return of_node;
  }
  std::vector<ExchangeRecord> gather_all(ExchangeRecord mine) override { return gather_by(all_, mine); }

private:
  Exchange& all_;
  int first_rank_;
  int num_ranks_;
};

} // namespace epx
