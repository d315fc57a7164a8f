// SPDX-License-Identifier: Apache-2.0
// The all-gather of a layer's expert weights that FSDP makes before it uses them. Each rank keeps a run of rows of each matrix,
// and all of them come to all ranks, beside what the measured group does: by epx_ragged_all_to_all in a group of its own, or by
// copy engines.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "epx/epx.hpp"
#include "tools/copy_engine_gather.h"
#include "tools/ep_bench/block/numbers.h"
#include "tools/ep_bench/memory.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"

namespace epx::bench {

// A run of rows, which a rank keeps.
struct RowRange {
  int64_t first = 0;
  int64_t count = 0;
};

// A matrix that is gathered.
struct GatheredMatrix {
  BlockTensor tensor; // whose numbers it has
  epx_dtype dtype;
  int64_t rows, columns;
  int64_t unit; // the rows of a rank begin and end at multiples of it

  int64_t row_bytes() const { return epx::row_bytes(dtype, columns); }
  int64_t bytes() const { return rows * row_bytes(); }
  RowRange part(int rank, int num_ranks) const; // of the rank
};

// Returns the experts whose weights are gathered: as many as the rank has that has most of them, E_l.
int32_t gathered_experts(const Options& options, int num_ranks);

// wide: gate_up [E_l * 2F, H] and down [E_l * H, F] in --dtype. fp8: codes of these shapes, and a scale for each 128 x 128 of
// them, [rows / 128, columns / 128].
std::vector<GatheredMatrix> gathered_matrices(const Options& options, GatherForm form, int num_ranks);

// Throws UsageError unless each rank keeps rows of each matrix that --gather asks for, and int32 counts them all.
void require_gather(const Options& options, int num_ranks);

// Throws UsageError unless all ranks keep as many rows, as copy engines want it.
void require_equal_parts(const Options& options, int num_ranks);

GroupConfig gather_group_config(const Options& options);

const char* gather_line(GatherForm form); // "gather", "gather-fp8"

class WeightGather {
public:
  // Allocates what the forms of --gather need: collective. `memory` must outlive this. Throws epx::Error.
  WeightGather(const epx_bootstrap& bootstrap, const Options& options, const Peers& peers, Memory& memory);
  ~WeightGather();
  WeightGather(const WeightGather&) = delete;
  WeightGather& operator=(const WeightGather&) = delete;

  // Gathers all matrices of the form, after what the memory's stream has so far and beside what it gets until join(). On the
  // host they are gathered when start() returns. Collective. Throws epx::Error.
  void start(GatherForm form);
  void join(); // the stream goes on when they are gathered
  // To be called when the stream is idle. Throws RuntimeError when a gather has failed on the device.
  void check() const;

  int64_t received_bytes(GatherForm form) const;            // from other ranks
  const std::vector<Buffer>& wholes(GatherForm form) const; // in the order of gathered_matrices()
  void scribble(GatherForm form) const;                     // over them, but for what this rank keeps there
  int64_t count_wrong(GatherForm form) const;               // elements that are not those of the ranks

private:
  // A matrix with its memory.
  struct Matrix {
    GatheredMatrix shape;
    Buffer part;     // this rank's rows; by copy engines a part of the whole
    Buffer integers; // input_offsets, send_sizes, output_offsets, recv_sizes, [4, P] int32
  };
  struct Form {
    GatherForm form;
    std::vector<Matrix> matrices;
    std::vector<Buffer> wholes; // in memory of the group, where rows land in place
  };

  Buffer make_whole(const GatheredMatrix& shape) const;
  Matrix make_matrix(const GatheredMatrix& shape, const Buffer& whole) const;
  void gather(const Matrix& matrix, const Buffer& whole) const;
  const Form& find(GatherForm form) const;

  uint64_t seed_;
  Memory& memory_;
  std::unique_ptr<SideStream> side_;
  int rank_, num_ranks_;
  std::unique_ptr<CopyEngineGather> copy_engines_;
  Group group_; // without copy engines
  std::vector<Form> forms_;
};

} // namespace epx::bench
