// SPDX-License-Identifier: Apache-2.0
// The host stages run on shared memory: one thread per rank loops over rows and stores them into the peers' windows.
#pragma once

#include "runtime/allocations.h"
#include "runtime/group_context.h"
#include "runtime/layout/handle_limits.h"
#include "runtime/layout/handle_memory.h"
#include "runtime/layout/host_scratch.h"
#include "runtime/layout/slots.h"
#include "runtime/stages/host/call_protocol.h"
#include "runtime/stages/stages.h"
#include "runtime/status_board.h"

namespace epx::host {

class HostStages : public Stages {
public:
  // All arguments must outlive the stages.
  HostStages(const GroupContext& context, PeerWindow window, const Allocations& allocations, CallProtocol& protocol,
             StatusBoard& status);

  void prepare(const PrepareCall& call) override;
  void dispatch(const DispatchCall& call) override;
  void combine(const CombineCall& call) override;
  void combine_bwd(const CombineBwdCall& call) override;
  void dispatch_bwd(const DispatchBwdCall& call) override;

private:
  // A Movement is one movement in progress: its plan, and whether this rank takes part.
  struct Movement {
    HandleReader plan;
    HandleLimits limits; // clamps what the plan says
    bool takes_part;     // false: the handle memory is not this call's; outputs stay untouched
  };

  // prepare.cc
  void count_routes(const PrepareCall& call);
  void publish_counts() const;
  void assign_slots(const PrepareCall& call, HandleWriter& plan, int64_t& dropped);
  void require_sound_counts(const PrepareCall& call);
  void take_slot_records(const PrepareCall& call, HandleWriter& plan);
  void write_zone_tables(const PrepareCall& call, HandleWriter& plan, int64_t* info) const;
  void copy_outputs(const PrepareCall& call, const HandleWriter& plan) const;
  const int32_t* counts_of(int rank) const;

  // host_stages.cc has what both movements share.
  uint64_t checksum_of_body(const std::byte* handle_mem, const HandleHeader& header) const;
  bool is_body_intact(const std::byte* handle_mem, const HandleHeader& header) const; // true where the group does not check
  CallDescriptor make_descriptor(const MovementCall& call, const std::byte* rows, const float* weights) const;
  void find_rows(const MovementCall& call);
  std::byte* registered_address(int rank, const AllocationPlace& place, int64_t rows, int64_t row_bytes);
  Movement begin_movement(const MovementCall& call, CallDescriptor descriptor);
  void report_rows_beyond(const MovementCall& call, const HandleReader& plan, const HandleLimits& limits);
  bool is_active(int rank) const { return scratch_.active[static_cast<size_t>(rank)] != 0; }
  // Returns whether a route takes part in this call: prepare kept it, its rank is active, and its slot is below that rank's N.
  bool is_live(const Route& route, const HandleLimits& limits) const {
    return limits.is_route(route) && is_active(route.rank) && route.slot < protocol_.descriptor_of(route.rank).recv_rows;
  }

  // dispatch.cc
  struct ScatterInput;
  template <typename Receiver>
  void scatter(const MovementCall& call, const ScatterInput& input, CallDescriptor descriptor, const Receiver& receiver);
  void send_rows(const MovementCall& call, const ScatterInput& input, const Movement& movement);
  void send_token(const MovementCall& call, const ScatterInput& input, const Movement& movement, int64_t token);
  template <typename Receiver>
  void receive_rows(const MovementCall& call, const Movement& movement, const Receiver& receiver) const;

  // combine.cc
  struct GatherTensors;
  void gather(const MovementCall& call, const GatherTensors& tensors, const CallDescriptor& descriptor);
  void send_partials_home(const MovementCall& call, const GatherTensors& tensors, const Movement& movement);
  void send_routes_home(const MovementCall& call, const GatherTensors& tensors, const Movement& movement);
  void send_weights_home(const MovementCall& call, const float* weights, const Movement& movement);
  bool all_rows_are_registered(const GatherTensors& tensors) const;
  template <typename AddRows>
  void sum_tokens(const MovementCall& call, const GatherTensors& tensors, bool weighted, const AddRows& add_rows) const;
  void sum_in_place(const MovementCall& call, const GatherTensors& tensors, const Movement& movement) const;
  void sum_at_home(const MovementCall& call, const GatherTensors& tensors, const Movement& movement) const;
  void collect_weights_at_home(const MovementCall& call, const GatherTensors& tensors, const Movement& movement) const;

  int64_t row_bytes(const MovementCall& call) const;

  const GroupContext& context_;
  PeerWindow window_;
  const Allocations& allocations_;
  CallProtocol& protocol_;
  StatusBoard& status_;
  ExpertBlocks experts_;
  Scratch scratch_;
};

} // namespace epx::host
