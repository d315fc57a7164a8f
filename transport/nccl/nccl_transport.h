// Windows over NVLink: NCCL symmetric memory of the ranks of one LSA domain, which load and store each other's.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "transport/exchange.h"
#include "transport/transport.h"

namespace epx {

// What a rank tells the others of its GPU before a transport is chosen.
struct GpuIdentity {
  int32_t device = -1; // CUDA ordinal; -1: none
  std::array<char, 16> uuid{};
};

// The calling thread's current device. None where there is no driver or no GPU.
GpuIdentity find_gpu() noexcept;

// Why these ranks cannot use transport nccl: one has no GPU, or two share one. "" when each has its own.
std::string why_not_a_gpu_each(std::span<const GpuIdentity> gpus);

// A transport that also carries small host-side records, for what ranks agree on after creation.
class NcclTransport : public Transport {
public:
  // As an exchange of all ranks, through the GPU; bounded by timeout_ms. Not while a call of the group waits on the host.
  virtual Exchange& exchange() = 0;

  // A window over memory of the caller, who keeps it. Collective over `exchange`; all ranks succeed or all throw: MISMATCH when
  // bytes differ, INVALID_ARGUMENT (alignment), UNSUPPORTED when NCCL cannot register it, SYSTEM.
  virtual std::unique_ptr<Window> adopt_window(std::byte* memory, int64_t bytes, Exchange& exchange) = 0;
};

// Collective over `exchange`; all ranks succeed or all throw: UNSUPPORTED (no GPU, two ranks on one GPU, an NCCL that
// nccl_versions.h does not list, or not the same on all ranks, ranks beyond one LSA domain, no symmetric memory), TIMEOUT, SYSTEM.
std::unique_ptr<NcclTransport> make_nccl_transport(int rank, int num_ranks, int64_t timeout_ms, Exchange& exchange);

} // namespace epx
