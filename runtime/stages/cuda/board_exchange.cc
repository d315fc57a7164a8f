// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/cuda/board_exchange.h"

#include <optional>
#include <thread>

#include "base/suspension_aware_deadline.h"

namespace epx::cuda {

std::vector<ExchangeRecord> BoardExchange::gather(ExchangeRecord mine) {
  mine.rank = rank_;
  board_.post(mine, ++round_);
  SuspensionAwareDeadline deadline{timeout_};
  std::vector<std::optional<ExchangeRecord>> found(static_cast<size_t>(num_ranks_));
  std::vector<int> missing;
  while (true) {
    missing.clear();
    for (int rank = 0; rank < num_ranks_; ++rank) {
      std::optional<ExchangeRecord>& record = found[static_cast<size_t>(rank)];
      if (!record) record = board_.posted(rank, round_);
      if (!record) missing.push_back(rank);
    }
    if (missing.empty()) break;
    if (board_.abort_record() != 0) fail(EPX_ERROR_ABORTED, "a rank has ended the group");
    if (deadline.passed())
      throw MissingRanksError(fmt::format("not all ranks came within {} ms", timeout_.count()), std::move(missing));
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  std::vector<ExchangeRecord> all;
  for (const std::optional<ExchangeRecord>& record : found)
    all.push_back(*record);
  for (const ExchangeRecord& record : all)
    if (record.status != EPX_SUCCESS && mine.status == EPX_SUCCESS) throw_peer_failure(record);
  return all;
}

} // namespace epx::cuda
