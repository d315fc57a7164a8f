// SPDX-License-Identifier: Apache-2.0
// A BoardExchange gathers records of the ranks of a node through the rank board, on the host: when a rank does not come, the
// others know which one it is, and no kernel of theirs waits for it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "runtime/stages/cuda/rank_board.h"
#include "runtime/stages/reports.h"
#include "transport/exchange.h"

namespace epx::cuda {

// These ranks, ascending, have not come to an exchange in time.
class MissingRanksError : public StatusError {
public:
  MissingRanksError(const std::string& message, std::vector<int> ranks)
      : StatusError(EPX_ERROR_TIMEOUT, message), ranks_(std::move(ranks)) {}
  const std::vector<int>& ranks() const { return ranks_; }

private:
  std::vector<int> ranks_;
};

class BoardExchange final : public Exchange {
public:
  // `board` must outlive the exchange, and reaches the peers. `timeout` bounds the wait for each exchange.
  BoardExchange(RankBoard& board, int rank, int num_ranks, std::chrono::milliseconds timeout)
      : board_(board), rank_(rank), num_ranks_(num_ranks), timeout_(timeout) {}

  // The exchanges from here on belong to `call`.
  void begin(CallName call) { call_ = call; }

private:
  // Throws MissingRanksError, OUT_OF_SEQUENCE on all ranks when they are in different calls, and ABORTED once a rank has ended
  // the group.
  std::vector<ExchangeRecord> gather(ExchangeRecord mine) override;
  void require_same_call(const std::vector<RankBoard::Post>& posts) const;

  RankBoard& board_;
  int rank_;
  int num_ranks_;
  std::chrono::milliseconds timeout_;
  CallName call_{EPX_OP_NONE, 0};
  uint64_t round_ = 0;
};

} // namespace epx::cuda
