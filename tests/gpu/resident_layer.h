// SPDX-License-Identifier: Apache-2.0
// A ResidentLayer is one layer in flight whose tensors keep their addresses from call to call, so that calls can be captured in
// a graph, and run back to back without a check in between.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "tests/support/compare.h"
#include "tests/support/group_run.h"
#include "tests/support/layer_memory.h"
#include "tests/support/workload.h"

namespace epx::test {

// It passes all optional tensors. The case must have TokenCount::full, RecvRows::capacity and no sidecars: shapes never change.
// Its formats are none, or the same on_wire in all calls that move rows; these have no tensors of their own.
// A layer of RankMajorRows::max_tokens can make the rank-major calls, whose plan is beside that of prepare.
class ResidentLayer {
public:
  // The constructor is collective when in_place: what peers write then lies in memory from epx_mem_alloc.
  ResidentLayer(GroupRun& group, const LayerCase& layer, bool in_place);
  // What peers write lies in `registered`, memory from epx_mem_register.
  ResidentLayer(GroupRun& group, const LayerCase& layer, std::byte* registered, size_t bytes);
  ResidentLayer(const ResidentLayer&) = delete;
  ResidentLayer& operator=(const ResidentLayer&) = delete;
  ~ResidentLayer();

  // Copies the inputs to the device, and fills the outputs with kScribble. Blocks.
  void write(const Workload& work);

  // Sets the stream of the calls below; until then it is the device's.
  void set_stream(epx_stream stream) { layer_memory_.stream = rank_major_memory_.stream = stream; }

  // These are asynchronous on the stream.
  void prepare() { layer_memory_.call(group_.view(), EPX_OP_PREPARE); }
  void dispatch() { layer_memory_.call(group_.view(), EPX_OP_DISPATCH); }
  void prepare_dispatch() { layer_memory_.call(group_.view(), EPX_OP_PREPARE_DISPATCH); } // what the two before do
  void combine() { layer_memory_.call(group_.view(), EPX_OP_COMBINE); }
  void forward();  // prepare, dispatch and combine
  void backward(); // the two below
  void combine_bwd() { layer_memory_.call(group_.view(), EPX_OP_COMBINE_BWD); }
  void dispatch_bwd() { layer_memory_.call(group_.view(), EPX_OP_DISPATCH_BWD); }
  void dispatch_rank_major() { rank_major_memory_.call(group_.view(), EPX_OP_DISPATCH_RANK_MAJOR); }
  void combine_rank_major() { rank_major_memory_.call(group_.view(), EPX_OP_COMBINE_RANK_MAJOR); }
  void combine_rank_major_bwd() { rank_major_memory_.call(group_.view(), EPX_OP_COMBINE_RANK_MAJOR_BWD); }
  void dispatch_rank_major_bwd() { rank_major_memory_.call(group_.view(), EPX_OP_DISPATCH_RANK_MAJOR_BWD); }
  void rank_major(); // these four, if the layer makes them; in precision exact the first and the third

  // ---- For runs without a check on the host; all are asynchronous but snapshot() ----

  // Holds a copy of the layer's memory, inputs and outputs, on the device.
  class Snapshot;
  struct SnapshotDeleter {
    void operator()(Snapshot* snapshot) const;
  };
  using SnapshotOwner = std::unique_ptr<Snapshot, SnapshotDeleter>;
  SnapshotOwner snapshot() const;
  // Copies the inputs from the snapshot, and fills the outputs with kScribble.
  void restore_inputs(const Snapshot& from);
  // Adds to *count, on the device, the bytes of the outputs that differ from the snapshot's. It leaves out the handle memory,
  // which contains the sequence number of its prepare.
  void count_wrong(const Snapshot& expected, unsigned long long* count) const;

  // Throws CheckFailure unless the outputs are the oracle's. Blocks.
  void check_forward(const Workload& work) const;
  void check_backward(const Workload& work) const;
  void check_rank_major(const Workload& work) const;
  void check_results(const Workload& work) const { // forward and backward
    check_forward(work);
    check_backward(work);
  }

private:
  struct Memory {
    std::byte** tensor = nullptr; // of a LayerMemory, or one of the handles
    size_t bytes = 0;
    bool is_input = false;
    bool is_written_by_peers = false;
    enum { device, group, borrowed } owner = device; // group: from epx_mem_alloc

    std::byte* data() const { return *tensor; }
  };
  void lay_out();
  void allocate_on_device(); // what has no memory yet
  std::vector<std::byte> read(const std::byte* tensor) const;
  const Memory& memory_of(const std::byte* tensor) const;
  NanRule rule_of_rows() const { return layer_.format.is_quantised() ? NanRule::any_nan : NanRule::bits; }
  bool sums_rank_major() const { return group_.shape().precision == EPX_COMBINE_WIRE; }

  GroupRun& group_;
  Device& device_; // outlives the group
  int rank_;
  LayerCase layer_;
  epx_row_format row_format_, sum_format_;
  LayerMemory layer_memory_, rank_major_memory_;
  std::byte *handle_ = nullptr, *rank_major_handle_ = nullptr;
  std::vector<Memory> memories_;
};

} // namespace epx::test
