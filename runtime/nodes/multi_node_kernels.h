// SPDX-License-Identifier: Apache-2.0
// Kernels of a group of several nodes, beside those of its legs: they make the plans of the legs (prepare), and take rows to
// and from the rails. None of them waits for a peer, but for launch_deliver_leg, which is a call of the node; where the call
// has failed, open_legs and hold_rows wait for the host.
//
//   every call begin_call | what follows | end_call
//   prepare    count_routes | all-gather of counts | assign_slots, list_tokens | exchange of tables
//              | check_transfer, list_relayed | deliver_leg for each leg
//   movements  post_records | exchange of records | open_legs | then, for each chunk:
//     scatter  pack_rows | exchange of rows | check_transfer, dispatch or combine_bwd of the legs
//     gather   combine or dispatch_bwd of the legs. Precision node: hold_rows | exchange of rows; wire and exact: forward_rows,
//              and once behind all chunks hold_rows | exchange of rows. sum_rows is last.
#pragma once

#include <vector>

#include <cuda_runtime_api.h>

#include "runtime/layout/multi_node_handle.h"
#include "runtime/layout/rail_layout.h"
#include "runtime/stages/cuda/kernels.h"
#include "runtime/stages/cuda/protocol/device_group.h"
#include "runtime/stages/stages.h"

namespace epx::cuda {

// ---- What travels by rail: see also runtime/layout/rail_layout.h ----

// Rows beside the rails, by node. Rows of a call are rail_row_bytes() apart. What belongs to node m begins at
// rows + m * node_rows * rail_row_bytes(), weights + m * node_weights, sidecars + m * node_tokens * sidecar bytes of the call.
struct RailArea {
  std::byte* rows;
  float* weights;
  std::byte* sidecars;
  int64_t node_rows;
  int64_t node_weights; // floats; in precision exact node_rows
  int64_t node_tokens;  // tokens of a node for whose sidecars there is room

  EPX_HOST_DEVICE std::byte* rows_of(int node, int64_t row_bytes) const { return rows + node * node_rows * row_bytes; }
  EPX_HOST_DEVICE float* weights_of(int node) const { return weights + node * node_weights; }
  EPX_HOST_DEVICE std::byte* sidecars_of(int node, int64_t bytes) const { return sidecars + node * node_tokens * bytes; }
};

// ---- The group in device memory ----

struct MultiNodeState {
  uint64_t sequence; // number of the group's last call that has begun, replays included
  // The header of the call's handle memory; its magic is 0 when this rank takes part without routes. launch_check leaves its
  // copy here, too, from which launch_post_records takes it.
  HandleHeader header;
};

// Two ranks that pass different AgreedFields in a call, the first that this rank has found.
struct Disagreement {
  uint64_t is_known; // 1 once the rest is complete; the device stores it with release order
  uint64_t sequence; // of the call
  int32_t ranks[2];  // ascending
  AgreedFields fields[2];
};

// Host memory that kernels write and the host reads at any time, also while a graph is replayed.
struct MultiNodeProgress {
  static constexpr uint64_t kCalls = 256;
  uint64_t begun; // MultiNodeState::sequence
  uint64_t ended; // the last call of the group that has ended
  Disagreement disagreement;
  int32_t operations[kCalls]; // by sequence % kCalls, stored before `begun`
  uint64_t tokens[kCalls];    // by sequence % kCalls: T of a call that moves rows
  uint64_t first_leg[kCalls]; // by sequence % kCalls: the node's sequence number of the call's first leg
};

struct MultiNodeDevice {
  MultiNodeShape shape;
  uint64_t group_id;
  MultiNodeState* state;
  MultiNodeProgress* progress;   // host memory
  HandleHeader* leg_headers;     // [L]: what MovementCall::checked_header of each leg points to
  int32_t* sent_records;         // [N, record_words]
  int32_t* received_records;     // [N, record_words]; see RailRecords
  const DeviceState* node_state; // of the legs' group
};

// The same as the kernels of one movement see it, which read the handle memory of a layer.
struct MultiNodeCall : MultiNodeDevice {
  MultiNodeHandleLayout layout;
};

// ---- prepare ----

// What prepare counts on this rank, in routes and rows. Its first leg reports bad indices and the overflow from it.
struct MultiNodePrepareTotals {
  unsigned long long bad_indices;
  unsigned long long first_bad_inverted; // ~(t * K + k) of the first bad index, so that atomicMax finds it
  unsigned long long beyond_rails;       // routes of tokens beyond GroupShape::max_rail_tokens()
  int64_t demand, kept, rows_needed;     // as in PrepareCall::info
};

// Buffers of prepare in device memory; the group owns them.
struct MultiNodePrepareBuffers {
  int32_t* block_counts; // [kMaxPrepareBlocks, E]: routes of each block of count_routes; then of the blocks before it
  // [count_words]: routes of this rank to each expert; bad ones and those to no expert are not counted. From assign_slots on,
  // their first slot. Behind them this rank's AgreedFields, and the routes that fixed_rail_tokens leaves no room for.
  int32_t* counts;
  int32_t* all_counts; // [P, count_words]
  MultiNodePrepareTotals* totals;
  int32_t* token_ends;      // [N]: the routes to a node of tokens from this one on are dropped; see max_rail_tokens()
  int32_t* sent_tables;     // [N, table_words]
  int32_t* received_tables; // [N, table_words]
};

struct MultiNodePrepareParams; // multi_node_prepare_params.h: what all kernels of one prepare get

// Counts this rank's routes by expert, of each block and in all, and writes its AgreedFields.
cudaError_t launch_count_routes(const MultiNodePrepareParams& params, cudaStream_t stream);
// Gives this rank's routes their slots, from all ranks' counts, and writes the header, home routes, zones and no_zones, and the
// outputs counts, offsets, info and slot. Reports ranks whose AgreedFields differ (MultiNodeProgress::disagreement).
cudaError_t launch_assign_slots(const MultiNodePrepareParams& params, cudaStream_t stream);
// Lists the tokens that go to each node: sent_tokens, positions, sent_counts, home_back_rows; and makes the tables. Writes the
// output global_counts, too, and slot_origin, if wanted, becomes -1 everywhere.
cudaError_t launch_list_tokens(const MultiNodePrepareParams& params, cudaStream_t stream);
// Writes relay_counts, relay_back_rows and the routes of all legs, from the tables that have come and, for the own node, from
// the home routes.
cudaError_t launch_list_relayed(const MultiNodePrepareParams& params, cudaStream_t stream);
// One call of the node: delivers slot records, slot_origin and first slots of a leg's tokens to the owners of the slots.
// `group` is that of the legs. The first leg's call also reports bad indices and the overflow, as events of prepare or
// prepare_dispatch. The kernel takes at most `num_sms` SMs.
cudaError_t launch_deliver_leg(const DeviceGroup& group, const MultiNodePrepareParams& prepare, int leg, int num_sms,
                               cudaStream_t stream);

// ---- Movements ----

// Begins a call of the group: counts it, and publishes that it has begun.
cudaError_t launch_begin_call(const MultiNodeDevice& nodes, epx_operation operation, cudaStream_t stream);
// EPX_CHECK_HANDLE_MEM, as in kernels.h: launch_seal comes behind the last leg of prepare, and launch_check before
// launch_post_records. They are in checksum.cu.
cudaError_t launch_seal(const MultiNodeDevice& nodes, int top_k, std::byte* handle_mem, cudaStream_t stream);
cudaError_t launch_check(const MultiNodeDevice& nodes, const MovementCall& call, cudaStream_t stream);
// Publishes that the call has ended.
cudaError_t launch_end_call(const MultiNodeDevice& nodes, cudaStream_t stream);
// Checks the header of the handle memory for this call (MovementCall::checked_header), and writes the records that go to the
// rail peers.
cudaError_t launch_post_records(const MultiNodeCall& nodes, const MovementCall& call, const AgreedFields& agreed,
                                cudaStream_t stream);
// Writes the headers of the legs from the records that have come (RailRecords::leg_tokens), and reports a rail peer that has
// another plan, or passes other AgreedFields (MultiNodeProgress::disagreement); in the latter case it waits for the group's end.
// The leg of a rail peer that is not active has no rows (kSendsNoRows). Where this rank takes part without routes, each leg has
// a header with magic 0. `group` is that of the legs. In the event, values[0] is 1: values[3] is a rank of the group and not of
// the node.
cudaError_t launch_open_legs(const DeviceGroup& group, const MultiNodeCall& nodes, const MovementCall& call,
                             bool has_fixed_sizes, cudaStream_t stream);
// Before rows of a gather's legs go home: where a leg has failed, holds them back until the group has ended, since a rail peer
// could not tell that they are wrong.
cudaError_t launch_hold_rows(const DeviceGroup& group, cudaStream_t stream);
// Behind a transfer, before legs relay what it has brought: where the host has aborted it, the legs do nothing.
// launch_open_legs does the same.
cudaError_t launch_check_transfer(const DeviceGroup& group, cudaStream_t stream);

// Copies the rows (and weights [K], and sidecars) of the tokens of a chunk that go to other nodes into `area`, each at the
// token's index among those of its node. Rows with a format are copied or quantised to WireRow there, rail_row_bytes() apart.
// `weights` and `sidecars` may be NULL.
struct PackCall : MovementCall {
  const std::byte* rows; // [T, H]
  FormatTensors format_tensors;
  const float* weights; // [T, K]
  const std::byte* sidecars;
  int64_t sidecar_bytes;
  RailArea area;
  int chunk;
};
cudaError_t launch_pack_rows(const MultiNodeCall& nodes, const PackCall& call, int num_sms, cudaStream_t stream);

// Behind the gather of a leg in the precisions wire and exact: copies what that has staged on this rank to `area`, without
// gaps. wire: a token's partial sums of the ranks of this node, in rank order. exact: its routes' rows in k order, and beside
// them, at area.weights by row, their weights if `row_weights` is not NULL. Where a rank has no partial sum, or a route was
// dropped in this call, the row consists of -0, which changes no sum, and the weight is 0. With a format rows are WireRow, and
// such a row consists of +0.
struct ForwardCall {
  MovementCall call;        // the leg's, with its layout; recv_rows and handle_mem are those of the group's call
  const std::byte* rows;    // [N, H]: this rank's own
  const float* row_weights; // [N]; may be NULL. Applied in the partial sums of wire
  RailArea area;
  int node; // of the leg
  int chunk;
};
cudaError_t launch_forward_rows(const DeviceGroup& group, const MultiNodeCall& nodes, const ForwardCall& call, int num_sms,
                                cudaStream_t stream);

// At home: out[t] is the sum of what has come of the token, from all nodes, in the order that the precision says, rounded
// once. A token of which nothing comes gets zeros. If `weight_grads_out` is not NULL it gets, for each route that was kept, the
// weight that has come at area.weights [N, T', K], by (node, index of the token there, k), and 0 elsewhere.
struct SumCall {
  MovementCall call;
  bool is_weighted; // exact: rows have weights
  RailArea area;    // of the own node, too
  std::byte* out;   // [T, H]
  float* weight_grads_out;
};
cudaError_t launch_sum_rows(const MultiNodeCall& nodes, const SumCall& call, int num_sms, cudaStream_t stream);

// All of these, to be loaded before any is launched.
std::vector<const void*> multi_node_prepare_kernels();
std::vector<const void*> multi_node_row_kernels(); // with the shared memory of movements
std::vector<const void*> multi_node_call_kernels();

} // namespace epx::cuda
