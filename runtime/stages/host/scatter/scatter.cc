// SPDX-License-Identifier: Apache-2.0
// Scatter moves rows from tokens to slots. dispatch copies them; combine_bwd scales them, and its receiver computes their dot
// products.

#include <array>
#include <cstring>
#include <utility>

#include "runtime/stages/host/host_stages.h"
#include "runtime/stages/host/movement.h"
#include "runtime/stages/host/prepare/prepare.h"
#include "runtime/stages/host/rows/float_environment.h"
#include "runtime/stages/host/rows/row_sender.h"
#include "runtime/stages/host/rows/rows.h"

namespace epx::host {
namespace {

struct ScatterInput {
  TokenRows tokens;
  const float* weights; // [T, K]; may be NULL
};

// A ReceivedRow is a row that has reached its slot's rank.
struct ReceivedRow {
  int64_t slot;
  int64_t index;        // of the row in the receive tensors
  const std::byte* row; // the slot itself where the sender wrote in place
  const std::byte* sidecar;
  float weight; // meaningful when weights travel
};

template <typename Sender>
void send_token(const Movement& movement, Sender& sender, const float* weights, int64_t token) {
  const MovementCall& call = movement.call;
  const GroupContext& context = movement.group.context;
  const ScatterStaging staging(movement.group);
  std::array<int32_t, kMaxTopK> first_slot; // by rank ordinal of the receiver
  uint64_t seen = 0;                        // receivers whose first slot is known, one bit each by rank ordinal
  uint64_t staged = 0;                      // receivers that have the row (and sidecar) in staging
  for (int k = 0; k < call.top_k; ++k) {
    const Route& route = movement.plan.routes[token * call.top_k + k];
    if (!movement.limits.is_route(route)) continue;
    const auto rank_ordinal = static_cast<size_t>(movement.limits.rank_ordinal(route.rank_ordinal));
    const uint64_t bit = uint64_t{1} << rank_ordinal;
    if ((seen & bit) == 0) first_slot[rank_ordinal] = route.slot;
    seen |= bit;
    if (!movement.is_live(route)) continue;

    sender.store_in_place(token, route.rank, route.slot);
    if ((staged & bit) == 0)
      sender.stage(token, route.rank,
                   scatter_staging_row(context.layout, context.shape, context.rank, token, first_slot[rank_ordinal]));
    staged |= bit;
    if (weights != nullptr) staging.weights(route.rank)[route.slot] = weights[token * call.top_k + k];
  }
}

template <typename Format>
void send_rows(const Movement& movement, const ScatterInput& input, Format format) {
  RowSender<Format> sender(movement.group, movement.call, input.tokens, std::move(format));
  for (int64_t token = 0; token < movement.call.num_tokens; ++token)
    send_token(movement, sender, input.weights, token);
}

// Passes each kept slot below N to receiver.store(), or to receiver.zero() with its row where the slot's source rank is not
// active; and each pad below N to receiver.zero() where receiver.clears_pads().
template <typename Receiver>
void receive_rows(const Movement& movement, Receiver receiver) {
  const MovementCall& call = movement.call;
  const GroupContext& context = movement.group.context;
  const HandleReader& plan = movement.plan;
  const RowReceiver<typename Receiver::Format> rows(movement.group, call);
  const float* const weights = ScatterStaging(movement.group).weights(context.rank);
  HandleLimits::Zone zone{};
  for (int index = 0; index < movement.num_zones(); ++index) {
    zone = movement.zone(index, zone.end);
    for (int64_t first_slot = zone.begin; first_slot < zone.end_of_rows; ++first_slot) {
      const SlotRecord& record = plan.slot_records[first_slot];
      if (record.first == 0) continue; // the chain of its token reaches this slot
      if (!movement.limits.has_origin(record)) continue;
      const int64_t staging_row =
          scatter_staging_row(context.layout, context.shape, record.source, record.token, first_slot);
      for (SlotChain chain(movement.limits, plan.slot_records, static_cast<int32_t>(first_slot)); chain.has_slot();
           chain.advance()) {
        const int64_t slot = chain.slot();
        if (slot >= call.recv_rows) continue;
        if (!movement.is_active(record.source)) {
          receiver.zero(slot, movement.row_of_slot(slot));
          continue;
        }
        receiver.store(ReceivedRow{slot, movement.row_of_slot(slot), rows.row(slot, staging_row), rows.sidecar(staging_row),
                                   weights[slot]});
      }
    }
    for (int64_t pad = zone.end_of_rows; receiver.clears_pads() && pad < zone.end && pad < call.recv_rows; ++pad)
      receiver.zero(pad, pad);
  }
}

template <typename Receiver>
void scatter(HostGroup& group, const MovementCall& call, const ScatterInput& input, const CallDescriptor& descriptor,
             const Receiver& receiver) {
  const Movement movement = begin_movement(group, call, descriptor);
  if (movement.takes_part) send_rows(movement, input, typename Receiver::Format(receiver.call));
  group.protocol.complete();
  if (movement.takes_part) receive_rows(movement, receiver);
}

template <typename WireFormat>
struct DispatchReceiver {
  using Format = WireFormat;

  explicit DispatchReceiver(const DispatchCall& dispatch) : call(dispatch), rows(dispatch) {}

  const DispatchCall& call;
  ReceivedRows<Format> rows;

  bool clears_pads() const { return call.clears_pads; }

  void store(const ReceivedRow& received) const {
    rows.store(received.index, received.row, received.sidecar);
    if (call.recv_weights != nullptr) call.recv_weights[received.slot] = received.weight;
  }

  void zero(int64_t slot, int64_t index) const {
    rows.clear(index);
    if (call.recv_weights != nullptr) call.recv_weights[slot] = 0.0f;
  }
};

template <typename WireFormat>
struct CombineBwdReceiver {
  using Format = WireFormat;

  explicit CombineBwdReceiver(const CombineBwdCall& combine_bwd) : call(combine_bwd), format(combine_bwd) {}

  const CombineBwdCall& call;
  Format format;
  int64_t grad_bytes = epx::row_bytes(call.recv_dtype, call.hidden);
  int64_t expert_bytes = call.expert_out != nullptr ? epx::row_bytes(call.expert_dtype, call.hidden) : 0;

  static constexpr bool clears_pads() { return true; }

  void store(const ReceivedRow& received) {
    const int64_t slot = received.slot, index = received.index;
    if (call.grad_recv_weights != nullptr) // the dot product needs the row before it is scaled in place
      call.grad_recv_weights[slot] = format.dot(received.row, call.expert_dtype, call.expert_out + slot * expert_bytes);
    format.store(call.grad_expert_out + index * grad_bytes, index, received.row,
                 call.recv_weights != nullptr ? call.recv_weights + slot : nullptr);
  }

  void zero(int64_t slot, int64_t index) const {
    format.clear(call.grad_expert_out + index * grad_bytes, index);
    if (call.grad_recv_weights != nullptr) call.grad_recv_weights[slot] = 0.0f;
  }
};

CallDescriptor dispatch_descriptor(const HostGroup& group, const DispatchCall& call) {
  return describe(call, place_of(group, call, call.recv_tokens));
}
ScatterInput dispatch_input(const DispatchCall& call) {
  return {{call.tokens, call.sidecar, call.sidecar_bytes}, call.topk_weights};
}

} // namespace

void dispatch(HostGroup& group, const DispatchCall& call) {
  with_row_format(call, [&]<typename Format>(std::type_identity<Format>) {
    scatter(group, call, dispatch_input(call), dispatch_descriptor(group, call), DispatchReceiver<Format>(call));
  });
}

// One call with one entry and one exit barrier: a rank knows its routes' slots once it has the counts of all ranks, so the rows
// travel beside the slot records.
void prepare_dispatch(HostGroup& group, const PrepareDispatchCall& call) {
  PrepareSteps steps(group, call.prepare);
  group.protocol.begin(EPX_OP_PREPARE_DISPATCH);
  steps.publish_counts();
  group.protocol.arrive(describe(call, place_of(group, call.dispatch, call.dispatch.recv_tokens)));
  steps.assign_slots();
  const Movement movement = movement_of_own_plan(group, call.dispatch);
  with_row_format(call.dispatch, [&]<typename Format>(std::type_identity<Format>) {
    send_rows(movement, dispatch_input(call.dispatch), Format(call.dispatch));
    group.protocol.complete();
    steps.deliver();
    report_rows_beyond(movement);
    receive_rows(movement, DispatchReceiver<Format>(call.dispatch));
  });
}

void combine_bwd(HostGroup& group, const CombineBwdCall& call) {
  const DefaultFloatEnvironment environment;
  const ScatterInput input{{call.grad_out, nullptr, 0}, nullptr};
  with_row_format(call, [&]<typename Format>(std::type_identity<Format>) {
    scatter(group, call, input, describe(call, place_of(group, call, call.grad_expert_out)),
            CombineBwdReceiver<Format>(call));
  });
}

} // namespace epx::host
