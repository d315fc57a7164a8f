// SPDX-License-Identifier: Apache-2.0
// Peers are the ranks of a run among themselves, beside the measured library: all-gathers, barriers, and failing together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "epx/epx.h"
#include "tools/ep_bench/errors.h"

namespace epx::bench {

// It uses a bootstrap, which it does not own. All member functions are collective.
class Peers {
public:
  Peers(const epx_bootstrap& bootstrap, int64_t timeout_ms) : bootstrap_(bootstrap), timeout_ms_(timeout_ms) {}

  int rank() const { return bootstrap_.rank; }
  int num_ranks() const { return bootstrap_.num_ranks; }

  // Gathers the same number of values from every rank, in rank order.
  template <typename T>
  std::vector<T> gather(std::span<const T> mine) const {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(mine.size() * num_ranks());
    all_gather(mine.data(), all.data(), mine.size_bytes());
    return all;
  }
  template <typename T>
  std::vector<T> gather(const T& mine) const {
    return gather(std::span<const T>(&mine, 1));
  }

  // A barrier that gathers the ranks' failures. When any rank passes a failure, or has got a signal (interrupt.h), all throw the
  // same AgreedError.
  void agree(const Failure& failure) const;
  void barrier() const { agree({}); }

  // Does what agree() does, and then returns on all ranks at the same time: ranks leave an all-gather up to some milliseconds
  // apart, so all sleep until a time shortly after the last one came. This needs ranks on one machine, which share a clock;
  // others return as from agree().
  void start_together(const Failure& mine) const;

  // Runs `action` on every rank, and throws an AgreedError on all of them when it threw on any. `action` may itself
  // be collective only if it fails on all ranks together.
  template <typename Action>
  void together(Action&& action) const {
    agree(attempt(action));
  }

private:
  void all_gather(const void* mine, void* all, size_t bytes_per_rank) const;

  epx_bootstrap bootstrap_;
  int64_t timeout_ms_;
};

} // namespace epx::bench
