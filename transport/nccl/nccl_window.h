// SPDX-License-Identifier: Apache-2.0
// An NcclWindow is a symmetric window of NCCL, over memory that it owns or that the user keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <nccl.h>

#include "transport/nccl/communicator.h"
#include "transport/nccl/nccl_library.h"
#include "transport/transport.h"

namespace epx {

struct NcclFree {
  void operator()(std::byte* memory) const noexcept { nccl().MemFree(memory); }
};
using NcclMemory = std::unique_ptr<std::byte, NcclFree>;

// Allocates zero bytes. Throws OUT_OF_MEMORY.
NcclMemory allocate_nccl_memory(int64_t bytes);

// A window shares ownership of the communicator, which therefore outlives it.
class NcclWindow final : public Window {
public:
  // `owner` owns `memory`, or is empty. The communicator may be NULL for one rank. Throws INVALID_ARGUMENT (alignment).
  NcclWindow(std::shared_ptr<Communicator> communicator, int rank, int num_ranks, std::byte* memory, int64_t bytes,
             NcclMemory owner);
  ~NcclWindow() override;

  // The call is collective in the communicator. Throws UNSUPPORTED (no symmetric memory), TIMEOUT, ABORTED, SYSTEM.
  void register_everywhere();

  PeerWindow view() const override { return {bases_.data(), rank_, num_ranks_}; }
  int64_t bytes() const override { return bytes_; }

private:
  std::shared_ptr<Communicator> communicator_;
  int rank_;
  int num_ranks_;
  std::byte* memory_;
  int64_t bytes_;
  NcclMemory owner_;
  ncclWindow_t window_ = nullptr;
  std::vector<std::byte*> bases_; // by WindowIndex, which is the LSA rank
};

} // namespace epx
