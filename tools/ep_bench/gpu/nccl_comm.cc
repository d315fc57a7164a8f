// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/gpu/nccl_comm.h"

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"

namespace epx::bench {

void check_nccl(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) throw RuntimeError(fmt::format("{}: {}", call, ncclGetErrorString(result)));
}

NcclComm make_nccl_comm(const Peers& peers) {
  ncclUniqueId id{};
  peers.together([&] {
    if (peers.rank() == 0) check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
  });
  id = peers.gather(id).front();
  ncclComm_t comm = nullptr;
  const Failure failure =
      attempt([&] { check_nccl(ncclCommInitRank(&comm, peers.num_ranks(), id, peers.rank()), "ncclCommInitRank"); });
  NcclComm owner(comm);
  peers.agree(failure);
  return owner;
}

} // namespace epx::bench
