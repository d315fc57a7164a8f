// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/communicator.h"

#include <thread>
#include <utility>

#include "base/suspension_aware_deadline.h"
#include "transport/nccl/nccl_check.h"

namespace epx {

Communicator::Communicator(const NcclVersion& version, int rank, int num_ranks, const ncclUniqueId& id, int ctas,
                           std::chrono::milliseconds timeout)
    : version_(version), timeout_(timeout) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.minCTAs = config.maxCTAs = ctas;
  wait(nccl().CommInitRankConfig(&comm_, num_ranks, id, rank, &config), "ncclCommInitRankConfig");
}

Communicator::~Communicator() {
  if (comm_ != nullptr) nccl().CommAbort(comm_); // the abort is local, never waits for a peer, and frees what is left
}

void Communicator::wait(ncclResult_t result, const char* call) {
  SuspensionAwareDeadline deadline{timeout_};
  if (result == ncclSuccess) result = ncclInProgress; // ncclSuccess may mean that it has only begun
  while (result == ncclInProgress) {
    if (deadline.passed()) {
      nccl().CommAbort(std::exchange(comm_, nullptr));
      fail(EPX_ERROR_TIMEOUT, "{}: not all ranks came within {} ms", call, timeout_.count());
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
  nccl().CommDestroy(std::exchange(comm_, nullptr));
  return true;
}

} // namespace epx
