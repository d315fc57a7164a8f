// SPDX-License-Identifier: Apache-2.0
#include "runtime/nodes/multi_node_watch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <utility>

#include "base/background_thread.h"
#include "base/cuda.h"
#include "base/cuda_error.h"
#include "base/log.h"
#include "base/names.h"
#include "base/suspension_aware_deadline.h"
#include "runtime/layout/rail_layout.h"
#include "runtime/stages/call_descriptor.h"
#include "runtime/stages/cuda/device_idle.h"
#include "runtime/stages/cuda/protocol/test_hooks.h"
#include "runtime/stages/reports.h"
#include "transport/interrupt.h"

namespace epx::cuda {
namespace {

using namespace std::chrono_literals;

constexpr auto kPollInterval = 5ms;            // of the thread
constexpr std::chrono::microseconds kSpin{20}; // of a call's wait on the host
// How much later than the kernels of a node the watch gives up when nobody knows who is to blame.
constexpr auto kAfterKernels = 2'000ms;
// While a call goes on, the rails are asked so often whether a connection has broken. A rank that has ended its part of the
// last call may exit, which breaks its connections: so the peers have some time to end that call, too.
constexpr auto kRailsInterval = 100ms;
constexpr auto kTimeToEndCall = 1'000ms;

uint64_t load(const uint64_t& word) {
  return std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_acquire); // a kernel stores it
}

// Returns whether failures of this status are found by each rank of a node, or by both rail peers, which each have a message of
// their own. All other ranks have only the verdict.
bool is_found_by_node(epx_status status) {
  return status != EPX_ERROR_TIMEOUT && status != EPX_ERROR_ABORTED && status != EPX_ERROR_SYSTEM;
}

} // namespace

MultiNodeWatch::MultiNodeWatch(const GroupContext& context, const MultiNodeShape& shape, LegBackend& node, Rails& rails,
                               std::unique_ptr<ControlConnection> control, const MultiNodeProgress& progress)
    : context_(context), node_(node), rails_(rails), progress_(progress), control_(std::move(control)) {
  if (shape.ranks_per_node() == 1)
    leg_probe_.emplace(node_.device_group().state, std::chrono::milliseconds(context_.timeout_ms));
  node_.set_names({shape.first_rank(), [this](uint64_t leg) { return call_of_leg(leg); },
                   [this](uint64_t leg) { return tokens_of_leg(leg); }, &context_});
  control_->deliver_to([this](const Verdict& verdict) { end(verdict); });
  try {
    thread_ = start_background_thread("the watch of a group of several nodes", [this] { watch(); });
  } catch (...) {
    control_.reset();
    node_.set_names({});
    throw;
  }
}

MultiNodeWatch::~MultiNodeWatch() {
  {
    const std::scoped_lock lock(mutex_);
    stops_ = true;
  }
  stop_.notify_all();
  thread_.join();
  control_->set_progress(position().begun, false); // for the peers, to whom this rank says goodbye
  control_.reset();                                // no verdict comes any more
  node_.set_names({});
}

void MultiNodeWatch::watch() {
  const std::chrono::milliseconds timeout(context_.timeout_ms);
  const std::chrono::milliseconds last_timeout =
      std::chrono::milliseconds(node_timeout_ms(context_.timeout_ms)) + kAfterKernels;
  std::pair<uint64_t, uint64_t> last{0, 0}; // begun, ended
  SuspensionAwareDeadline deadline{timeout};
  SuspensionAwareDeadline last_deadline{last_timeout};
  SuspensionAwareDeadline rails_deadline{kRailsInterval};
  bool is_stuck = false, has_given_up = false, has_told = false, is_broken = false, has_told_broken = false;
  std::unique_lock lock(mutex_);
  while (!stop_.wait_for(lock, kPollInterval, [this] { return stops_; })) {
    const auto [begun, ended, operation, is_on_host] = position();
    const bool is_in_call = begun > ended;
    // The number of a call on the host that fails is that of the next call, so peers must not compare its operation.
    control_->set_progress(begun, is_in_call, is_on_host ? EPX_OP_NONE : operation);
    if (!has_told && !ends_work_.load()) {
      if (const auto failure = found_by_kernels()) {
        tell(*failure);
        has_told = true;
      }
    }
    if (!is_in_call || std::pair(begun, ended) != last) {
      last = {begun, ended};
      deadline = SuspensionAwareDeadline{timeout};
      last_deadline = SuspensionAwareDeadline{last_timeout};
      rails_deadline = SuspensionAwareDeadline{kRailsInterval};
      is_broken = false;
      if (is_stuck) control_->withdraw_report();
      if (is_stuck && leg_probe_) leg_probe_->reset();
      is_stuck = has_given_up = false;
      continue;
    }
    if (!has_told_broken && rails_deadline.passed()) {
      has_told_broken = is_broken; // for kTimeToEndCall
      if (has_told_broken) control_->report_stuck(-1, operation, begun, ReportKind::connection);
      is_broken = rails_.is_broken();
      rails_deadline = SuspensionAwareDeadline{is_broken ? kTimeToEndCall : kRailsInterval};
    }
    if (deadline.passed() && !std::exchange(is_stuck, true)) {
      log::group().warn("group {:016x}: {} (call {}) has not ended within {} ms on this rank", context_.group_id,
                        name_of(operation), begun, context_.timeout_ms);
      control_->report_stuck(-1, operation, begun);
    }
    if (is_stuck && !has_told && !ends_work_.load() && leg_probe_ && leg_probe_->finds_hanging_leg()) {
      control_->report_hang(operation, begun);
      has_told = true;
    }
    if (last_deadline.passed() && !std::exchange(has_given_up, true))
      control_->report_stuck(-1, operation, begun, ReportKind::last);
  }
}

MultiNodeWatch::Position MultiNodeWatch::position() const {
  const std::scoped_lock lock(host_mutex_);
  // First, so that a call that ends now is not taken for one in progress.
  const uint64_t ended = std::max(load(progress_.ended), last_host_call_);
  uint64_t begun = std::max(load(progress_.begun), last_host_call_);
  if (host_operation_ != EPX_OP_NONE) return {begun + 1, ended, host_operation_, true};
  for (;;) { // the device may make many calls meanwhile, of which a later one takes the place of this one's operation
    const epx_operation operation = begun == last_host_call_ ? EPX_OP_NONE : operation_of(begun);
    const uint64_t now = std::max(load(progress_.begun), last_host_call_);
    if (now - begun < MultiNodeProgress::kCalls - 1) return {begun, ended, operation, false};
    begun = now;
  }
}

void MultiNodeWatch::begin_host_call(epx_operation operation) {
  const std::scoped_lock lock(host_mutex_);
  host_operation_ = operation;
}

void MultiNodeWatch::end_host_call(uint64_t num_calls) {
  const std::scoped_lock lock(host_mutex_);
  if (num_calls > 0) last_host_call_ = std::max(load(progress_.begun), last_host_call_) + num_calls;
  host_operation_ = EPX_OP_NONE;
}

// Returns the operation of a call that is no older than MultiNodeProgress::kCalls calls; NONE where none has begun.
epx_operation MultiNodeWatch::operation_of(uint64_t call) const {
  const int32_t& operation = progress_.operations[call % MultiNodeProgress::kCalls];
  return static_cast<epx_operation>(std::atomic_ref(const_cast<int32_t&>(operation)).load(std::memory_order_relaxed));
}

CallName MultiNodeWatch::call_in_progress() const {
  return call_or_next(EPX_OP_NONE);
}

CallName MultiNodeWatch::call_or_next(epx_operation next) const {
  const Position now = position(); // one, since a call may begin meanwhile
  if (now.begun > now.ended) return {now.operation, now.begun};
  return next == EPX_OP_NONE ? CallName{EPX_OP_NONE, 0} : CallName{next, now.begun + 1};
}

// Returns the last call whose first leg has a sequence number up to `leg`. The device may be storing that of the next call,
// which takes the place of the oldest one.
uint64_t MultiNodeWatch::call_of_leg(uint64_t leg) const {
  if (leg == 0) return 0;
  const uint64_t begun = load(progress_.begun);
  const uint64_t oldest = begun > MultiNodeProgress::kCalls - 2 ? begun - (MultiNodeProgress::kCalls - 2) : 1;
  uint64_t call = begun;
  while (call > oldest && load(progress_.first_leg[call % MultiNodeProgress::kCalls]) > leg)
    --call;
  return call;
}

// Returns T of that call.
int64_t MultiNodeWatch::tokens_of_leg(uint64_t leg) const {
  return static_cast<int64_t>(load(progress_.tokens[call_of_leg(leg) % MultiNodeProgress::kCalls]));
}

void MultiNodeWatch::tell(const Failure& failure) {
  {
    const std::scoped_lock lock(verdict_mutex_);
    if (!told_) told_ = failure;
  }
  control_->report_failure(failure.culprit, failure.status, failure.operation, failure.sequence);
}

// What ranks of several nodes do not agree on comes before what the node has found, which may be the same.
std::optional<Failure> MultiNodeWatch::found_by_kernels() {
  if (auto failure = disagreement()) return failure;
  return node_.failure();
}

// Kernels behind transfers that were aborted compare what has never come: only what was found before counts.
bool MultiNodeWatch::has_disagreement() const {
  const bool is_known = load(progress_.disagreement.is_known) != 0; // read first: an abort comes before what follows it
  return is_known && (disagreed_before_end_.load() || !rails_.has_ended());
}

std::optional<Failure> MultiNodeWatch::disagreement() const {
  if (!has_disagreement()) return std::nullopt;
  const Disagreement& found = progress_.disagreement;
  const int own = found.ranks[1] == context_.rank ? 1 : 0;
  const CallName call{static_cast<epx_operation>(found.fields[own].operation), found.sequence};
  if (auto failure = find_disagreement(call, descriptor_with(found.fields[0]), found.ranks[0],
                                       descriptor_with(found.fields[1]), found.ranks[1]))
    return failure;
  const int capturing = found.fields[0].has_fixed_sizes != 0 ? 0 : 1;
  return capture_failure(call, found.ranks[capturing], found.ranks[1 - capturing]);
}

void MultiNodeWatch::end_work() noexcept {
  if (has_disagreement()) disagreed_before_end_.store(true);
  ends_work_.store(true); // the failure that the node has from now on is none that the group must learn of
  node_.end();            // before the rails: what comes behind them on the streams looks for it (end_calls_if_aborted)
  rails_.abort();
}

// A verdict between two calls is kept for the next one, which names it. A call that is in progress ends by it.
void MultiNodeWatch::end(const Verdict& verdict) {
  std::this_thread::sleep_for(test_verdict_delay());
  {
    const std::scoped_lock lock(verdict_mutex_);
    verdict_ = verdict;
  }
  if (const CallName call = call_in_progress(); call.operation != EPX_OP_NONE) keep_verdict(call);
  end_work();
}

void MultiNodeWatch::keep_verdict(CallName call) {
  std::optional<Verdict> verdict;
  {
    const std::scoped_lock lock(verdict_mutex_);
    verdict = verdict_;
  }
  if (!verdict) return;
  try {
    fail(failure_of(*verdict, call), call);
  } catch (const StatusError&) { // the status board keeps the first one
  }
}

Failure MultiNodeWatch::failure_of(const Verdict& verdict, CallName call) {
  const bool is_mine = verdict.reporter == context_.rank;
  const CallName where{verdict.operation, verdict.sequence};
  if (verdict.cause == Cause::network) {
    Failure failure = network_failure(call, verdict.status, where, verdict.reporter, verdict.other_rank);
    const std::scoped_lock lock(verdict_mutex_);
    if (is_mine && !rail_error_.empty()) failure.message += ": " + rail_error_;
    return failure;
  }
  if (verdict.cause == Cause::hangs) return hang_failure(call, where, verdict.culprit, context_.rank);
  if (verdict.cause == Cause::out_of_sequence) {
    if (auto failure = find_disagreement(where, describe(verdict.operation), verdict.reporter,
                                         describe(verdict.other_operation), verdict.other_rank))
      return *failure;
  }
  if (verdict.cause == Cause::failed && is_mine) {
    const std::scoped_lock lock(verdict_mutex_);
    // A peer's abort record that has been found between two calls does not tell the call.
    if (told_ && (told_->sequence != 0 || told_->culprit == context_.rank)) return *told_;
  }
  if (verdict.cause == Cause::failed && is_found_by_node(verdict.status)) {
    if (auto own = disagreement(); own && own->status == verdict.status) return *own;
    if (auto own = node_.failure(); own && own->status == verdict.status) return *own;
    Failure failure;
    failure.status = verdict.status;
    failure.operation = verdict.operation;
    failure.sequence = verdict.sequence;
    failure.culprit = verdict.culprit;
    failure.message = fmt::format("{} (call {}): the node of rank {} has ended the group with {}, as a report there says",
                                  name_of(verdict.operation), verdict.sequence, verdict.reporter, name_of(verdict.status));
    return failure;
  }
  if (verdict.culprit < 0) return end_failure(call, verdict.status, where, verdict.reporter);
  return abort_failure(call, {verdict.status, verdict.operation, verdict.culprit, verdict.sequence}, context_.rank, 0);
}

void MultiNodeWatch::require_healthy(epx_operation operation) {
  status_.require_healthy();
  keep_verdict(call_or_next(operation));
  status_.require_healthy();
  if (const auto failure = found_by_kernels()) fail_with(*failure, call_or_next(operation));
}

// The node's kernels may have ended because of a verdict that has not come here yet.
void MultiNodeWatch::fail_with(const Failure& failure, CallName call) {
  tell(failure);
  const std::optional<Verdict> verdict = control_->wait_for_verdict();
  if (!verdict) end_work(); // rank 0 does not answer
  const bool knows_call = call.sequence != 0 || !verdict;
  fail(verdict ? failure_of(*verdict, knows_call ? call : CallName{verdict->operation, verdict->sequence}) : failure, call);
}

// An abort record of the node that no kernel of this rank has found names no call of this rank.
void MultiNodeWatch::fail(Failure failure, CallName call) {
  if (failure.sequence == 0) failure.sequence = call.sequence;
  status_.fail(failure);
}

// Outside of calls.
void MultiNodeWatch::keep_failure_of_kernels() {
  const bool ends_work = ends_work_.load(); // first: the verdict that ends the work is there before
  keep_verdict(call_in_progress());
  if (!status_.is_healthy() || ends_work) return;
  const auto failure = found_by_kernels();
  if (!failure) return;
  try {
    const CallName call = call_in_progress();
    fail_with(*failure, call.operation != EPX_OP_NONE ? call : CallName{failure->operation, failure->sequence});
  } catch (const StatusError&) { // the status board keeps it
  }
}

void MultiNodeWatch::wait_for(cudaStream_t stream, epx_operation operation) {
  const RelaxedCaptureScope scope;
  for (;;) {
    const cudaError_t error = cudaStreamQuery(stream);
    require_healthy(operation); // even where the stream is done: transfers that were aborted bring nothing
    if (error != cudaErrorNotReady) {
      check_cuda(error, name_of(operation));
      return;
    }
    require_not_interrupted(name_of(operation));
    std::this_thread::sleep_for(kSpin);
  }
}

void MultiNodeWatch::end_call(epx_operation operation, const StatusError& error) {
  require_healthy(operation);
  const CallName call = call_or_next(operation);
  const auto* const broken = dynamic_cast<const BrokenRailError*>(&error);
  if (broken != nullptr) {
    {
      const std::scoped_lock lock(verdict_mutex_);
      rail_error_ = error.message();
    }
    if (const auto verdict = control_->report_broken_connection(broken->peer(), call.operation, call.sequence))
      fail(failure_of(*verdict, call), call);
  }
  Failure failure;
  failure.status = error.status();
  failure.operation = operation;
  failure.sequence = call.sequence;
  failure.message = error.message();
  // A rank that waits in vain, or whose connection has broken, is not the cause; nor is one that finds that ranks differ.
  const bool is_cause = error.status() != EPX_ERROR_TIMEOUT && error.status() != EPX_ERROR_OUT_OF_SEQUENCE;
  if (broken == nullptr && is_cause) failure.culprit = context_.rank;
  tell(failure);
  const std::optional<Verdict> verdict = control_->wait_for_verdict();
  end_work();
  fail(verdict ? failure_of(*verdict, call) : failure, call);
}

void MultiNodeWatch::abort() {
  const AbortRecord record{EPX_ERROR_ABORTED, EPX_OP_NONE, context_.rank, 0};
  try {
    status_.fail(abort_failure({EPX_OP_NONE, 0}, record, context_.rank, 0));
  } catch (const StatusError&) { // the status board keeps it
  }
  control_->report_failure(context_.rank, EPX_ERROR_ABORTED, EPX_OP_NONE, 0);
  end_work();
}

// The events are the node's, which makes all calls; the failure is the group's.
epx_group_report MultiNodeWatch::report() {
  keep_failure_of_kernels();
  epx_group_report report = node_.report();
  const epx_group_report of_group = status_.report();
  const bool node_has_failed = report.status != EPX_SUCCESS;
  report.status = of_group.status;
  report.operation = of_group.operation;
  report.phase = of_group.phase;
  report.culprit = of_group.culprit;
  report.sequence = of_group.sequence;
  report.expected = of_group.expected;
  report.seen = of_group.seen;
  report.num_missing = of_group.num_missing;
  std::copy(std::begin(of_group.missing), std::end(of_group.missing), std::begin(report.missing));
  if (of_group.status != EPX_SUCCESS || node_has_failed) // the node's message is about its failure
    std::copy(std::begin(of_group.message), std::end(of_group.message), std::begin(report.message));
  return report;
}

bool MultiNodeWatch::finish(int device) noexcept {
  try {
    const std::future<cudaError_t> idle = synchronize_in_background(device);
    SuspensionAwareDeadline deadline{std::chrono::milliseconds(context_.timeout_ms)};
    while (status_.is_healthy() && !deadline.passed() && !is_interrupted()) {
      const bool is_idle = idle.wait_for(5ms) == std::future_status::ready;
      keep_failure_of_kernels(); // also of the last call, whose failure is logged here
      if (is_idle && status_.is_healthy()) return true;
    }
    if (status_.is_healthy() && deadline.passed())
      log::group().warn("group {:016x} is destroyed, but its GPU is not idle after {} ms: calls of the group that wait for "
                        "peers, if there are any, are aborted",
                        context_.group_id, context_.timeout_ms);
    end_work();
    SuspensionAwareDeadline last_deadline{kTimeToAbort};
    return comes_before(last_deadline, idle);
  } catch (const std::exception& error) {
    log::group().warn("group {:016x}: {}", context_.group_id, error.what());
    end_work();
    return false;
  }
}

} // namespace epx::cuda
