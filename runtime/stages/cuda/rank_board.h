// Memory of the node that every rank of the group can reach by CPU, whatever has become of its GPU: a rank whose launch fails can
// store nothing into its peers' windows. Kernels look at their rank's share while they wait.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/cuda.h"
#include "runtime/layout/window_layout.h"
#include "transport/exchange.h"
#include "transport/transport.h"

namespace epx::cuda {

class RankBoard {
public:
  // A rank's count of launches that says nothing: some calls of its group are replayed from graphs, which nobody counts.
  static constexpr uint64_t kUnknown = ~uint64_t{0};

  // Collective over `exchange`. Where ranks cannot map each other's memory (in different containers, for instance), each goes
  // on with its own share, and a warning says so.
  RankBoard(int rank, int num_ranks, Exchange& exchange);
  RankBoard(const RankBoard&) = delete;
  RankBoard& operator=(const RankBoard&) = delete;
  ~RankBoard();

  // Why kernels of this rank are to end, packed; 0: they are not. In this rank's share, as its GPU reaches it.
  const uint64_t* abort_record_on_device() const { return abort_record_on_device_; }

  // Whether peers can be told by CPU.
  bool reaches_peers() const { return window_ != nullptr; }

  // All of these from any thread.
  // Who ended the group, packed; 0: nobody. As it lies in this rank's share, where anything may have overwritten it.
  uint64_t abort_record() const;
  // Tells every rank, unless somebody has ended the group before. Returns the record that stands, which is sound.
  AbortRecord end_group(const AbortRecord& abort_record);
  // Tells only this rank's kernels; for the other ranks the group has not ended.
  void end_own_kernels();

  // The sequence number of the last call that this rank's host has launched, or kUnknown.
  void set_launched(uint64_t sequence);
  // Of any rank; kUnknown also when its share cannot be reached.
  uint64_t launched(int rank) const;

private:
  // Each word on lines of its own.
  struct WorkPartition {
    alignas(128) uint64_t abort_record; // of the group: what ranks find and agree on
    // Of the kernels of the rank whose share it is: also when only they are to end.
    alignas(128) uint64_t abort_record_of_kernels;
    alignas(128) uint64_t launched;
  };

  void open(int num_ranks, Exchange& exchange);
  void close();
  WorkPartition& own() const { return *shares_[static_cast<size_t>(rank_)]; }

  int rank_;
  std::unique_ptr<Window> window_;
  bool is_registered_ = false;             // this rank's share of it, with CUDA
  MappedMemory<WorkPartition> own_memory_; // without a window
  std::vector<WorkPartition*> shares_;     // [P]; NULL: out of reach
  const uint64_t* abort_record_on_device_ = nullptr;
};

} // namespace epx::cuda
