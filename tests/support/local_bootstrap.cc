// SPDX-License-Identifier: Apache-2.0
#include "tests/support/local_bootstrap.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>

#include <fmt/format.h>

namespace epx::test {

LocalRendezvous::LocalRendezvous(int num_ranks) : num_ranks_(num_ranks), participants_(static_cast<size_t>(num_ranks)) {
  for (int rank = 0; rank < num_ranks; ++rank)
    participants_[static_cast<size_t>(rank)] = {this, rank, 0};
}

epx_bootstrap LocalRendezvous::bootstrap(int rank) {
  epx_bootstrap bootstrap = {};
  bootstrap.struct_size = sizeof(bootstrap);
  bootstrap.rank = rank;
  bootstrap.num_ranks = num_ranks_;
  bootstrap.all_gather = &LocalRendezvous::all_gather;
  bootstrap.context = &participants_[static_cast<size_t>(rank)];
  return bootstrap;
}

epx_status LocalRendezvous::all_gather(void* context, const void* send, void* recv, size_t bytes_per_rank,
                                       int64_t timeout_ms, char* message, size_t message_bytes) {
  auto& participant = *static_cast<Participant*>(context);
  return participant.rendezvous->gather(participant, send, recv, bytes_per_rank, timeout_ms, message, message_bytes);
}

epx_status LocalRendezvous::gather(Participant& participant, const void* send, void* recv, size_t bytes, int64_t timeout_ms,
                                   char* message, size_t message_bytes) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  const auto num_ranks = static_cast<size_t>(num_ranks_);
  const uint64_t number = participant.next_round++;
  std::unique_lock lock(mutex_);
  Round& round = rounds_[number];
  round.parts.resize(num_ranks);
  round.here.resize(num_ranks, false);
  const auto* first = static_cast<const std::byte*>(send);
  round.parts[static_cast<size_t>(participant.rank)].assign(first, first + bytes);
  round.here[static_cast<size_t>(participant.rank)] = true;
  ++round.num_here;
  changed_.notify_all();

  if (!changed_.wait_until(lock, deadline, [&] { return round.num_here == num_ranks_; })) {
    std::string missing;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      if (!round.here[rank]) missing += fmt::format(" {}", rank);
    }
    std::snprintf(message, message_bytes, "missing ranks:%s", missing.c_str());
    return EPX_ERROR_TIMEOUT; // the round stays, so that a late rank finds its peers' contributions
  }

  for (size_t rank = 0; rank < num_ranks; ++rank) {
    if (round.parts[rank].size() != bytes) {
      std::snprintf(message, message_bytes, "rank %zu gathers %zu bytes, rank %d gathers %zu", rank,
                    round.parts[rank].size(), participant.rank, bytes);
      return EPX_ERROR_MISMATCH;
    }
    if (bytes > 0) std::memcpy(static_cast<std::byte*>(recv) + rank * bytes, round.parts[rank].data(), bytes);
  }
  if (++round.num_done == num_ranks_) rounds_.erase(number);
  return EPX_SUCCESS;
}

} // namespace epx::test
