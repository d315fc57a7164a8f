// SPDX-License-Identifier: Apache-2.0
// Host memory of the node that every rank of the group can access by CPU, whatever has become of its GPU: a rank whose launch
// fails can store nothing into its peers' windows. Kernels poll the entry of their rank while they wait. In calls that have no
// kernel the ranks exchange records here (board_exchange.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/cuda.h"
#include "runtime/layout/window_layout.h"
#include "transport/exchange.h"
#include "transport/transport.h"

namespace epx::cuda {

class RankBoard {
public:
  // The count of a rank's launches is unknown when calls of the group are replayed from graphs, which the host does not count.
  static constexpr uint64_t kUnknown = ~uint64_t{0};

  // This is collective over `exchange`. Where ranks cannot map each other's memory (in different containers, for instance),
  // each goes on with its own entry, and a warning says so.
  RankBoard(int rank, int num_ranks, Exchange& exchange);
  RankBoard(const RankBoard&) = delete;
  RankBoard& operator=(const RankBoard&) = delete;
  ~RankBoard();

  // The device address, in this rank's entry, of the packed abort record that ends the kernels of this rank; it is 0 while they
  // are to go on.
  const uint64_t* abort_record_on_device() const { return abort_record_on_device_; }

  // Returns whether the entries of the peers can be accessed.
  bool reaches_peers() const { return window_ != nullptr; }

  // The functions below may be called from any thread.

  // Returns the packed record of who ended the group, or 0. It is the raw word of this rank's entry, which anything may have
  // overwritten.
  uint64_t abort_record() const;
  // Stores the record in the entry of every rank, unless some rank has ended the group before. Returns the record that counts,
  // which is sound.
  AbortRecord end_group(const AbortRecord& abort_record);
  // Ends only this rank's kernels; for the other ranks the group goes on.
  void end_own_kernels();

  // Publishes the sequence number of the last call that this rank's host has launched, or kUnknown.
  void set_launched(uint64_t sequence);
  // Returns what `rank` has published, or kUnknown when its entry cannot be accessed.
  uint64_t launched(int rank) const;

  // For BoardExchange: what a rank brings to a round. Rounds count from 1, and no rank may be two ahead of another.
  struct Post {
    ExchangeRecord record;
    epx_operation operation; // the call that the round belongs to
  };
  void post(const Post& post, uint64_t round);
  // Returns the post of `rank`, whose entry can be accessed, or nothing before it has posted in this round.
  std::optional<Post> posted(int rank, uint64_t round) const;

private:
  struct Round {
    Post post;
    uint64_t number;
  };
  // What others poll has cache lines of its own.
  struct Entry {
    alignas(128) uint64_t abort_record; // the group has ended: the record that the ranks agree on
    // The kernels of the entry's rank must end, because the group has ended or because this rank destroys it.
    alignas(128) uint64_t abort_record_of_kernels;
    alignas(128) uint64_t launched;
    alignas(128) Round rounds[2]; // by parity, since a slow rank may still read that of the round before
  };

  void open(int num_ranks, Exchange& exchange);
  void close();
  Entry& own() const { return *entries_[static_cast<size_t>(rank_)]; }

  int rank_;
  std::unique_ptr<Window> window_;
  bool is_registered_ = false;     // this rank's entry in the window is registered with CUDA
  MappedMemory<Entry> own_memory_; // this rank's entry when there is no window
  std::vector<Entry*> entries_;    // [P]; NULL when it cannot be accessed
  const uint64_t* abort_record_on_device_ = nullptr;
};

} // namespace epx::cuda
