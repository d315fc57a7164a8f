// SPDX-License-Identifier: Apache-2.0
// A SliceProblem is one ragged_all_to_all of all ranks, and a SliceOutcome what has to come of it by the definition in epx.h.
// Every rank makes both of a seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/support/group_run.h"
#include "tests/support/rng.h"

namespace epx::test {

// The integers of one rank. input_offsets are of its near rows, and output_offsets of a peer's far rows: forward, operand is
// near and output is far, and in the transpose they are the other way round.
struct RankSlices {
  std::vector<int64_t> input_offsets, send_sizes, output_offsets, recv_sizes;
  int64_t near_rows = 0, far_rows = 0;
};

struct Slice {
  size_t sender, number;
};

// Those of all ranks.
struct Slices {
  Slices(int num_ranks, int slices_per_peer); // zeros

  size_t num_slices() const { return ranks.size() * static_cast<size_t>(per_peer); } // K
  size_t receiver(size_t number) const { return number / static_cast<size_t>(per_peer); }

  int64_t& send_size(Slice slice) { return ranks[slice.sender].send_sizes[slice.number]; }
  int64_t& recv_size(Slice slice); // what the receiver has
  int64_t& input_offset(Slice slice) { return ranks[slice.sender].input_offsets[slice.number]; }
  int64_t& output_offset(Slice slice) { return ranks[slice.sender].output_offsets[slice.number]; }
  int64_t& near_rows(Slice slice) { return ranks[slice.sender].near_rows; }
  int64_t& far_rows(Slice slice) { return ranks[receiver(slice.number)].far_rows; }
  bool is_good(Slice slice) const;                    // it moves
  std::vector<Slice> in_random_order(Rng& rng) const; // all

  // Gives slices whose send_sizes are set their recv_sizes, and places in random order, with gaps. No two have a row in common
  // on either side. The offsets of empty slices are nonsense. The tensors are as long as that takes, and a row more, or empty.
  void place(Rng& rng);

  int per_peer; // K / P
  std::vector<RankSlices> ranks;
};

// Returns slices of up to `most_rows` rows, of which some are empty.
Slices random_slices(int num_ranks, int slices_per_peer, int64_t most_rows, Rng& rng);

// What a row of operand and output is.
struct RowShape {
  epx_dtype dtype = EPX_UINT8;
  std::vector<int64_t> sizes; // of the dimensions below the first
  int64_t bytes = 1;

  size_t alignment() const; // of an element
  epx_tensor tensor(const void* data, int64_t num_rows) const;
};

// The rows are random bytes.
struct SliceProblem {
  SliceProblem(Slices all_slices, epx_slice_direction to, RowShape row, Rng& rng);

  int64_t operand_rows(size_t rank) const {
    return is_forward() ? slices.ranks[rank].near_rows : slices.ranks[rank].far_rows;
  }
  int64_t output_rows(size_t rank) const {
    return is_forward() ? slices.ranks[rank].far_rows : slices.ranks[rank].near_rows;
  }
  bool is_forward() const { return direction == EPX_SLICES_FORWARD; }

  Slices slices;
  epx_slice_direction direction;
  RowShape row;
  std::vector<std::vector<std::byte>> operands, before; // by rank; what the outputs hold before the call
};

struct SliceOutcome {
  explicit SliceOutcome(const SliceProblem& problem);

  std::vector<std::vector<std::byte>> outputs; // by rank
  std::vector<int64_t> num_bad;                // slices from or to the rank that do not move
};

// Makes calls of one rank, one behind the other, and compares their results at the end. The problems live until then.
class SliceCalls {
public:
  SliceCalls(GroupRun& group, Placement placement, Rng& rng);

  // `integers` is the dtype of offsets and sizes. A given operand is memory that holds the problem's when the call comes to it.
  // Returns the output.
  void* make(const SliceProblem& problem, epx_dtype integers, void* operand = nullptr);
  void check_results(); // and the status

private:
  struct Made {
    const SliceProblem* problem;
    std::vector<std::byte> expected;
  };

  GroupRun& group_;
  CallBuffers buffers_;
  std::vector<Made> made_;
};

// Makes the call, and compares its results.
void run(GroupRun& group, const SliceProblem& problem, epx_dtype integers, Placement placement, Rng& rng);

} // namespace epx::test
