// SPDX-License-Identifier: Apache-2.0
// The MultiNodeWatch ends a group of several nodes when one of its ranks fails, so that every rank of every node names the same
// one. Transfers between nodes are NCCL's, which wait without a limit and do not tell for whom.
//
// A thread tells the control connection how far this rank's device has come, replays included. When the device has been within
// one call for timeout_ms, or a connection of the rails has broken, that reports it; rank 0 decides who has died, stopped, or
// not come, or that the network has failed. A failure within the node, which its kernels find, becomes the group's in the same
// way; on a node of one rank, whose legs have no peer to find it, so does a leg that hangs (LegProbe). On the verdict each rank
// ends its own kernels and its rails.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <cuda_runtime_api.h>

#include "base/error.h"
#include "epx/epx.h"
#include "runtime/group_context.h"
#include "runtime/layout/multi_node_shape.h"
#include "runtime/nodes/leg_probe.h"
#include "runtime/nodes/multi_node_kernels.h"
#include "runtime/stages/cuda/cuda_backend.h"
#include "runtime/status_board.h"
#include "transport/control/control_connection.h"
#include "transport/rails.h"

namespace epx::cuda {

// The timeout_ms of the node's own context. Its kernels know only their node: the rank that a kernel waits for may itself wait
// for a rail peer, so the control connection has to decide first. It decides within timeout_ms and two seconds, or, where a
// rank alone on its node hangs, within twice timeout_ms and two seconds.
constexpr int64_t node_timeout_ms(int64_t timeout_ms) {
  constexpr int64_t kLongest = int64_t{1} << 48; // which is for ever
  return 3 * std::min(timeout_ms, kLongest) + 10'000;
}

// Bounds an exchange of records on the host. The watch has got a verdict on it by then, if there is anyone to decide.
constexpr std::chrono::milliseconds host_exchange_timeout(int64_t timeout_ms) {
  return std::chrono::milliseconds(node_timeout_ms(timeout_ms) + 5'000);
}

class MultiNodeWatch {
public:
  // All arguments but `control` must outlive the watch. `progress` is in host memory. The thread runs from here on.
  MultiNodeWatch(const GroupContext& context, const MultiNodeShape& shape, LegBackend& node, Rails& rails,
                 std::unique_ptr<ControlConnection> control, const MultiNodeProgress& progress);
  ~MultiNodeWatch(); // leaves the group; see finish()
  MultiNodeWatch(const MultiNodeWatch&) = delete;
  MultiNodeWatch& operator=(const MultiNodeWatch&) = delete;

  // Before a call: throws the group's failure, if there is one. It is the same on all ranks; where this rank's kernels have
  // found one, this waits for the verdict, but no longer than a second and a half. report() and finish() wait likewise.
  void require_healthy(epx_operation operation);

  // Waits until the stream has done all its work. Throws the group's failure, and SYSTEM.
  void wait_for(cudaStream_t stream, epx_operation operation);

  // A call that has no kernel: its ranks exchange records on the host, while no kernel of the group is running. From its begin
  // the watch tells of it and bounds it as it does calls of the device; when it has ended, it counts as `num_calls` calls, or
  // as none where it has failed.
  void begin_host_call(epx_operation operation);
  void end_host_call(uint64_t num_calls);

  // A call could not be launched whole, so that peers may wait for the rest of it: ends the group. Throws the group's failure,
  // which is `error` if there was none.
  [[noreturn]] void end_call(epx_operation operation, const StatusError& error);

  // Any thread may call these.
  bool has_ended() const { return ends_work_.load(); } // the group's failure, or its end, has stopped its work
  void abort();                                        // epx_group_abort
  epx_group_report report();

  // Before the group is destroyed: waits until the GPU is idle, for as long as the group is healthy, but not longer than
  // timeout_ms; then ends what waits for peers. Returns false when the GPU is not idle even then, or cannot be waited for: what
  // its kernels may use must not be freed.
  bool finish(int device) noexcept;

private:
  void watch();
  void end(const Verdict& verdict); // the control connection's thread
  void end_work() noexcept;
  // How far this rank has come. `operation` is that of the call `begun`; NONE where that had no kernel and has ended.
  struct Position {
    uint64_t begun, ended;
    epx_operation operation;
    bool is_on_host; // the call `begun` has no kernel and is in progress
  };
  Position position() const;
  epx_operation operation_of(uint64_t call) const;
  std::optional<Failure> found_by_kernels();
  void keep_failure_of_kernels();
  bool has_disagreement() const;
  std::optional<Failure> disagreement() const;
  void keep_verdict(CallName call);
  Failure failure_of(const Verdict& verdict, CallName call);
  [[noreturn]] void fail_with(const Failure& failure, CallName call);
  [[noreturn]] void fail(Failure failure, CallName call);
  void tell(const Failure& failure);
  uint64_t call_of_leg(uint64_t leg) const;
  int64_t tokens_of_leg(uint64_t leg) const;
  CallName call_in_progress() const;
  CallName call_or_next(epx_operation next) const;

  const GroupContext& context_;
  LegBackend& node_;
  Rails& rails_;
  const MultiNodeProgress& progress_;
  std::optional<LegProbe> leg_probe_; // where legs wait for nobody; the thread's alone
  StatusBoard status_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stops_ = false;
  std::atomic<bool> ends_work_ = false;
  std::atomic<bool> disagreed_before_end_ = false;
  mutable std::mutex host_mutex_;              // of the next two
  epx_operation host_operation_ = EPX_OP_NONE; // of the call without a kernel that is in progress
  uint64_t last_host_call_ = 0;
  std::mutex verdict_mutex_;       // of what follows, up to control_
  std::optional<Verdict> verdict_; // that has come between two calls: the next one fails with it
  std::optional<Failure> told_;    // the first failure that this rank has told, whose sentence no verdict has
  std::string rail_error_;         // what broke a connection, as the rails say it
  std::unique_ptr<ControlConnection> control_;
  std::thread thread_;
};

} // namespace epx::cuda
