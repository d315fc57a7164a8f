// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/nccl_rails.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "base/cuda.h"
#include "base/error.h"
#include "base/log.h"
#include "base/suspension_aware_deadline.h"
#include "transport/nccl/nccl_check.h"
#include "transport/stream_wait.h"

namespace epx {
namespace {

constexpr std::chrono::seconds kTimeToFree{2}; // for NCCL to free a communicator that nothing uses any more
constexpr std::chrono::microseconds kPollInterval{20};
constexpr size_t kConnectBytes = 16;

} // namespace

struct NcclRails::State {
  enum Phase { kAlive, kEnds, kEnded }; // ends: a thread aborts the communicator

  std::mutex mutex; // of calls of NCCL with the communicator
  std::unique_ptr<Communicator> communicator;
  std::atomic<int> phase{kAlive};

  // The thread waits until the rails end. Nobody waits for ncclCommAbort without a limit.
  void abort_when_ended() {
    phase.wait(kAlive);
    std::unique_ptr<Communicator> ended;
    {
      const std::scoped_lock lock(mutex);
      ended = std::move(communicator);
    }
    ended.reset();
    phase = kEnded;
  }
  void end() noexcept {
    int alive = kAlive;
    if (phase.compare_exchange_strong(alive, kEnds)) phase.notify_all();
  }
};

NcclRails::NcclRails(std::unique_ptr<Communicator> communicator, int rank, int num_ranks, int ranks_per_node,
                     std::chrono::milliseconds timeout)
    : rank_(rank), num_ranks_(num_ranks), ranks_per_node_(ranks_per_node), timeout_(timeout),
      state_(std::make_shared<State>()) {
  state_->communicator = std::move(communicator);
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  // The thread exists from the beginning, since a process that fails may not be able to make one.
  aborter_ = std::thread([state = state_, device] {
    log_cuda(cudaSetDevice(device), "cudaSetDevice");
    state->abort_when_ended();
  });
}

NcclRails::~NcclRails() {
  state_->end();
  SuspensionAwareDeadline deadline{kTimeToFree};
  while (state_->phase != State::kEnded && !deadline.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (state_->phase == State::kEnded) {
    aborter_.join();
    return;
  }
  log::transport().info(
      "NCCL frees the communicator between nodes later: a CUDA graph that has captured it may still exist");
  aborter_.detach();
}

void NcclRails::abort() noexcept {
  state_->end();
}

bool NcclRails::has_ended() const noexcept {
  return state_->phase != State::kAlive;
}

void NcclRails::require_alive(const State& state) {
  if (state.phase != State::kAlive || state.communicator == nullptr || state.communicator->get() == nullptr)
    fail(EPX_ERROR_ABORTED, "the rails between the nodes of the group were aborted");
}

// `begin` begins an operation of NCCL. The communicator does not block: NCCL goes on in a thread of its own, and this waits
// until the operation is on its stream.
void NcclRails::run(const char* call, const std::function<ncclResult_t(ncclComm_t)>& begin) {
  State& state = *state_;
  SuspensionAwareDeadline deadline{timeout_};
  ncclResult_t result = ncclInProgress;
  {
    const std::scoped_lock lock(state.mutex);
    require_alive(state);
    result = begin(state.communicator->get());
  }
  if (result == ncclSuccess) result = ncclInProgress; // ncclSuccess may mean that it has only begun
  while (result == ncclInProgress) {
    {
      const std::scoped_lock lock(state.mutex);
      require_alive(state);
      check_nccl(nccl().CommGetAsyncError(state.communicator->get(), &result), "ncclCommGetAsyncError");
    }
    if (result != ncclInProgress) break;
    if (deadline.passed()) {
      abort();
      fail(EPX_ERROR_TIMEOUT, "{}: NCCL has not enqueued it within {} ms", call, timeout_.count());
    }
    std::this_thread::sleep_for(kPollInterval);
  }
  check_nccl(result, call);
}

void NcclRails::all_gather(const void* mine, void* all, int64_t bytes, epx_stream stream) {
  run("ncclAllGather", [&](ncclComm_t communicator) {
    return nccl().AllGather(mine, all, static_cast<size_t>(bytes), ncclChar, communicator,
                            static_cast<cudaStream_t>(stream));
  });
}

void NcclRails::exchange(std::span<const RailTransfer> transfers, epx_stream of_call) {
  const auto stream = static_cast<cudaStream_t>(of_call);
  const auto has_bytes = [](const RailTransfer& transfer) { return transfer.send_bytes > 0 || transfer.recv_bytes > 0; };
  if (std::ranges::none_of(transfers, has_bytes)) return;
  run("ncclGroupEnd", [&](ncclComm_t communicator) {
    ncclResult_t result = nccl().GroupStart();
    if (result != ncclSuccess) return result;
    const auto keep_error = [&](ncclResult_t of_part) {
      if (result == ncclSuccess || result == ncclInProgress) result = of_part;
    };
    for (const RailTransfer& transfer : transfers) {
      const int peer = transfer.node * ranks_per_node_ + rank_ % ranks_per_node_;
      if (transfer.send_bytes > 0)
        keep_error(
            nccl().Send(transfer.send, static_cast<size_t>(transfer.send_bytes), ncclChar, peer, communicator, stream));
      if (transfer.recv_bytes > 0)
        keep_error(
            nccl().Recv(transfer.recv, static_cast<size_t>(transfer.recv_bytes), ncclChar, peer, communicator, stream));
    }
    keep_error(nccl().GroupEnd()); // ends the group even when a part of it has failed
    return result;
  });
}

void NcclRails::connect() {
  const CudaStream stream;
  const auto sent = make_device_memory<std::byte>(kConnectBytes);
  const auto received = make_device_memory<std::byte>(kConnectBytes * static_cast<size_t>(num_ranks_));
  std::vector<RailTransfer> transfers;
  for (int node = 0; node < num_ranks_ / ranks_per_node_; ++node)
    if (node != rank_ / ranks_per_node_)
      transfers.push_back(
          {node, sent.get(), kConnectBytes, received.get() + static_cast<size_t>(node) * kConnectBytes, kConnectBytes});
  try {
    exchange(transfers, stream.get());
    all_gather(sent.get(), received.get(), kConnectBytes, stream.get());
    wait_for_stream(stream.get(), timeout_);
  } catch (const StatusError&) {
    abort(); // or the memory could not be freed, because NCCL's kernels use it
    throw;
  }
}

} // namespace epx
