// SPDX-License-Identifier: Apache-2.0
// This is a bootstrap for ranks that are threads of one process, as small as one that a framework brings can be.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "epx/epx.h"

namespace epx::test {

// Serves any number of all-gathers, and so any number of groups. It must outlive its bootstraps.
class LocalRendezvous {
public:
  explicit LocalRendezvous(int num_ranks);
  LocalRendezvous(const LocalRendezvous&) = delete;
  LocalRendezvous& operator=(const LocalRendezvous&) = delete;

  epx_bootstrap bootstrap(int rank); // the bootstrap needs no epx_bootstrap_free

private:
  struct Round {
    std::vector<std::vector<std::byte>> parts; // [P]
    std::vector<bool> here;                    // [P]
    int num_here = 0;
    int num_done = 0;
  };
  struct Participant {
    LocalRendezvous* rendezvous = nullptr;
    int rank = 0;
    uint64_t next_round = 0;
  };

  static epx_status all_gather(void* context, const void* send, void* recv, size_t bytes_per_rank, int64_t timeout_ms,
                               char* message, size_t message_bytes);
  epx_status gather(Participant& participant, const void* send, void* recv, size_t bytes, int64_t timeout_ms, char* message,
                    size_t message_bytes);

  int num_ranks_;
  std::vector<Participant> participants_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Round> rounds_;
};

} // namespace epx::test
