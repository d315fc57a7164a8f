// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/cuda/cuda_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/cuda.h"
#include "base/error.h"
#include "base/keep_until_exit.h"
#include "base/names.h"
#include "base/stream_order.h"
#include "base/suspension_aware_deadline.h"
#include "runtime/allocations.h"
#include "runtime/layout/slices.h"
#include "runtime/stages/call_descriptor.h"
#include "runtime/stages/cuda/board_exchange.h"
#include "runtime/stages/cuda/device_idle.h"
#include "runtime/stages/cuda/device_reports.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/kernels.h"
#include "runtime/stages/cuda/rank_board.h"
#include "runtime/stages/reports.h"
#include "runtime/status_board.h"
#include "transport/interrupt.h"

namespace epx::cuda {
namespace {

class CudaBackend final : public LegBackend, private Stages {
public:
  CudaBackend(const GroupContext& context, int device, std::unique_ptr<Transport> transport,
              std::unique_ptr<RankBoard> board, std::unique_ptr<Window> window, const LaunchPlan& plan)
      : context_(context), device_(device), transport_(std::move(transport)), board_(std::move(board)),
        window_(std::move(window)), plan_(plan), status_(!context.has_ordered_calls),
        record_(make_mapped_memory<StatusRecord>()), state_(make_device_memory<DeviceState>(1)),
        allocation_bases_(make_device_memory<std::byte*>(kMaxDeviceAllocations * num_ranks())),
        prepare_scratch_(
            make_device_memory<LlPacket8>(prepare_scratch_words(context.shape.num_experts, plan.max_prepare_blocks()))),
        plan_packets_(make_device_memory<LlPacket8>(plan_packet_words(context.shape))),
        reader_(context_, *record_, *board_, status_) {
    if (!is_node_of_several() && board_->reaches_peers()) {
      board_exchange_.emplace(*board_, context.rank, context.shape.num_ranks,
                              std::chrono::milliseconds(context.timeout_ms));
      transport_->end_waits_when([&board = *board_] { return board.abort_record() != 0; });
    }
    group_ = {context_,
              {},
              state_.get(),
              board_->abort_record_on_device(),
              record_.get(),
              allocation_bases_.get(),
              prepare_scratch_.get(),
              plan_packets_.get(),
              static_cast<uint64_t>(context.timeout_ms) * 1'000'000,
              0,
              read_test_hooks()};
    if (context_.forwards_staged_rows) group_.hooks.scribbles_staging = false;
    std::copy_n(window_->view().bases, num_ranks(), group_.bases);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  ~CudaBackend() override {
    bool is_idle = false;
    try {
      is_idle = finish_calls();
    } catch (const std::exception& error) {
      log::group().warn("group {:016x}: {}", context_.group_id, error.what());
    }
    board_->end_own_kernels(); // no kernel may still be waiting for a peer when its memory is freed
    if (is_idle) return;
    log::group().warn("group {:016x} is destroyed while its GPU is busy with other work: its memory there is not freed",
                      context_.group_id);
    keep_device_resources();
  }

  int num_comm_sms() const override { return plan_.num_sms(); }
  Stages& stages() override { return *this; }

  void* allocate(int64_t bytes) override {
    return add_allocation([&](Exchange& exchange) { return transport_->open_window(bytes, exchange); });
  }

  void register_memory(std::byte* memory, int64_t bytes) override {
    if (allocations_.locate(memory, 1).is_registered())
      fail(EPX_ERROR_INVALID_ARGUMENT, "epx_mem_register: {} lies in memory that peers of this group can reach already",
           static_cast<void*>(memory));
    add_allocation([&](Exchange& exchange) { return transport_->adopt_window(memory, bytes, exchange); });
  }

  void free(void* data) override {
    const int64_t allocation = allocations_.require_start(data);
    const CudaDeviceScope scope(device_);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); // kernels may still use it
    try {
      if (status_.is_healthy())
        make_host_call(EPX_OP_MEM_FREE, 1, [&](Exchange& exchange) { require_same(allocation, exchange); });
    } catch (const StatusError&) { // the group has failed, so freeing is local
      allocations_.remove(allocation);
      throw;
    }
    allocations_.remove(allocation);
  }

  std::vector<GroupRecord> all_gather(const GroupRecord& mine, int64_t bytes) override {
    reader_.read();
    const CudaDeviceScope scope(device_);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); // peers must not write while the sequence is advanced
    std::vector<GroupRecord> records;
    make_host_call(EPX_OP_ALL_GATHER, 2, [&](Exchange& exchange) { records = gather_records(mine, bytes, exchange); });
    return records;
  }

  void abort() override {
    const AbortRecord abort_record = board_->end_group({EPX_ERROR_ABORTED, EPX_OP_NONE, context_.rank, 0});
    try { // kernels that need not wait do not poll, so the next call is refused here
      status_.fail(abort_failure({EPX_OP_NONE, 0}, abort_record, context_.rank, 0));
    } catch (const StatusError&) { // the status board keeps it
    }
    // This fence pairs with the one in HostCall: that call sees the abort record, or this thread sees is_in_host_call_.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!transport_->reaches_peers() || (is_in_host_call_ && board_->reaches_peers())) return;
    try { // kernels poll their window more often than the host's memory
      const CudaDeviceScope scope(device_);
      check_cuda(launch_abort(group_, abort_record, abort_stream_.get()), "epx_group_abort");
    } catch (const StatusError&) {
      if (!board_->reaches_peers()) throw;
    }
  }

  epx_group_report report() override {
    try {
      reader_.read();
    } catch (const StatusError&) { // the status board keeps it
    }
    return status_.report();
  }

  void make_call(epx_operation operation, epx_stream stream, const Launch& launch_kernel) override {
    launch(operation, stream, launch_kernel);
  }
  const DeviceGroup& device_group() const override { return group_; }
  void set_names(const NodeNames& names) override { reader_.set_names(names); }
  std::optional<Failure> failure() override {
    is_healthy();
    return status_.failure();
  }
  void end() noexcept override {
    was_ended_ = true;
    board_->end_own_kernels();
    try { // frees are local from now on
      const int rank = reader_.name_of_rank(context_.rank);
      status_.fail(abort_failure({EPX_OP_NONE, 0}, {EPX_ERROR_ABORTED, EPX_OP_NONE, rank, 0}, rank, 0));
    } catch (const std::exception&) { // the status board keeps it
    }
  }

private:
  // Makes a call by its launch. Where the group checks handle memory, a kernel before the call's own checks what the call
  // reads, and one behind it seals what the call has written.
  template <typename Call>
  void make(const Call& call, cudaError_t (*launch_call)(const Launcher&, const Call&)) {
    const auto [operation, stream_of_call] = head_of(call);
    if constexpr (std::is_same_v<Call, RaggedAllToAllCall>) require_rounds(call);
    launch(operation, stream_of_call, [&](const DeviceGroup& group, cudaStream_t stream) {
      const Launcher launcher{group, plan_, allocations_, stream};
      if (!context_.checks_handle_mem) return launch_call(launcher, call);
      if constexpr (WritesPlan<Call>) {
        const auto [top_k, handle_mem] = written_plan(call);
        const cudaError_t error = launch_call(launcher, call);
        return error != cudaSuccess ? error : launch_seal(group, top_k, handle_mem, stream);
      } else if constexpr (!std::is_base_of_v<MovementCall, Call>) {
        return launch_call(launcher, call);
      } else {
        check_cuda(launch_check(group, call, stream), "the check of the handle memory");
        Call checked = call;
        checked.checked_header = reinterpret_cast<const std::byte*>(&state_.get()->checked_header);
        return launch_call(launcher, checked);
      }
    });
  }

  void require_rounds(const RaggedAllToAllCall& call) const {
    const int64_t bytes = call.output_rows * call.row_bytes;
    const int64_t rounds = slice_rounds(bytes, slice_image_bytes(context_.layout));
    if (rounds > kMaxSliceRounds && num_ranks() > 1 && !allocations_.locate(call.output, bytes).is_registered())
      fail(EPX_ERROR_UNSUPPORTED,
           "epx_ragged_all_to_all: output has {} bytes outside of memory from epx_mem_alloc, and the group's staging takes "
           "{} "
           "at a time: of {} rounds that these are, {} are the most",
           bytes, slice_image_bytes(context_.layout), rounds, kMaxSliceRounds);
  }

  // Throws the failure that kernels have reported so far. launch_kernel(group, stream) launches the operation's kernel.
  template <typename LaunchKernel>
  void launch(epx_operation operation, epx_stream of_call, const LaunchKernel& launch_kernel) {
    reader_.read();
    const auto stream = static_cast<cudaStream_t>(of_call);
    bool ends_group = true;
    Capture capture = Capture::none;
    try {
      const CudaDeviceScope scope(device_);
      capture = capture_of(stream);
      if (capture != Capture::none) order_.saw_capture();
      ends_group = capture == Capture::none && (context_.has_ordered_calls || order_.wait_for_last(stream));
      if (capture != Capture::active && !ends_group) // the call has consumed no sequence number and can be made again
        order_.refuse_beside_capture(name_of(operation), "the group's", capture);
      if (const bool is_captured = capture == Capture::active; is_captured != std::exchange(was_captured_, is_captured))
        plan_.forget_last();      // a captured call has not run, so it does not come before an eager one on the stream
      DeviceGroup group = group_; // a copy, because epx_group_abort reads group_ in any thread
      group.launch = ++num_launches_;
      const bool fails = kTestHooks && group.hooks.fails_to_launch == operation;
      check_cuda(fails ? cudaErrorLaunchFailure : launch_kernel(group, stream), name_of(operation));
      if (capture == Capture::none && !context_.has_ordered_calls) order_.launched(stream);
    } catch (const StatusError& error) {
      if (ends_group) fail_launch(operation, error.message());
      throw; // nothing has been launched
    }
    // A captured call runs whenever its graph is replayed, so the count is no longer known.
    if (capture == Capture::active) launched_ = RankBoard::kUnknown;
    count_launched(1);
  }

  // Ends the group: the peers have launched their kernels, or will, and would wait for this rank's kernel.
  [[noreturn]] void fail_launch(epx_operation operation, const std::string& why) {
    const uint64_t sequence = launched_ == RankBoard::kUnknown ? 0 : launched_ + 1;
    const CallName call{operation, reader_.name_of_call(sequence)};
    const int rank = reader_.name_of_rank(context_.rank);
    if (const auto other = end_group({EPX_ERROR_SYSTEM, operation, context_.rank, sequence}))
      status_.fail(abort_failure(call, reader_.named(*other), rank, 0));
    status_.fail(launch_failure(call, rank, why));
  }

  // Ends the group on all ranks. Returns the record that counts if it says something else.
  std::optional<AbortRecord> end_group(const AbortRecord& mine) {
    const AbortRecord verdict = board_->end_group(mine);
    if (verdict.culprit == mine.culprit && verdict.status == mine.status) return {};
    return verdict;
  }

  void count_launched(uint64_t calls) {
    if (launched_ != RankBoard::kUnknown) launched_ += calls;
    board_->set_launched(launched_);
  }

  // Waits until the calls in progress have ended, and aborts them when their peers do not come in time, or at once when the
  // group has failed or this thread is interrupted. Returns false when the device is not idle even then.
  bool finish_calls() {
    const std::future<cudaError_t> idle = synchronize_in_background(device_);
    SuspensionAwareDeadline deadline{std::chrono::milliseconds(context_.timeout_ms)};
    if (is_healthy()) {
      if (comes_before(deadline, idle, is_interrupted)) return true;
      if (deadline.passed())
        log::group().warn(
            "group {:016x} is destroyed, but its GPU is not idle after {} ms: calls of the group that wait for peers, "
            "if there are any, are aborted",
            context_.group_id, context_.timeout_ms);
    }
    board_->end_own_kernels();
    SuspensionAwareDeadline last_deadline =
        was_ended_ ? SuspensionAwareDeadline{std::chrono::milliseconds(0)} : deadline.with_grace(kTimeToAbort);
    return comes_before(last_deadline, idle);
  }

  bool is_healthy() {
    try {
      reader_.read();
      return true;
    } catch (const StatusError&) {
      return false;
    }
  }

  // The device may still use this memory, and its release would wait for the device: so it is kept until the process ends. So
  // are the stream and the event: another thread that frees memory may hold the driver's lock, for which their release would
  // wait.
  void keep_device_resources() {
    keep_until_exit(std::move(order_));
    keep_until_exit(std::move(abort_stream_));
    keep_until_exit(std::move(prepare_scratch_));
    keep_until_exit(std::move(plan_packets_));
    keep_until_exit(std::move(allocation_bases_));
    keep_until_exit(std::move(state_));
    keep_until_exit(std::move(record_));
    keep_until_exit(std::move(allocations_));
    keep_until_exit(std::move(window_));
    keep_until_exit(std::move(board_));
    keep_until_exit(std::move(transport_));
  }

  // This is collective. Returns the start of this rank's memory in the new window.
  template <typename Open>
  std::byte* add_allocation(const Open& open) {
    reader_.read();
    if (allocations_.contains(allocations_.next_number() - kMaxDeviceAllocations)) // numbers are the same on all ranks
      fail(EPX_ERROR_OUT_OF_MEMORY,
           "allocation number {} of the group would take the place of number {}, which is still in use: on GPUs an "
           "allocation must be freed before {} later ones are made",
           allocations_.next_number(), allocations_.next_number() - kMaxDeviceAllocations, kMaxDeviceAllocations);
    const CudaDeviceScope scope(device_);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); // peers must not write while the sequence is advanced
    std::unique_ptr<Window> window;
    make_host_call(
        EPX_OP_MEM_ALLOC, 2, [&](Exchange& exchange) { window = open(exchange); },
        [&] { copy_bases(allocation_bases_.get() + slot_of(allocations_.next_number()), *window); });
    return allocations_.add(std::move(window));
  }

  // This group is a node of a group of several, in which MultiNodeBackend orders the calls, and ends the group.
  bool is_node_of_several() const { return context_.has_ordered_calls; }

  // While one lives, this rank is in a call that has no kernel. epx_group_abort in another thread then stores its record in the
  // board only: it launches no abort kernel, which would access peers' memory that may be unmapped.
  class HostCall {
  public:
    explicit HostCall(std::atomic<bool>& is_in_call) : is_in_call_(is_in_call) {
      is_in_call_ = true;
      std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    HostCall(const HostCall&) = delete;
    HostCall& operator=(const HostCall&) = delete;
    ~HostCall() { is_in_call_ = false; }

  private:
    std::atomic<bool>& is_in_call_;
  };

  // Makes a call that has no kernel and counts as `num_calls`, while the device is idle: body(exchange) agrees with the peers
  // by that exchange, and then complete() does what else this rank has to do. The group lives on where all ranks have found
  // that the call cannot be made. It ends where a rank does not come in time, where ranks make different calls, and where CUDA
  // or the transport fails.
  template <typename Body, typename Complete>
  void make_host_call(epx_operation operation, uint64_t num_calls, const Body& body, const Complete& complete) {
    const HostCall host_call(is_in_host_call_);
    if (!is_node_of_several()) reader_.read();
    const CallName call = next_call(operation);
    try {
      if (board_exchange_) board_exchange_->begin(call);
      body(board_exchange_ ? *board_exchange_ : *transport_->exchange());
    } catch (const StatusError& error) {
      if (is_node_of_several()) throw;
      end_host_call(call, error);
    }
    try {
      complete();
      advance_sequence(num_calls);
    } catch (const StatusError& error) {
      if (is_node_of_several()) throw;
      board_->end_group({error.status(), operation, context_.rank, call.sequence}); // the peers have made the call
      status_.fail(host_call_failure(call, error.status(), error.message()));
    }
  }
  template <typename Body>
  void make_host_call(epx_operation operation, uint64_t num_calls, const Body& body) {
    make_host_call(operation, num_calls, body, [] {});
  }

  // Throws what an exchange of the call has thrown, or the failure by which the group ends.
  [[noreturn]] void end_host_call(CallName call, const StatusError& error) {
    reader_.read(call); // throws the failure, if a rank has ended the group meanwhile
    if (const auto* const missing = dynamic_cast<const MissingRanksError*>(&error)) lose_peers(call, missing->ranks());
    const epx_status status = error.status();
    if (status == EPX_ERROR_ABORTED && is_interrupted()) { // its peers still wait for this rank
      const AbortRecord mine{status, call.operation, context_.rank, call.sequence, EPX_PHASE_ARRIVE};
      status_.fail(abort_failure(call, end_group(mine).value_or(mine), context_.rank, 0));
    }
    const bool is_refused = status == EPX_ERROR_OUT_OF_MEMORY || status == EPX_ERROR_MISMATCH ||
                            status == EPX_ERROR_UNSUPPORTED || status == EPX_ERROR_INVALID_ARGUMENT;
    if (is_refused && transport_->reaches_peers()) throw StatusError(status, error.message());
    status_.fail(host_call_failure(call, status, error.message()));
  }

  [[noreturn]] void lose_peers(CallName call, const std::vector<int>& missing) {
    const int culprit = missing.front();
    const auto arrived_at = [&](int rank) {
      const uint64_t launched = board_->launched(rank);
      return launched == RankBoard::kUnknown ? 0 : launched;
    };
    if (const auto other = end_group({EPX_ERROR_TIMEOUT, call.operation, culprit, call.sequence, EPX_PHASE_ARRIVE}))
      status_.fail(abort_failure(call, *other, context_.rank, arrived_at(other->culprit)));
    status_.fail(timeout_failure(call, {EPX_PHASE_ARRIVE, missing, culprit, arrived_at(culprit)}, context_.timeout_ms));
  }

  // Throws OUT_OF_SEQUENCE on all ranks unless they free the allocation with the same number.
  void require_same(int64_t allocation, Exchange& exchange) const {
    const auto difference = exchange.find_difference(allocation);
    if (!difference) return;
    const auto failure =
        find_disagreement(next_call(EPX_OP_MEM_FREE), describe(EPX_OP_MEM_FREE, difference->value), difference->rank,
                          describe(EPX_OP_MEM_FREE, difference->other_value), difference->other_rank);
    throw StatusError(failure->status, failure->message);
  }

  // The name of the call that comes after those which have been made, while the device is idle.
  CallName next_call(epx_operation operation) const {
    uint64_t made = launched_;
    if (made == RankBoard::kUnknown) { // the host does not count the replays of graphs
      DeviceState state{};
      made =
          cudaMemcpy(&state, state_.get(), sizeof(state), cudaMemcpyDeviceToHost) == cudaSuccess ? state.begun.sequence : 0;
    }
    return {operation, reader_.name_of_call(made + 1)};
  }

  // Counts calls that have no kernel. The ranks have synchronized on the host, and no kernel of the group is running.
  void advance_sequence(uint64_t calls) {
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    DeviceState state{};
    check_cuda(cudaMemcpy(&state, state_.get(), sizeof(state), cudaMemcpyDeviceToHost), "cudaMemcpy");
    state.begun.sequence += calls;
    check_cuda(cudaMemcpy(state_.get(), &state, sizeof(state), cudaMemcpyHostToDevice), "cudaMemcpy");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); // a copy from pageable memory may still be under way
    count_launched(calls);
  }

  size_t num_ranks() const { return static_cast<size_t>(context_.shape.num_ranks); }
  size_t slot_of(int64_t allocation) const { return static_cast<size_t>(allocation % kMaxDeviceAllocations) * num_ranks(); }

  void copy_bases(std::byte** to, const Window& window) const {
    check_cuda(cudaMemcpy(to, window.view().bases, num_ranks() * sizeof(std::byte*), cudaMemcpyHostToDevice), "cudaMemcpy");
  }

#define EPX_STAGE(NUMBER, name, first_bytes, Call, stage)                                                                  \
  void stage(const Call& call) override {                                                                                  \
    make(call, launch_##stage);                                                                                            \
  }
  EPX_STAGES(EPX_STAGE)
#undef EPX_STAGE

  const GroupContext& context_;
  int device_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<RankBoard> board_;
  std::optional<BoardExchange> board_exchange_; // none in a node of several, and where the board does not reach the peers
  std::atomic<bool> is_in_host_call_ = false;
  std::atomic<bool> was_ended_ = false; // by end(), whose caller waits for the device itself
  std::unique_ptr<Window> window_;
  Allocations allocations_;
  LaunchPlan plan_;
  bool was_captured_ = false; // the last call was captured
  StatusBoard status_;        // a group of several nodes logs what it makes of the failure of its node
  MappedMemory<StatusRecord> record_;
  DeviceMemory<DeviceState> state_;
  DeviceMemory<std::byte*> allocation_bases_;
  DeviceMemory<LlPacket8> prepare_scratch_;
  DeviceMemory<LlPacket8> plan_packets_;
  CudaStream abort_stream_;
  StreamOrder order_;
  uint32_t num_launches_ = 0;
  uint64_t launched_ = 0; // sequence number of the last call that the host has launched, or RankBoard::kUnknown
  RecordReader reader_;
  DeviceGroup group_{}; // launch is 0 here; it does not change after construction
};

} // namespace

AllocationPlace Launcher::place_of(const MovementCall& call, const std::byte* rows) const {
  return allocations.locate(rows, call.recv_rows * row_bytes(call.recv_dtype, call.hidden));
}

AllocationPlace Launcher::place_of_output(const RaggedAllToAllCall& call) const {
  return allocations.locate(call.output, call.output_rows * call.row_bytes);
}

std::unique_ptr<LegBackend> make_backend(const GroupContext& context, int num_comm_sms,
                                         std::unique_ptr<Transport> transport, Exchange& exchange) {
  std::optional<LaunchPlan> plan;
  exchange.all_gather([&] {
    if (context.shape.num_ranks > kMaxDeviceRanks)
      fail(EPX_ERROR_UNSUPPORTED, "transport nccl serves at most {} ranks; the group has {}", kMaxDeviceRanks,
           context.shape.num_ranks);
    plan.emplace(context.shape, context.layout.ll_tokens, num_comm_sms);
    log::group().info("group {:016x}: the kernels are loaded", context.group_id);
    return int32_t{0};
  });
  auto board = std::make_unique<RankBoard>(context.rank, context.shape.num_ranks, exchange);
  std::unique_ptr<Window> window = transport->open_window(context.layout.total_bytes, exchange);
  log::group().info("group {:016x}: all ranks have mapped the windows of {} bytes", context.group_id,
                    context.layout.total_bytes);
  std::unique_ptr<LegBackend> backend;
  exchange.all_gather([&] { // no rank makes a call before all ranks are ready for it
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    backend =
        std::make_unique<CudaBackend>(context, device, std::move(transport), std::move(board), std::move(window), *plan);
    return int32_t{0};
  });
  return backend;
}

} // namespace epx::cuda
