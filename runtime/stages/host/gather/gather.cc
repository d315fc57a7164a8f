// SPDX-License-Identifier: Apache-2.0
// Gather moves rows from slots to their tokens' home ranks and sums them. combine weighs the rows; dispatch_bwd does not, and
// carries the weights' gradients home.
//
// In precision wire the experts' rank sums its slots of a token and sends one partial row. In precision exact it sends each
// slot's row and weight. A staged row's place depends only on the token and the rank ordinal (wire), or on the route (exact).
// In precision node the partial rows travel as in wire, and the home rank also computes the sum of each node, as the relays of
// a group over several machines would.
//
// With a row format a partial row travels quantised, this rank's own too.
//
// When the rows of all ranks lie in registered memory, nothing is staged: the home rank computes the same sums in the same
// order, and reads the rows where they are. Sums by node, and those that travel quantised, have one step of rounding more than
// that knows, and are staged.

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "runtime/stages/host/gather/row_sums.h"
#include "runtime/stages/host/host_stages.h"
#include "runtime/stages/host/movement.h"
#include "runtime/stages/host/rank_major/rank_major.h"
#include "runtime/stages/host/rows/float_environment.h"
#include "runtime/stages/host/rows/staging.h"

namespace epx::host {
namespace {

struct GatherTensors {
  const std::byte* rows;     // [N, H]
  const float* row_weights;  // [N]; applied in the sum; may be NULL
  const float* weight_grads; // dispatch_bwd: [N], rank-major [P, M, K]; sent home beside the rows; NULL: none
  std::byte* out;            // [T, H]
  float* weight_grads_out;   // [T, K]; NULL iff weight_grads is
};

template <typename Sums>
void send_partials_home(const Movement& movement, const GatherTensors& tensors, Sums policy) {
  const MovementCall& call = movement.call;
  const HandleReader& plan = movement.plan;
  const GatherStaging staging(movement.group);
  const int64_t bytes = row_bytes(call);
  const bool weighted = tensors.row_weights != nullptr;
  RowSums sums(std::move(policy));
  for (int64_t first_slot = 0; first_slot < plan.header->rows_in_use; ++first_slot) {
    const SlotRecord& record = plan.slot_records[first_slot];
    if (record.first == 0 || !movement.limits.has_origin(record) || !movement.is_active(record.source)) continue;
    const int rank_ordinal = movement.limits.rank_ordinal(record.rank_ordinal);
    const int64_t home_row = partial_staging_row(movement.group.context.shape, record.token, call.top_k, rank_ordinal);
    RowSum& partial = sums.next(staging.row(record.source, home_row));
    for (SlotChain chain(movement.limits, plan.slot_records, static_cast<int32_t>(first_slot)); chain.has_slot();
         chain.advance())
      if (const int64_t slot = chain.slot(); slot < call.recv_rows)
        partial.add(tensors.rows + movement.row_of_slot(slot) * bytes, weighted ? tensors.row_weights[slot] : 1.0f);
    if (partial.num_rows > 0) sums.submit_next();
  }
  sums.finish();
}

void send_weights_home(const Movement& movement, const float* weights) {
  const MovementCall& call = movement.call;
  const HandleReader& plan = movement.plan;
  const GatherStaging staging(movement.group);
  const int64_t rows = std::min(call.recv_rows, plan.header->rows_in_use);
  for (int64_t slot = 0; slot < rows; ++slot) {
    const SlotRecord& record = plan.slot_records[slot];
    if (!movement.limits.has_origin(record) || !movement.is_active(record.source)) continue;
    const int64_t route = route_index(record.token, call.top_k, movement.limits.k(record.k));
    staging.weights(record.source)[route] = weights[slot];
  }
}

void send_routes_home(const Movement& movement, const GatherTensors& tensors) {
  const MovementCall& call = movement.call;
  const HandleReader& plan = movement.plan;
  const GatherStaging staging(movement.group);
  const int64_t bytes = row_bytes(call);
  const int64_t rows = std::min(call.recv_rows, plan.header->rows_in_use);
  for (int64_t slot = 0; slot < rows; ++slot) {
    const SlotRecord& record = plan.slot_records[slot];
    if (!movement.limits.has_origin(record) || !movement.is_active(record.source)) continue;
    const int64_t home_row = route_index(record.token, call.top_k, movement.limits.k(record.k));
    std::memcpy(staging.row(record.source, home_row), tensors.rows + slot * bytes, static_cast<size_t>(bytes));
  }
  if (tensors.row_weights != nullptr) send_weights_home(movement, tensors.row_weights);
}

// Calls add_rows(sum, token) for each token, and computes the sums of the rows that it adds.
template <typename Sums, typename AddRows>
void sum_tokens(const MovementCall& call, const GatherTensors& tensors, Sums policy, const AddRows& add_rows) {
  const int64_t bytes = row_bytes(call);
  RowSums sums(std::move(policy));
  for (int64_t token = 0; token < call.num_tokens; ++token) {
    add_rows(sums.next(tensors.out + token * bytes), token);
    sums.submit_next();
  }
  sums.finish();
}

// Sums the partial rows, or the routes' rows, that the peers have staged here.
template <typename Sums>
void sum_at_home(const Movement& movement, const GatherTensors& tensors, Sums policy) {
  const MovementCall& call = movement.call;
  const GroupShape& shape = movement.group.context.shape;
  const GatherStaging staging(movement.group);
  const int home = movement.group.window.rank;
  const bool exact = shape.precision == EPX_COMBINE_EXACT;
  const bool by_node = shape.sums_by_node();
  const float* const staged_weights = staging.weights(home);
  std::array<int, kMaxTopK> nodes{}; // by rank ordinal of the token
  sum_tokens(call, tensors, std::move(policy), [&](RowSum& sum, int64_t token) {
    const Route* routes = movement.plan.routes + token * call.top_k;
    uint64_t partials = 0; // one bit for each rank that sent one, by rank ordinal, which ascends with the rank
    for (int k = 0; k < call.top_k; ++k) {
      if (!movement.is_live(routes[k])) continue;
      const int64_t index = route_index(token, call.top_k, k);
      if (exact) sum.add(staging.row(home, index), staged_weights[index]);
      const int rank_ordinal = movement.limits.rank_ordinal(routes[k].rank_ordinal);
      partials |= uint64_t{1} << rank_ordinal;
      nodes[static_cast<size_t>(rank_ordinal)] = shape.node_of(routes[k].rank);
    }
    if (exact) return;
    int node = -1;
    for (; partials != 0; partials &= partials - 1) {
      const int rank_ordinal = __builtin_ctzll(partials);
      if (by_node && nodes[static_cast<size_t>(rank_ordinal)] != node) sum.end_group(); // the node before, if there was one
      node = nodes[static_cast<size_t>(rank_ordinal)];
      sum.add(staging.row(home, partial_staging_row(shape, token, call.top_k, rank_ordinal)), 1.0f);
    }
    if (by_node) sum.end_group();
  });
}

// Returns whether the rows of all ranks, and their weights, lie in registered memory, where every rank can read them.
bool all_rows_are_registered(const HostGroup& group, const GatherTensors& tensors) {
  const auto are_registered = [&](const CallDescriptor& descriptor) {
    return descriptor.recv_rows == 0 ||
           (descriptor.rows_allocation >= 0 && (tensors.row_weights == nullptr || descriptor.weights_allocation >= 0));
  };
  for (int rank = 0; rank < group.window.num_ranks; ++rank)
    if (!are_registered(group.protocol.descriptor_of(rank))) return false;
  return true;
}

// Computes the same sums in the same order without staging, from the rows where they lie on their ranks.
void sum_in_place(const Movement& movement, const GatherTensors& tensors) {
  const MovementCall& call = movement.call;
  const bool exact = movement.group.context.shape.precision == EPX_COMBINE_EXACT;
  const bool weighted = tensors.row_weights != nullptr;
  const int64_t bytes = row_bytes(call);
  sum_tokens(call, tensors, PlainSums(call, weighted), [&](RowSum& sum, int64_t token) {
    const Route* routes = movement.plan.routes + token * call.top_k;
    const auto add = [&](const Route& route) {
      sum.add(movement.rows_of(route.rank) + call.row_of_slot(route.slot) * bytes,
              weighted ? movement.weights_of(route.rank)[route.slot] : 1.0f);
    };
    uint64_t partials = 0; // one bit for each rank that has rows, by rank ordinal, which ascends with the rank
    for (int k = 0; k < call.top_k; ++k) {
      if (!movement.is_live(routes[k])) continue;
      if (exact) add(routes[k]);
      partials |= uint64_t{1} << movement.limits.rank_ordinal(routes[k].rank_ordinal);
    }
    if (exact) return;
    for (; partials != 0; partials &= partials - 1) {
      const int rank_ordinal = __builtin_ctzll(partials);
      for (int k = 0; k < call.top_k; ++k)
        if (movement.is_live(routes[k]) && movement.limits.rank_ordinal(routes[k].rank_ordinal) == rank_ordinal)
          add(routes[k]);
      sum.end_group();
    }
  });
}

void collect_weights_at_home(const Movement& movement, const GatherTensors& tensors) {
  const MovementCall& call = movement.call;
  const float* const staged = GatherStaging(movement.group).weights(movement.group.window.rank);
  for (int64_t route = 0; route < call.num_tokens * call.top_k; ++route)
    tensors.weight_grads_out[route] = movement.is_live(movement.plan.routes[route]) ? staged[route] : 0.0f;
}

void gather(HostGroup& group, const MovementCall& call, const GatherTensors& tensors, const CallDescriptor& descriptor) {
  const DefaultFloatEnvironment environment;
  const Movement movement = begin_movement(group, call, descriptor);
  const bool is_quantised = call.format.is_quantised();
  const bool weighted = tensors.row_weights != nullptr;
  const bool exact = group.context.shape.precision == EPX_COMBINE_EXACT;
  const bool is_in_place =
      !is_quantised && !group.context.shape.sums_by_node() && all_rows_are_registered(group, tensors); // on all ranks alike
  if (movement.takes_part) {
    if (is_in_place)
      sum_in_place(movement, tensors);
    else if (exact)
      send_routes_home(movement, tensors);
    else if (is_quantised)
      send_partials_home(movement, tensors, SumsToWire(call, weighted));
    else
      send_partials_home(movement, tensors, PlainSums(call, weighted));
    if (tensors.weight_grads != nullptr && call.is_rank_major())
      send_rank_major_weights_home(movement, tensors.weight_grads);
    else if (tensors.weight_grads != nullptr)
      send_weights_home(movement, tensors.weight_grads);
  }
  group.protocol.complete(); // after it all staged rows are here, and all rows that are read in place have been read
  if (!movement.takes_part) return;
  if (is_quantised)
    sum_at_home(movement, tensors, SumsOfWire(call));
  else if (!is_in_place)
    sum_at_home(movement, tensors, PlainSums(call, exact && weighted));
  if (tensors.weight_grads_out != nullptr && call.is_rank_major())
    collect_rank_major_weights(movement, tensors.weight_grads_out);
  else if (tensors.weight_grads_out != nullptr)
    collect_weights_at_home(movement, tensors);
}

} // namespace

void combine(HostGroup& group, const CombineCall& call) {
  const int64_t weight_bytes = call.recv_rows * static_cast<int64_t>(sizeof(float));
  const AllocationPlace weights =
      group.allocations.locate(reinterpret_cast<const std::byte*>(call.recv_weights), weight_bytes);
  gather(group, call, {call.expert_out, call.recv_weights, nullptr, call.out, nullptr},
         describe(call, place_of(group, call, call.expert_out), weights));
}

void dispatch_bwd(HostGroup& group, const DispatchBwdCall& call) {
  gather(group, call, {call.grad_recv, nullptr, call.grad_recv_weights, call.grad_tokens, call.grad_topk_weights},
         describe(call, place_of(group, call, call.grad_recv)));
}

} // namespace epx::host
