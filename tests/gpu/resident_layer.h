// SPDX-License-Identifier: Apache-2.0
// A ResidentLayer is one layer in flight whose tensors keep their addresses from call to call, so that calls can be captured in
// a graph, and run back to back without a check in between.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "tests/support/group_run.h"
#include "tests/support/workload.h"

namespace epx::test {

// It passes all optional tensors. The case must have TokenCount::full, RecvRows::capacity and no sidecars: shapes never change.
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
  void set_stream(epx_stream stream) { stream_ = stream; }

  // These are asynchronous on the stream.
  void prepare();
  void dispatch();
  void prepare_dispatch(); // what the two before do
  void combine();
  void forward();  // the three above
  void backward(); // the two below
  void combine_bwd();
  void dispatch_bwd();
  void dispatch_rank_major();
  void combine_rank_major();
  void combine_rank_major_bwd();
  void dispatch_rank_major_bwd();
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

private:
  struct Memory {
    std::byte* data = nullptr;
    size_t bytes = 0;
    bool is_input = false;
    enum { device, group, borrowed } owner = device; // group: from epx_mem_alloc
  };
  void lay_out();
  void allocate_on_device();
  epx_tensor rows(size_t memory, int64_t count) const;
  epx_tensor floats(size_t memory, int64_t count, int64_t per_row) const;
  std::vector<std::byte> read(size_t memory) const;
  template <typename Args>
  Args make_args() const;
  template <typename Args>
  Args make_rank_major_args() const;
  epx_tensor rank_major_rows(size_t memory) const;
  epx_tensor rank_major_routes(size_t memory, epx_dtype dtype) const;
  bool sums_rank_major() const { return group_.shape().precision == EPX_COMBINE_WIRE; }

  enum : size_t {
    kTopkIdx,
    kTokens,
    kTopkWeights,
    kExpertOut,
    kCombineWeights,
    kGradOut,
    kBwdExpertOut,
    kBwdWeights,
    kGradRecv,
    kGradRecvWeightsIn,
    kRowTokens,
    kRowTopkWeights,
    kRowGradOut,
    kRowExpertOut,
    kGradRowsIn,
    kGradRowWeightsIn,
    kHandle,
    kCounts,
    kOffsets,
    kRecvTokens,
    kRecvWeights,
    kOut,
    kGradExpertOut,
    kGradRecvWeights,
    kGradTokens,
    kGradTopkWeights,
    kRowHandle,
    kRecvRows,
    kRecvRowIdx,
    kRecvRowWeights,
    kSourceCounts,
    kRowOut,
    kGradRows,
    kRowGradTokens,
    kRowGradTopkWeights,
    kNumMemories
  };

  GroupRun& group_;
  Device& device_; // outlives the group
  int rank_;
  LayerCase layer_;
  epx_layer epx_layer_;
  int64_t num_tokens_;
  int64_t recv_rows_;
  int64_t rows_per_source_; // M
  epx_stream stream_;
  std::vector<Memory> memories_;
};

} // namespace epx::test
