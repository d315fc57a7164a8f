// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/communicator.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/suspension_aware_deadline.h"
#include "transport/interrupt.h"
#include "transport/nccl/nccl_check.h"

namespace epx {
namespace {

constexpr std::chrono::milliseconds kTimeToBeMade{5'000}; // when nobody needs it any more

} // namespace

Communicator::Communicator(const NcclVersion& version, int rank, int num_ranks, const ncclUniqueId& id,
                           std::unique_ptr<BootstrapRoot> root, int ctas, std::chrono::milliseconds timeout)
    : version_(version), root_(std::move(root)), timeout_(timeout) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.minCTAs = config.maxCTAs = ctas;
  ncclComm_t comm = nullptr;
  const ncclResult_t result = nccl().CommInitRankConfig(&comm, num_ranks, id, rank, &config);
  comm_ = comm;
  if (result != ncclInProgress) check_nccl(result, "ncclCommInitRankConfig");
}

void Communicator::wait_until_made() {
  wait(ncclInProgress, "ncclCommInitRankConfig");
  is_made_ = true;
  if (root_ != nullptr) root_->all_ranks_have_come();
  root_.reset();
}

Communicator::~Communicator() {
  if (can_be_made_ && !is_made_ && comm_ != nullptr) {
    timeout_ = std::min(timeout_, kTimeToBeMade);
    try {
      wait_until_made();
    } catch (...) { // a rank has died, and what NCCL leaves cannot be helped
    }
  }
  abort();
}

void Communicator::abort() noexcept {
  if (const ncclComm_t comm = comm_.exchange(nullptr); comm != nullptr) nccl().CommAbort(comm);
}

void Communicator::wait(ncclResult_t result, const char* call) {
  SuspensionAwareDeadline deadline{timeout_};
  if (result == ncclSuccess) result = ncclInProgress; // ncclSuccess may mean that it has only begun
  while (result == ncclInProgress) {
    if (deadline.passed()) {
      abort();
      fail(EPX_ERROR_TIMEOUT, "{}: not all ranks came within {} ms", call, timeout_.count());
    }
    if (is_interrupted()) {
      abort();
      fail(EPX_ERROR_ABORTED, "{}: interrupted while it waited for the other ranks", call);
    }
    if (has_ended_ && has_ended_()) {
      abort();
      fail(EPX_ERROR_ABORTED, "{}: the group has ended", call);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    check_nccl(nccl().CommGetAsyncError(comm_, &result), "ncclCommGetAsyncError");
  }
  check_nccl(result, call);
}

bool Communicator::leave(const std::function<bool()>& gives_up) {
  ncclResult_t result = nccl().CommFinalize(comm_);
  if (result == ncclSuccess) result = ncclInProgress;
  while (result == ncclInProgress && !gives_up()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (nccl().CommGetAsyncError(comm_, &result) != ncclSuccess) return false;
  }
  if (result != ncclSuccess) return false;
  nccl().CommDestroy(comm_.exchange(nullptr));
  return true;
}

} // namespace epx
