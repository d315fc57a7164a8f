// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/nccl_rails.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "base/background_thread.h"
#include "base/cuda.h"
#include "base/error.h"
#include "base/home_process.h"
#include "base/log.h"
#include "base/suspension_aware_deadline.h"
#include "transport/interrupt.h"
#include "transport/nccl/nccl_check.h"
#include "transport/stream_wait.h"

namespace epx {
namespace {

// For NCCL to send what peers have not received yet, and to free the communicator, when the rails are destroyed. Where a graph
// has captured the communicator, it is most likely the graph that is waited for.
constexpr std::chrono::seconds kTimeToLeave{10}, kTimeToLeaveGraph{1};
constexpr std::chrono::seconds kTimeToFreeAtExit{3};
constexpr std::chrono::microseconds kPollInterval{20};
constexpr size_t kConnectBytes = 16;

// The communicators that are being freed.
std::atomic<int> num_freeing{0};

// A process that exits waits until they are free, but not for long: a thread that is inside NCCL when CUDA takes itself down
// crashes the process. The handler is registered after those of CUDA and NCCL, so that it runs before them.
void wait_at_exit_for_communicators() {
  static const HomeProcess process; // a child of fork() has no such threads
  [[maybe_unused]] static const int registered = std::atexit([] {
    SuspensionAwareDeadline deadline{kTimeToFreeAtExit};
    while (process.is_here() && num_freeing > 0 && !deadline.passed())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
}

// A rank that has died closes its connections, which NCCL's threads notice before anything else does.
void throw_broken_rail(ncclResult_t result, const char* call, int peer) {
  if (result == ncclRemoteError) throw BrokenRailError(describe_nccl(result, call), peer);
}

} // namespace

struct NcclRails::State {
  enum Phase { kAlive, kLeaves, kAborted, kEnded };

  std::mutex mutex; // of calls of NCCL with the communicator
  std::unique_ptr<Communicator> communicator;
  std::atomic<int> phase{kAlive};
  std::atomic<bool> was_captured{false};

  // The thread waits until the rails end, and frees the communicator. Nobody waits for that without a limit.
  void free_when_ended(std::chrono::milliseconds timeout) {
    phase.wait(kAlive);
    std::unique_ptr<Communicator> ended;
    {
      const std::scoped_lock lock(mutex);
      ended = std::move(communicator);
    }
    SuspensionAwareDeadline deadline{timeout};
    if (phase == kLeaves && ended->get() != nullptr) ended->leave([&] { return phase == kAborted || deadline.passed(); });
    ended.reset(); // aborts it if it has not been left
    phase = kEnded;
    --num_freeing;
  }
  void abort() noexcept {
    int leaves = kLeaves;
    if (!end(kAborted)) phase.compare_exchange_strong(leaves, kAborted);
  }
  void leave() noexcept { end(kLeaves); }

private:
  // Returns whether they were alive.
  bool end(Phase new_phase) noexcept {
    ++num_freeing;
    int alive = kAlive;
    const bool was_alive = phase.compare_exchange_strong(alive, new_phase);
    if (was_alive)
      phase.notify_all();
    else
      --num_freeing;
    return was_alive;
  }
};

NcclRails::NcclRails(std::unique_ptr<Communicator> communicator, int rank, int num_ranks, int ranks_per_node,
                     std::chrono::milliseconds timeout)
    : rank_(rank), num_ranks_(num_ranks), ranks_per_node_(ranks_per_node), timeout_(timeout),
      state_(std::make_shared<State>()) {
  state_->communicator = std::move(communicator);
  wait_at_exit_for_communicators();
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  // The thread exists from the beginning, since a process that fails may not be able to make one.
  freer_ = start_background_thread("the thread that ends the rails", [state = state_, device, timeout] {
    log_cuda(cudaSetDevice(device), "cudaSetDevice");
    state->free_when_ended(timeout);
  });
}

NcclRails::~NcclRails() {
  state_->leave();
  const bool is_brief = state_->was_captured || state_->phase == State::kAborted;
  SuspensionAwareDeadline deadline{is_brief ? kTimeToLeaveGraph : kTimeToLeave};
  while (state_->phase != State::kEnded && !deadline.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (state_->phase == State::kEnded) {
    freer_.join();
    return;
  }
  log::transport().info("NCCL frees the communicator between the nodes later: a rank has not received all rows, or a CUDA "
                        "graph that has captured it still exists");
  freer_.detach();
}

void NcclRails::abort() noexcept {
  state_->abort();
}

bool NcclRails::has_ended() const noexcept {
  return state_->phase != State::kAlive;
}

// NCCL keeps the error of a transfer that has been enqueued. While another thread calls NCCL nothing is known.
bool NcclRails::is_broken() const noexcept {
  const std::unique_lock lock(state_->mutex, std::try_to_lock);
  if (!lock || state_->phase != State::kAlive || state_->communicator == nullptr) return false;
  ncclResult_t result = ncclSuccess;
  return nccl().CommGetAsyncError(state_->communicator->get(), &result) == ncclSuccess && result == ncclRemoteError;
}

void NcclRails::require_alive(const State& state) {
  if (state.phase != State::kAlive || state.communicator == nullptr || state.communicator->get() == nullptr)
    fail(EPX_ERROR_ABORTED, "the rails between the nodes of the group were aborted");
}

// `begin` begins an operation of NCCL. The communicator does not block: NCCL goes on in a thread of its own, and this waits
// until the operation is on its stream.
void NcclRails::run(const char* call, int peer, cudaStream_t stream, const std::function<ncclResult_t(ncclComm_t)>& begin) {
  State& state = *state_;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  if (capture != cudaStreamCaptureStatusNone) state.was_captured = true;
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
    if (is_interrupted()) {
      abort();
      fail(EPX_ERROR_ABORTED, "{}: interrupted before NCCL had enqueued it", call);
    }
    if (deadline.passed()) {
      abort();
      fail(EPX_ERROR_TIMEOUT, "{}: NCCL has not enqueued it within {} ms", call, timeout_.count());
    }
    std::this_thread::sleep_for(kPollInterval);
  }
  throw_broken_rail(result, call, peer);
  check_nccl(result, call);
}

void NcclRails::all_gather(const void* mine, void* all, int64_t bytes, epx_stream stream) {
  const int peer = num_ranks_ == 2 ? 1 - rank_ : -1;
  run("ncclAllGather", peer, static_cast<cudaStream_t>(stream), [&](ncclComm_t communicator) {
    return nccl().AllGather(mine, all, static_cast<size_t>(bytes), ncclChar, communicator,
                            static_cast<cudaStream_t>(stream));
  });
}

void NcclRails::exchange(std::span<const RailTransfer> transfers, epx_stream of_call) {
  const auto stream = static_cast<cudaStream_t>(of_call);
  const auto has_bytes = [](const RailTransfer& transfer) { return transfer.send_bytes > 0 || transfer.recv_bytes > 0; };
  if (std::ranges::none_of(transfers, has_bytes)) return;
  run("ncclGroupEnd", only_peer(transfers, rank_, ranks_per_node_), stream, [&](ncclComm_t communicator) {
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
