// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine the native way (--native): what a framework does with collectives alone, one row per route.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tools/ep_bench/gpu/communicator.h"
#include "tools/ep_bench/gpu/gpu.h"
#include "tools/ep_bench/gpu/pinned_integers.h"
#include "tools/ep_bench/native/native_plan.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/workload/workload.h"

namespace epx::bench {

// The routes of each input set are sorted by expert beforehand, on the host, and counts, orders and weights are in the GPU's
// memory when a call begins.
class NativeExchange {
public:
  // Makes a communicator with NCCL's defaults. `first_experts` [P] has the first expert of each rank; max_rows is at least what
  // any rank receives in any set. `gpu` must outlive this. Collective. Throws AgreedError.
  NativeExchange(std::span<const InputSet> sets, const std::vector<int32_t>& first_experts, int64_t max_rows,
                 const Options& options, const Peers& peers, Gpu& gpu);

  // Each enqueues on the GPU's stream, is collective, and throws RuntimeError.

  // Exchanges counts, waits for them on the host, sends the packed rows, and permutes what arrives into expert_rows().
  void dispatch(size_t set);
  // Does the same with the counts of the last dispatch() of that set; the host waits for nothing.
  void dispatch_rows(size_t set);
  // Sends expert_rows() back by the same counts, and sums each token's K rows into out(), in fp32.
  void combine(size_t set);

  const Buffer& expert_rows() const { return expert_rows_; } // [max_rows, H], of which N are in use
  const Buffer& out() const { return out_; }                 // [T, H]

private:
  struct Set {
    Buffer tokens;       // [T, H]
    Buffer topk_weights; // [T, K] float
    Buffer packed_from;  // [T * K] int32
    Buffer packed_row;   // [T, K] int32
    Buffer counts;       // [E] int32, then [P, E_l] of all sources to the experts here
    Buffer arrival;      // [max_rows] int32, see fill_arrival_order()
    RowsByPeer rows;
  };

  Set make_set(const TokenInputs& inputs) const;
  void exchange_counts(const Set& set);
  void pack(const Set& set);
  void plan(Set& set); // from the counts in the host's memory
  void permute(const Set& set);
  // Rows lie by peer in both buffers.
  void exchange_rows(const Buffer& send, std::span<const int64_t> sent, const Buffer& receive,
                     std::span<const int64_t> received);

  int64_t num_local_experts() const { return first_experts_[rank_ + 1] - first_experts_[rank_]; }
  int64_t num_arriving() const { return num_ranks_ * num_local_experts(); } // counts

  Gpu& gpu_;
  Options options_;
  size_t rank_;
  int64_t num_ranks_;
  std::vector<int32_t> first_experts_; // [P + 1]
  int64_t max_rows_;
  std::unique_ptr<Communicator> communicator_;
  std::vector<Set> sets_;
  Buffer home_rows_;              // [T * K, H] packed, or back
  Buffer arrived_rows_;           // [max_rows, H] in the order of arrival
  Buffer expert_rows_;            // [max_rows, H]
  Buffer out_;                    // [T, H]
  PinnedIntegers pinned_counts_;  // as Set::counts
  PinnedIntegers pinned_arrival_; // [max_rows]; the wait for counts waits for the copy of the dispatch before, too
  CopyEvent counts_event_;
};

} // namespace epx::bench
