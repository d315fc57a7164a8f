// SPDX-License-Identifier: Apache-2.0
#include "tools/copy_engine_gather.h"

#include <stdexcept>
#include <string>
#include <vector>

#include <nccl.h>

namespace epx {
namespace {

void check_nccl(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) throw std::runtime_error(std::string(call) + ": " + ncclGetErrorString(result));
}

class NcclGather final : public CopyEngineGather {
public:
  NcclGather(int rank, int num_ranks, const ncclUniqueId& id) : rank_(rank) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
    check_nccl(ncclCommInitRankConfig(&comm_, num_ranks, id, rank, &config), "ncclCommInitRankConfig");
  }
  ~NcclGather() override {
    ncclCommAbort(comm_); // waits for no peer, and forgets the windows
    for (void* memory : all_memory_)
      ncclMemFree(memory);
  }
  NcclGather(const NcclGather&) = delete;
  NcclGather& operator=(const NcclGather&) = delete;

  std::byte* allocate(size_t bytes) override {
    void*& memory = all_memory_.emplace_back(nullptr);
    check_nccl(ncclMemAlloc(&memory, bytes), "ncclMemAlloc");
    ncclWindow_t window = nullptr; // NCCL has copy engines write to windows alone
    check_nccl(ncclCommWindowRegister(comm_, memory, bytes, &window, NCCL_WIN_COLL_SYMMETRIC), "ncclCommWindowRegister");
    return static_cast<std::byte*>(memory);
  }

  void gather(std::byte* all, size_t part_bytes, void* stream) override {
    check_nccl(ncclAllGather(all + static_cast<size_t>(rank_) * part_bytes, all, part_bytes, ncclUint8, comm_,
                             static_cast<cudaStream_t>(stream)),
               "ncclAllGather");
  }

private:
  int rank_;
  ncclComm_t comm_ = nullptr;
  std::vector<void*> all_memory_;
};

} // namespace

std::unique_ptr<CopyEngineGather> make_copy_engine_gather(int rank, int num_ranks, const ShareBytes& share) {
  struct Shared {
    ncclUniqueId id{};
    ncclResult_t result = ncclSuccess;
  };
  Shared shared;
  if (rank == 0) shared.result = ncclGetUniqueId(&shared.id);
  share(std::as_writable_bytes(std::span(&shared, 1)));
  check_nccl(shared.result, "ncclGetUniqueId"); // on all ranks or on none
  return std::make_unique<NcclGather>(rank, num_ranks, shared.id);
}

} // namespace epx
