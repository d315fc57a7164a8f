// SPDX-License-Identifier: Apache-2.0
#include "runtime/nodes/multi_node_backend.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "base/cuda.h"
#include "base/error.h"
#include "base/keep_until_exit.h"
#include "base/log.h"
#include "base/names.h"
#include "base/stream_order.h"
#include "runtime/layout/rail_layout.h"
#include "runtime/nodes/multi_node_kernels.h"
#include "runtime/nodes/multi_node_prepare_params.h"
#include "runtime/nodes/multi_node_watch.h"
#include "runtime/nodes/rail_buffers.h"
#include "runtime/nodes/rail_sizes.h"
#include "runtime/stages/call_descriptor.h"
#include "runtime/stages/cuda/cuda_backend.h"
#include "transport/interrupt.h"
#include "transport/node_exchange.h"
#include "transport/rails_exchange.h"

namespace epx::cuda {
namespace {

// The context of this rank's node, in which each leg is a call.
GroupContext make_node_context(const GroupContext& group, const MultiNodeShape& shape) {
  return {.transport = group.transport,
          .shape = shape.node,
          .layout = group.layout,
          .group_id = group.group_id,
          .rank = shape.index_in_node(),
          .overflow = group.overflow,
          .timeout_ms = node_timeout_ms(group.timeout_ms),
          .checks_handle_mem = false, // which is the group's; see make_plan and open_legs
          .has_ordered_calls = true,
          .forwards_staged_rows = shape.group.precision != EPX_COMBINE_NODE,
          .window_access = group.window_access};
}

// The transport of this rank's node in a group of several: what its ranks agree on later on, all ranks of the group do.
class LegTransport final : public Transport {
public:
  LegTransport(std::unique_ptr<Transport> node, Rails& rails, const GroupContext& group)
      : node_(std::move(node)), all_(rails, group.rank, group.shape.num_ranks, host_exchange_timeout(group.timeout_ms)),
        exchange_(all_, group.rank, group.shape.ranks_per_node) {}

  WindowAccess window_access() const override { return node_->window_access(); }
  Exchange* exchange() override { return &exchange_; }
  std::unique_ptr<Window> open_window(int64_t bytes, Exchange& exchange) override {
    return node_->open_window(bytes, exchange);
  }
  std::unique_ptr<Window> adopt_window(std::byte* memory, int64_t bytes, Exchange& exchange) override {
    return node_->adopt_window(memory, bytes, exchange);
  }

private:
  std::unique_ptr<Transport> node_;
  RailsExchange all_;
  NodeExchange exchange_;
};

// Refuses the operations that are not made of legs. Of the rank-major calls the check of the arguments has done so before, with a
// reason.
class RefusedStages : public Stages {
#define EPX_STAGE(NUMBER, name, first_bytes, Call, stage)                                                                  \
  void stage(const Call&) override {                                                                                       \
    fail(EPX_ERROR_UNSUPPORTED, "epx_" #stage ": rows of this operation do not travel between nodes");                     \
  }
  EPX_STAGES(EPX_STAGE)
#undef EPX_STAGE
};

class MultiNodeBackend final : public Backend, private RefusedStages {
public:
  MultiNodeBackend(const MultiNodeShape& shape, const GroupContext& context,
                   std::unique_ptr<const GroupContext> node_context, std::unique_ptr<LegBackend> node,
                   std::unique_ptr<Rails> rails, int rail_ctas, std::unique_ptr<ControlConnection> control)
      : shape_(shape), context_(context), rail_ctas_(rail_ctas), buffers_(shape), node_context_(std::move(node_context)),
        rails_(std::move(rails)), node_(std::move(node)),
        chunk_events_(static_cast<size_t>(shape.num_chunks())), nodes_{shape,
                                                                       context.group_id,
                                                                       buffers_.state.get(),
                                                                       buffers_.progress.get(),
                                                                       buffers_.leg_headers.get(),
                                                                       buffers_.sent_records.get(),
                                                                       buffers_.received_records.get(),
                                                                       node_->device_group().state} {
    check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
    watch_ = std::make_unique<MultiNodeWatch>(context_, shape_, *node_, *rails_, std::move(control), *buffers_.progress);
  }
  ~MultiNodeBackend() override {
    const bool is_idle = watch_->finish(device_);
    watch_.reset();
    if (is_idle) return;
    log::group().warn("group {:016x} is destroyed while its GPU is busy with other work: its memory there is not freed",
                      context_.group_id);
    keep_device_resources();
  }

  int num_comm_sms() const override { return num_leg_sms() + rail_ctas_; }
  Stages& stages() override { return *this; }

  // Peers of other nodes never access this memory.
  void* allocate(int64_t bytes) override {
    watch_->require_healthy(EPX_OP_MEM_ALLOC);
    void* memory = nullptr;
    agree(EPX_OP_MEM_ALLOC, 2, [&] { memory = node_->allocate(bytes); });
    return memory;
  }
  void register_memory(std::byte* memory, int64_t bytes) override {
    watch_->require_healthy(EPX_OP_MEM_ALLOC);
    agree(EPX_OP_MEM_ALLOC, 2, [&] { node_->register_memory(memory, bytes); });
  }
  void free(void* data) override {
    agree(EPX_OP_MEM_FREE, 1, [&] { node_->free(data); });
  }
  std::vector<GroupRecord> all_gather(const GroupRecord& mine, int64_t bytes) override {
    watch_->require_healthy(EPX_OP_ALL_GATHER);
    std::vector<GroupRecord> records;
    agree(EPX_OP_ALL_GATHER, 2, [&] { records = node_->all_gather(mine, bytes); }); // of all nodes: see LegTransport
    return records;
  }

  void abort() override { watch_->abort(); }
  epx_group_report report() override { return watch_->report(); }

private:
  int num_leg_sms() const { return node_->num_comm_sms(); }

  // The arguments of a leg, except for its tensors of tokens.
  template <typename Call>
  struct LegCall {
    LegCall(const MultiNodeBackend& backend, const MultiNodeCall& nodes, const Call& whole, int leg_node, int chunk,
            int64_t tokens)
        : call(whole), node(leg_node), first_token(backend.first_token(chunk)),
          layout(leg_layout(nodes.layout, backend.shape_, whole.top_k, backend.shape_.leg(node, chunk))) {
      call.num_tokens = tokens;
      call.reports_events = node == backend.shape_.own_node && chunk == 0; // leg(own_node, 0), which also clears pads
      call.layout = &layout;
      call.checked_header = reinterpret_cast<const std::byte*>(nodes.leg_headers + backend.shape_.leg(node, chunk));
    }
    LegCall(const LegCall&) = delete; // call.layout points into it
    LegCall& operator=(const LegCall&) = delete;

    Call call;
    int node;
    int64_t first_token; // of the chunk
    HandleLayout layout;
  };

  void prepare(const PrepareCall& call) override {
    make_call(EPX_OP_PREPARE, call.stream, [&](cudaStream_t stream, bool) { make_plan(call, EPX_OP_PREPARE, stream); });
  }
  void dispatch(const DispatchCall& call) override {
    make_call(call.operation, call.stream,
              [&](cudaStream_t stream, bool has_fixed_sizes) { scatter(call, stream, has_fixed_sizes); });
  }
  void prepare_dispatch(const PrepareDispatchCall& call) override {
    make_call(EPX_OP_PREPARE_DISPATCH, call.prepare.stream, [&](cudaStream_t stream, bool has_fixed_sizes) {
      make_plan(call.prepare, EPX_OP_PREPARE_DISPATCH, stream);
      scatter(call.dispatch, stream, has_fixed_sizes);
    });
  }
  void combine(const CombineCall& call) override {
    make_call(call.operation, call.stream, [&](cudaStream_t stream, bool has_fixed_sizes) {
      gather(call, call.expert_out, call.recv_weights, call.out, nullptr, stream, has_fixed_sizes);
    });
  }
  void combine_bwd(const CombineBwdCall& call) override {
    make_call(call.operation, call.stream,
              [&](cudaStream_t stream, bool has_fixed_sizes) { scatter(call, stream, has_fixed_sizes); });
  }
  void dispatch_bwd(const DispatchBwdCall& call) override {
    make_call(call.operation, call.stream, [&](cudaStream_t stream, bool has_fixed_sizes) {
      gather(call, call.grad_recv, nullptr, call.grad_tokens, call.grad_topk_weights, stream, has_fixed_sizes);
    });
  }

  // Makes a call of the group: `body` launches all of it on the stream. When it fails the group ends, because the peers may
  // have the part of the call that this rank lacks.
  template <typename Body>
  void make_call(epx_operation operation, epx_stream of_call, const Body& body) {
    watch_->require_healthy(operation);
    const auto stream = static_cast<cudaStream_t>(of_call);
    const CudaDeviceScope scope(device_);
    const Capture capture = capture_of(stream);
    if (capture != Capture::none) order_.saw_capture();
    const bool is_ordered = capture == Capture::none && order_.wait_for_last(stream);
    if (capture != Capture::active && !is_ordered)
      order_.refuse_beside_capture(name_of(operation), "the group's", capture); // the call can be made again
    // A stream that is part of a capture takes no eager call until that ends, and there may be several captures at a time: so
    // the rails of a captured call are on its own stream.
    rails_on_ = capture == Capture::active ? stream : rail_stream_.get();
    try {
      check_cuda(launch_begin_call(nodes_, operation, stream), name_of(operation));
      body(stream, capture == Capture::active || shape_.group.fixed_rail_tokens > 0);
      check_cuda(launch_end_call(nodes_, stream), name_of(operation));
    } catch (const BrokenRailError& error) {
      watch_->end_call(operation, error);
    } catch (const StatusError& error) {
      if (capture == Capture::active && !watch_->has_ended()) throw; // nothing has run
      watch_->end_call(operation, error);
    } catch (const std::exception& error) {
      watch_->end_call(operation, StatusError(EPX_ERROR_SYSTEM, error.what()));
    }
    if (capture == Capture::none) order_.launched(stream);
  }

  // Runs `body`, which exchanges records of all ranks, as a call that counts as `num_calls` calls, as many as in a group of one
  // node. Where the rails have broken or ended in it, so has the group; and it ends where ranks free different memory.
  template <typename Body>
  void agree(epx_operation operation, uint64_t num_calls, const Body& body) {
    const CudaDeviceScope scope(device_);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); // the calls before this one come to their end first
    HostCall call(*watch_, operation);
    try {
      body();
    } catch (const BrokenRailError& error) {
      watch_->end_call(operation, error);
    } catch (const StatusError& error) {
      const bool is_refused = error.status() == EPX_ERROR_INVALID_ARGUMENT;
      const bool ends_group = watch_->has_ended() || error.status() == EPX_ERROR_OUT_OF_SEQUENCE ||
                              (error.status() == EPX_ERROR_ABORTED && is_interrupted());
      if (ends_group && !is_refused) watch_->end_call(operation, error);
      throw;
    }
    call.num_calls = num_calls;
    count_calls(num_calls);
  }

  // While it lives, this rank is in a call that has no kernel.
  struct HostCall {
    HostCall(MultiNodeWatch& of_group, epx_operation operation) : watch(of_group) { watch.begin_host_call(operation); }
    ~HostCall() { watch.end_host_call(num_calls); }
    HostCall(const HostCall&) = delete;
    HostCall& operator=(const HostCall&) = delete;

    MultiNodeWatch& watch;
    uint64_t num_calls = 0; // where it has succeeded
  };

  // Counts calls that have no kernel, while no kernel of the group is running.
  void count_calls(uint64_t calls) {
    MultiNodeState state{};
    check_cuda(cudaMemcpy(&state, nodes_.state, sizeof(state), cudaMemcpyDeviceToHost), "cudaMemcpy");
    state.sequence += calls;
    check_cuda(cudaMemcpy(nodes_.state, &state, sizeof(state), cudaMemcpyHostToDevice), "cudaMemcpy");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); // a copy from pageable memory may still be under way
  }

  // ---- prepare ----

  void make_plan(const PrepareCall& call, epx_operation operation, cudaStream_t stream) {
    const MultiNodePrepareBuffers buffers = buffers_.prepare();
    const MultiNodePrepareParams params = make_multi_node_prepare_params(nodes_, buffers, call, operation);
    check_cuda(launch_count_routes(params, stream), "prepare");
    fork_rail_stream(stream);
    rails_->all_gather(buffers.counts, buffers.all_counts,
                       count_words(shape_.group) * static_cast<int64_t>(sizeof(*buffers.counts)), rails_on_);
    join_rail_stream(stream);
    check_cuda(launch_assign_slots(params, stream), "prepare");
    check_cuda(launch_list_tokens(params, stream), "prepare");
    exchange_words(buffers.sent_tables, buffers.received_tables, table_words(shape_), stream);
    check_cuda(launch_check_transfer(node_->device_group(), stream), "prepare");
    check_cuda(launch_list_relayed(params, stream), "prepare");
    const auto deliver = [&](int node, int chunk) {
      node_->make_call(operation, stream, [&](const DeviceGroup& group, cudaStream_t on) {
        return launch_deliver_leg(group, params, shape_.leg(node, chunk), num_leg_sms(), on);
      });
    };
    for_each_chunk([&](int chunk) { deliver(shape_.own_node, chunk); });
    for_each_chunk([&](int chunk) { for_each_other_node([&](int node) { deliver(node, chunk); }); });
    if (context_.checks_handle_mem) check_cuda(launch_seal(nodes_, call.top_k, call.handle_mem, stream), "prepare");
  }

  // ---- Movements ----

  struct OpenLegs {
    MultiNodeCall nodes;
    RailSizes sizes; // of the transfers that follow
  };
  // Tells the rail peers how many tokens this rank has for them. Where sizes are exact, the host waits for the peers' here.
  template <typename Call> // a movement
  OpenLegs open_legs(const Call& call, cudaStream_t stream, bool has_fixed_sizes) {
    const char* const name = name_of(call.operation);
    const MultiNodeCall nodes{nodes_, make_multi_node_handle_layout(shape_, call.top_k)};
    MovementCall posted = call;
    if (context_.checks_handle_mem) {
      check_cuda(launch_check(nodes_, call, stream), "the check of the handle memory");
      posted.checked_header = reinterpret_cast<const std::byte*>(&nodes_.state->header);
    }
    const AgreedFields agreed = agreed_fields(describe(call, kNotRegistered), has_fixed_sizes);
    check_cuda(launch_post_records(nodes, posted, agreed, stream), name);
    exchange_words(nodes_.sent_records, nodes_.received_records, record_words(shape_), stream);
    check_cuda(launch_open_legs(node_->device_group(), nodes, call, has_fixed_sizes, stream), name);
    if (has_fixed_sizes) return {nodes, {shape_, call.top_k}};
    const int64_t words = shape_.num_nodes() * record_words(shape_);
    int32_t* const sent = buffers_.records_on_host.get();
    int32_t* const received = sent + words;
    const auto copy = [&](int32_t* to, const int32_t* from) {
      check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(words) * sizeof(*to), cudaMemcpyDeviceToHost, stream), name);
    };
    copy(sent, nodes_.sent_records);
    copy(received, nodes_.received_records);
    watch_->wait_for(stream, call.operation); // the one wait of the host in a call; throws what disagrees, too
    return {nodes, {shape_, call.top_k, sent, received}};
  }

  // Rows go from tokens to slots. Rows to the other nodes are on the wire while legs before them store what has come.
  template <typename Call> // DispatchCall or CombineBwdCall
  void scatter(const Call& call, cudaStream_t stream, bool has_fixed_sizes) {
    const OpenLegs legs = open_legs(call, stream, has_fixed_sizes);
    const MultiNodeCall& nodes = legs.nodes;
    const RailSizes& sizes = legs.sizes;
    const RailArea& sent = buffers_.to_rails.area();
    const RailArea& received = buffers_.from_rails.area();
    fork_rail_stream(stream);
    for_each_chunk([&](int chunk) {
      const PackCall pack = pack_call(call, sent, chunk);
      check_cuda(launch_pack_rows(nodes, pack, num_leg_sms(), rails_on_), name_of(call.operation));
      exchange_rows(rail_row_bytes(call), pack.sidecar_bytes, [&](int node) {
        const RailRange tokens{first_token(chunk), sizes.home_tokens(node, chunk), sizes.relay_tokens(node, chunk)};
        return RowsOfNode{tokens, tokens.times(pack.weights != nullptr ? call.top_k : 0)};
      });
      record(chunk_event(chunk), rails_on_);
    });
    for_each_chunk([&](int chunk) { scatter_leg(nodes, call, shape_.own_node, chunk, own_tokens(call, chunk), received); });
    for_each_chunk([&](int chunk) {
      wait(stream, chunk_event(chunk));
      check_cuda(launch_check_transfer(node_->device_group(), stream), name_of(call.operation));
      for_each_other_node(
          [&](int node) { scatter_leg(nodes, call, node, chunk, sizes.leg_tokens(node, chunk), received); });
    });
    join_rail_stream(stream);
  }

  static PackCall pack_call(const DispatchCall& call, const RailArea& area, int chunk) {
    return {call, call.tokens, call.format_tensors, call.topk_weights, call.sidecar, call.sidecar_bytes, area, chunk};
  }
  static PackCall pack_call(const CombineBwdCall& call, const RailArea& area, int chunk) {
    return {call, call.grad_out, call.format_tensors, nullptr, nullptr, 0, area, chunk};
  }

  void scatter_leg(const MultiNodeCall& nodes, const DispatchCall& call, int node, int chunk, int64_t tokens,
                   const RailArea& received) {
    const bool is_own = node == shape_.own_node;
    LegCall<DispatchCall> leg(*this, nodes, call, node, chunk, tokens);
    leg.call.clears_pads = call.clears_pads && leg.call.reports_events;
    leg.call.tokens = rows_of_leg(leg, call.tokens, received);
    if (const int64_t bytes = call.sidecar_bytes; bytes > 0)
      leg.call.sidecar = (is_own ? call.sidecar : received.sidecars_of(node, bytes)) + leg.first_token * bytes;
    if (call.topk_weights != nullptr)
      leg.call.topk_weights = (is_own ? call.topk_weights : received.weights_of(node)) + leg.first_token * call.top_k;
    node_->stages().dispatch(leg.call);
  }
  void scatter_leg(const MultiNodeCall& nodes, const CombineBwdCall& call, int node, int chunk, int64_t tokens,
                   const RailArea& received) {
    LegCall<CombineBwdCall> leg(*this, nodes, call, node, chunk, tokens);
    leg.call.grad_out = rows_of_leg(leg, call.grad_out, received);
    node_->stages().combine_bwd(leg.call);
  }
  // Returns the rows that a leg of a scatter is given, and sets what a format has beside them. `own` are those of the call. What
  // has come by rail has been quantised on its way.
  template <typename Call>
  const std::byte* rows_of_leg(LegCall<Call>& leg, const std::byte* own, const RailArea& received) const {
    FormatTensors& tensors = leg.call.format_tensors;
    if (leg.node != shape_.own_node) {
      tensors.come_on_wire = leg.call.format.is_quantised();
      tensors.scales = nullptr;
      tensors.row_scales = tensors.encode_scale = nullptr;
      const int64_t bytes = rail_row_bytes(leg.call);
      return received.rows_of(leg.node, bytes) + leg.first_token * bytes;
    }
    if (tensors.scales != nullptr) tensors.scales += leg.first_token * leg.call.format.scale_bytes(leg.call.hidden);
    if (tensors.row_scales != nullptr) tensors.row_scales += leg.first_token;
    return own + leg.first_token * row_bytes(leg.call.dtype, leg.call.hidden);
  }

  // Rows go from slots to tokens. A leg leaves what goes home in `sent`, and that of the own node in `received`.
  template <typename Call> // CombineCall or DispatchBwdCall
  void gather(const Call& call, const std::byte* rows, const float* row_weights, std::byte* out, float* weight_grads_out,
              cudaStream_t stream, bool has_fixed_sizes) {
    const OpenLegs legs = open_legs(call, stream, has_fixed_sizes);
    const MultiNodeCall& nodes = legs.nodes;
    const RailSizes& sizes = legs.sizes;
    const RailArea& sent = buffers_.to_rails.area();
    const RailArea& received = buffers_.from_rails.area();
    const bool sums_by_node = shape_.group.precision == EPX_COMBINE_NODE;
    const auto make_leg = [&](int node, int chunk, int64_t tokens, const RailArea& area) {
      LegCall<Call> leg(*this, nodes, call, node, chunk, tokens);
      gather_leg(leg, area);
      if (!sums_by_node)
        check_cuda(launch_forward_rows(node_->device_group(), nodes, {leg.call, rows, row_weights, area, node, chunk},
                                       num_leg_sms(), stream),
                   name_of(call.operation));
    };
    fork_rail_stream(stream);
    for_each_chunk([&](int chunk) {
      for_each_other_node([&](int node) { make_leg(node, chunk, sizes.leg_tokens(node, chunk), sent); });
      record(chunk_event(chunk), stream);
      wait(rails_on_, chunk_event(chunk));
      if (sums_by_node) send_partials_home(call, sizes, weight_grads_out != nullptr, chunk);
    });
    if (!sums_by_node) send_rows_home(call, sizes, row_weights != nullptr, weight_grads_out != nullptr);
    for_each_chunk([&](int chunk) { make_leg(shape_.own_node, chunk, own_tokens(call, chunk), received); });
    join_rail_stream(stream);
    const bool is_weighted = row_weights != nullptr && shape_.group.precision == EPX_COMBINE_EXACT;
    check_cuda(launch_sum_rows(nodes, {call, is_weighted, received, out, weight_grads_out}, num_leg_sms(), stream),
               name_of(call.operation));
  }

  // Makes the leg's call; its sums are what goes home, unless the precision sends other rows.
  void gather_leg(LegCall<CombineCall>& leg, const RailArea& area) {
    leg.call.out = sums_of_leg(leg, area);
    node_->stages().combine(leg.call);
  }
  void gather_leg(LegCall<DispatchBwdCall>& leg, const RailArea& area) {
    leg.call.grad_tokens = sums_of_leg(leg, area);
    if (leg.call.grad_topk_weights != nullptr)
      leg.call.grad_topk_weights = area.weights_of(leg.node) + leg.first_token * leg.call.top_k;
    node_->stages().dispatch_bwd(leg.call);
  }
  template <typename Leg>
  std::byte* sums_of_leg(const Leg& leg, const RailArea& area) const {
    if (shape_.group.precision != EPX_COMBINE_NODE) return nullptr;
    const int64_t row_bytes = rail_row_bytes(leg.call);
    return area.rows_of(leg.node, row_bytes) + leg.first_token * row_bytes;
  }

  // Precision node: the partials of a chunk's tokens.
  void send_partials_home(const MovementCall& call, const RailSizes& sizes, bool carries_weights, int chunk) {
    hold_failed_rows(call.operation);
    exchange_rows(rail_row_bytes(call), 0, [&](int node) {
      const RailRange tokens{first_token(chunk), sizes.relay_tokens(node, chunk), sizes.home_tokens(node, chunk)};
      return RowsOfNode{tokens, tokens.times(carries_weights ? call.top_k : 0)};
    });
  }
  // Precisions wire and exact: all rows, without gaps.
  void send_rows_home(const MovementCall& call, const RailSizes& sizes, bool has_weights, bool carries_weights) {
    hold_failed_rows(call.operation);
    const bool has_row_weights = has_weights && shape_.group.precision == EPX_COMBINE_EXACT;
    exchange_rows(rail_row_bytes(call), 0, [&](int node) {
      const RailRange rows{0, sizes.relay_rows(node), sizes.home_rows(node)};
      const RailRange tokens{0, sizes.relay_tokens(node), sizes.home_tokens(node)};
      return RowsOfNode{rows, has_row_weights ? rows : tokens.times(carries_weights ? call.top_k : 0)};
    });
  }
  void hold_failed_rows(epx_operation operation) {
    check_cuda(launch_hold_rows(node_->device_group(), rails_on_), name_of(operation));
  }

  // ---- Transfers ----

  // The elements of one transfer with a rail peer: `out` elements are sent and `in` received, both from index `first` on.
  struct RailRange {
    int64_t first, out, in;

    RailRange times(int64_t factor) const { return {first * factor, out * factor, in * factor}; }
  };
  struct RowsOfNode {
    RailRange rows;    // and sidecars
    RailRange weights; // floats
  };

  static int64_t rail_row_bytes(const MovementCall& call) {
    return epx::rail_row_bytes(call.format, call.dtype, call.hidden);
  }
  // Rows go from one area to that of the rail peers. rows_of(node) says how many.
  template <typename RowsOf>
  void exchange_rows(int64_t row_bytes, int64_t sidecar_bytes, const RowsOf& rows_of) {
    const RailArea& sent = buffers_.to_rails.area();
    const RailArea& received = buffers_.from_rails.area();
    transfers_.clear();
    for_each_other_node([&](int node) {
      const auto add = [&](const void* from, void* to, const RailRange& bytes) {
        transfers_.push_back({node, static_cast<const std::byte*>(from) + bytes.first, bytes.out,
                              static_cast<std::byte*>(to) + bytes.first, bytes.in});
      };
      const RowsOfNode of_node = rows_of(node);
      add(sent.rows_of(node, row_bytes), received.rows_of(node, row_bytes), of_node.rows.times(row_bytes));
      add(sent.weights_of(node), received.weights_of(node), of_node.weights.times(sizeof(float)));
      add(sent.sidecars_of(node, sidecar_bytes), received.sidecars_of(node, sidecar_bytes),
          of_node.rows.times(sidecar_bytes));
    });
    rails_->exchange(transfers_, rails_on_);
  }
  // Each pair of rail peers exchanges `words` words.
  void exchange_words(const int32_t* sent, int32_t* received, int64_t words, cudaStream_t stream) {
    const int64_t bytes = words * static_cast<int64_t>(sizeof(*sent));
    transfers_.clear();
    for_each_other_node([&](int node) {
      transfers_.push_back({node, sent + node * words, bytes, received + node * words, bytes});
    });
    fork_rail_stream(stream);
    rails_->exchange(transfers_, rails_on_);
    join_rail_stream(stream);
  }

  // ---- Legs ----

  int64_t first_token(int chunk) const { return int64_t{chunk} * shape_.chunk_tokens(); }
  // How many of the call's own tokens are in a chunk.
  int64_t own_tokens(const MovementCall& call, int chunk) const { return shape_.tokens_in_chunk(call.num_tokens, chunk); }

  template <typename Body>
  void for_each_chunk(const Body& body) const {
    for (int chunk = 0; chunk < shape_.num_chunks(); ++chunk)
      body(chunk);
  }
  // Keeps all CUDA resources until the process ends. To free memory waits for an idle device, and to destroy a stream or an
  // event waits for the driver's lock, which the thread that frees NCCL's memory of the rails (NcclRails) may hold.
  void keep_device_resources() {
    keep_until_exit(std::move(order_));
    keep_until_exit(std::move(rail_stream_));
    keep_until_exit(std::move(join_));
    keep_until_exit(std::move(fork_));
    keep_until_exit(std::move(chunk_events_));
    keep_until_exit(std::move(node_));
    keep_until_exit(std::move(node_context_)); // node_ refers to it
    keep_until_exit(std::move(buffers_));
  }

  template <typename Body>
  void for_each_other_node(const Body& body) const {
    for (int node = 0; node < shape_.num_nodes(); ++node)
      if (node != shape_.own_node) body(node);
  }

  // ---- The rail stream: eager calls have their transfers and pack_rows on it, in one order, and their legs on the caller's
  // stream. A captured call has both on its own stream, so that there is nothing to fork or join ----

  void fork_rail_stream(cudaStream_t stream) {
    if (rails_on_ == stream) return;
    record(fork_, stream);
    wait(rails_on_, fork_);
  }
  void join_rail_stream(cudaStream_t stream) {
    if (rails_on_ == stream) return;
    record(join_, rails_on_);
    wait(stream, join_);
  }
  const CudaEvent& chunk_event(int chunk) const { return chunk_events_[static_cast<size_t>(chunk)]; }
  static void record(const CudaEvent& event, cudaStream_t stream) {
    check_cuda(cudaEventRecord(event.get(), stream), "cudaEventRecord");
  }
  static void wait(cudaStream_t stream, const CudaEvent& event) {
    check_cuda(cudaStreamWaitEvent(stream, event.get(), 0), "cudaStreamWaitEvent");
  }

  MultiNodeShape shape_;
  const GroupContext& context_;
  int rail_ctas_; // SMs that transfers take at most
  RailBuffers buffers_;
  std::unique_ptr<const GroupContext> node_context_;
  std::unique_ptr<Rails> rails_;
  std::unique_ptr<LegBackend> node_;
  std::vector<RailTransfer> transfers_; // of the exchange that is being enqueued
  std::vector<CudaEvent> chunk_events_;
  CudaEvent fork_, join_;
  CudaStream rail_stream_;
  cudaStream_t rails_on_ = nullptr; // in the call in progress
  StreamOrder order_;
  MultiNodeDevice nodes_;
  int device_ = 0;
  std::unique_ptr<MultiNodeWatch> watch_; // last: its thread uses the others
};

} // namespace

std::unique_ptr<Backend> make_multi_node_backend(const GroupContext& context, int num_comm_sms, int rail_ctas,
                                                 MultiNodeTransport transport, std::unique_ptr<ControlConnection> control,
                                                 Exchange& exchange) {
  const MultiNodeShape shape = make_multi_node_shape(context.shape, context.rank);
  NodeExchange of_node(exchange, context.rank, context.shape.ranks_per_node);
  auto node_context = std::make_unique<const GroupContext>(make_node_context(context, shape));
  const int node_sms = LaunchPlan::resolve_num_sms(shape.node.num_ranks, num_comm_sms, rail_ctas);
  auto node_transport = std::make_unique<LegTransport>(std::move(transport.node), *transport.rails, context);
  std::unique_ptr<LegBackend> node = make_backend(*node_context, node_sms, std::move(node_transport), of_node);
  std::unique_ptr<Backend> backend;
  exchange.all_gather([&] {
    for (const auto& kernels : {multi_node_prepare_kernels(), multi_node_row_kernels(), multi_node_call_kernels()})
      load_kernels(kernels);
    backend = std::make_unique<MultiNodeBackend>(shape, context, std::move(node_context), std::move(node),
                                                 std::move(transport.rails), rail_ctas, std::move(control));
    return int32_t{0};
  });
  return backend;
}

} // namespace epx::cuda
