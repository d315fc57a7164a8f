// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/cuda/board_exchange.h"

#include <optional>
#include <thread>

#include "base/suspension_aware_deadline.h"
#include "runtime/stages/call_descriptor.h"
#include "transport/interrupt.h"

namespace epx::cuda {
namespace {

// A rank whose kernel has timed out comes no more, and its peers name the culprit that the kernel has found: so they wait a
// little longer than the kernel.
constexpr std::chrono::milliseconds kTimeAfterKernels{500};

} // namespace

std::vector<ExchangeRecord> BoardExchange::gather(ExchangeRecord mine) {
  mine.rank = rank_;
  std::vector<std::optional<RankBoard::Post>> found(static_cast<size_t>(num_ranks_));
  std::vector<int> missing;
  missing.reserve(found.size());
  board_.post({mine, call_.operation}, ++round_);
  SuspensionAwareDeadline deadline = SuspensionAwareDeadline{timeout_}.with_grace(kTimeAfterKernels);
  while (true) {
    missing.clear();
    for (int rank = 0; rank < num_ranks_; ++rank) {
      std::optional<RankBoard::Post>& post = found[static_cast<size_t>(rank)];
      if (!post) post = board_.posted(rank, round_);
      if (!post) missing.push_back(rank);
    }
    if (board_.abort_record() != 0) fail(EPX_ERROR_ABORTED, "a rank has ended the group");
    if (missing.empty()) break;
    require_not_interrupted("the wait for the other ranks");
    if (deadline.passed())
      throw MissingRanksError(fmt::format("not all ranks came within {} ms", timeout_.count()), std::move(missing));
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  std::vector<RankBoard::Post> posts;
  std::vector<ExchangeRecord> all;
  posts.reserve(found.size());
  all.reserve(found.size());
  for (const std::optional<RankBoard::Post>& post : found) {
    posts.push_back(*post);
    all.push_back(post->record);
  }
  require_same_call(posts);
  throw_peer_failure(mine, all);
  return all;
}

void BoardExchange::require_same_call(const std::vector<RankBoard::Post>& posts) const {
  std::vector<CallDescriptor> descriptors(posts.size());
  for (size_t rank = 0; rank < posts.size(); ++rank)
    descriptors[rank] = describe(posts[rank].operation);
  if (const auto failure = find_disagreement(call_, descriptors)) throw StatusError(failure->status, failure->message);
}

} // namespace epx::cuda
