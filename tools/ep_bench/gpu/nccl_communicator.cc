// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/gpu/communicator.h"

#include <utility>

#include <fmt/format.h>
#include <nccl.h>

#include "tools/ep_bench/errors.h"

namespace epx::bench {
namespace {

// Throws RuntimeError with the call's name and NCCL's message.
void check_nccl(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) throw RuntimeError(fmt::format("{}: {}", call, ncclGetErrorString(result)));
}

struct AbortNcclComm {
  using pointer = ncclComm_t;
  void operator()(ncclComm_t comm) const { ncclCommAbort(comm); } // waits for no peer
};
using NcclComm = std::unique_ptr<ncclComm, AbortNcclComm>;

// Makes a communicator of all ranks for the calling thread's device. Collective. Throws AgreedError.
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

class NcclCommunicator final : public Communicator {
public:
  NcclCommunicator(NcclComm comm, Gpu& gpu) : comm_(std::move(comm)), word_(Buffer::plain(gpu, sizeof(int32_t))) {}

  void exchange(std::span<const Transfer> transfers, cudaStream_t stream) override {
    check_nccl(ncclGroupStart(), "ncclGroupStart");
    for (const Transfer& transfer : transfers) {
      if (transfer.send_bytes > 0)
        check_nccl(
            ncclSend(transfer.send, static_cast<size_t>(transfer.send_bytes), ncclInt8, transfer.peer, comm_.get(), stream),
            "ncclSend");
      if (transfer.receive_bytes > 0)
        check_nccl(ncclRecv(transfer.receive, static_cast<size_t>(transfer.receive_bytes), ncclInt8, transfer.peer,
                            comm_.get(), stream),
                   "ncclRecv");
    }
    check_nccl(ncclGroupEnd(), "ncclGroupEnd");
  }

  void all_gather(const std::byte* mine, std::byte* all, int64_t bytes, cudaStream_t stream) override {
    check_nccl(ncclAllGather(mine, all, static_cast<size_t>(bytes), ncclInt8, comm_.get(), stream), "ncclAllGather");
  }

  void barrier(cudaStream_t stream) override {
    check_nccl(ncclAllReduce(word_.data(), word_.data(), 1, ncclInt32, ncclMax, comm_.get(), stream), "ncclAllReduce");
  }

private:
  NcclComm comm_;
  Buffer word_; // what barriers reduce, always 0
};

} // namespace

std::unique_ptr<Communicator> make_communicator(const Peers& peers, Gpu& gpu) {
  NcclComm comm = make_nccl_comm(peers);
  std::unique_ptr<Communicator> communicator;
  peers.together([&] { communicator = std::make_unique<NcclCommunicator>(std::move(comm), gpu); });
  return communicator;
}

std::string nccl_version() {
  int version = 0;
  check_nccl(ncclGetVersion(&version), "ncclGetVersion");
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

} // namespace epx::bench
