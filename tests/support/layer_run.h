// SPDX-License-Identifier: Apache-2.0
// A LayerRun is one layer in flight on one rank: it has the handle memory, and compares each operation with the oracle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/group_run.h"
#include "tests/support/workload.h"

namespace epx::test {

class LayerRun {
public:
  // `seed` decides what each rank may choose in each call: where tensors lie, which optional ones it passes, and whether it
  // passes the handle memory or a copy.
  LayerRun(GroupRun& group, const LayerCase& layer, Placement placement, uint64_t seed);

  // Collective. `work` belongs to the same layer; dispatch and the others follow a prepare of the same `work`.
  void prepare(const Workload& work);
  void dispatch(const Workload& work);
  // Does what the two before do. Behind them with the same `work`, the plan must be the same too.
  void prepare_dispatch(const Workload& work);
  void combine(const Workload& work);
  void combine_bwd(const Workload& work);
  void dispatch_bwd(const Workload& work);

  // The same for the rank-major layout, whose plan the first of these makes; `work` must have its data. The group of the second
  // and the last is not of precision exact.
  void dispatch_rank_major(const Workload& work);
  void combine_rank_major(const Workload& work);
  void combine_rank_major_bwd(const Workload& work);
  void dispatch_rank_major_bwd(const Workload& work);

  void call(epx_operation operation, const Workload& work); // one of these
  void movements(const Workload& work);                     // dispatch, combine, combine_bwd and dispatch_bwd

  const std::vector<std::byte>& handle() const { return handle_; }
  const std::vector<std::byte>& rank_major_handle() const { return rank_major_handle_; }

  // Until the next prepare this rank passes these bytes, of another layer, group or prepare, or damaged.
  void use_foreign_handle(std::vector<std::byte> bytes);
  // The same until the next dispatch_rank_major.
  void use_foreign_rank_major_handle(std::vector<std::byte> bytes);

  // Until the next prepare or dispatch_rank_major each call of this rank must report a mismatch of handle memory. useless: this
  // rank's own handle memory is wrong, and it takes part without routes.
  void expect_mismatch(bool useless);

private:
  class Tensors;
  class PlanTensors;
  template <typename Args>
  Args make_plan_args(CallBuffers& buffers); // layer, memory for the handle, and stream
  template <typename Args>
  void pass_rows(Tensors& tensors, const Workload& work, Args& args); // those of dispatch
  void check_received(Tensors& tensors, const Workload& work) const;
  void expect_after_prepare(const Workload& work, epx_operation operation);
  template <typename Args>
  Args make_args(CallBuffers& buffers); // layer, handle memory and stream
  template <typename Args>
  Args make_rank_major_args(CallBuffers& buffers);
  Shape by_source(const Workload& work, int64_t columns) const { // [P, M, columns]
    return {group_.shape().num_ranks, work.rank_major->rows_per_source, columns};
  }
  void finish(CallBuffers& buffers, epx_operation operation);
  void expect_after_call(const Workload& work, epx_operation operation, int64_t rows);

  GroupRun& group_;
  LayerCase layer_;
  Layer epx_layer_;
  Placement placement_;
  Rng rng_;
  std::vector<std::byte> handle_, rank_major_handle_;
  const Workload* prepared_ = nullptr;    // of the last call, if that was prepare or dispatch
  std::vector<std::byte> before_prepare_; // what the memory of handle_ held before that prepare
  bool mismatch_ = false;                 // each call reports it
  bool useless_ = false;
};

// Runs prepare and dispatch, prepare_dispatch, combine, combine_bwd and dispatch_bwd, then the rank-major calls if `work` has
// data of them, and checks the status.
void run_iteration(GroupRun& group, LayerRun& layer, const Workload& work);

// Creates a group and runs all iterations of the Case on this rank.
void run_case(const RankContext& context, Workloads& workloads);

} // namespace epx::test
