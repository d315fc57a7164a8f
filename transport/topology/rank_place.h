// SPDX-License-Identifier: Apache-2.0
// A RankPlace says on which machine a rank runs, as far as that decides which ranks form a node.
#pragma once

#include <array>
#include <cstdint>

#include "transport/process_origin.h"

namespace epx {

// The NVLink fabric that a GPU belongs to, where one spans several machines (multi-node NVLink). All zeros: none.
struct GpuFabric {
  std::array<unsigned char, 16> cluster{}; // UUID
  uint32_t clique = 0;                     // GPUs of one cluster and clique reach each other's memory

  bool operator==(const GpuFabric&) const = default;
  bool is_known() const { return cluster != std::array<unsigned char, 16>{}; }
};

struct RankPlace {
  std::array<char, 64> host{};    // host name, padded with zeros
  std::array<char, 40> boot_id{}; // of the kernel; padded with zeros, and all zeros where it is not known
  std::array<char, 64> host_id{}; // the beginning of NCCL_HOSTID, padded with zeros; all zeros where it is not set
  uint64_t host_id_hash = 0;      // of all of NCCL_HOSTID; 0 where it is not set
  GpuFabric fabric;
};

// Returns whether two ranks are on one node: their GPUs are on one NVLink fabric, or, where there is none, they have the same
// NCCL_HOSTID, or, where it is not set, the same host name and boot. NCCL decides likewise which ranks share a machine.
bool on_one_node(const RankPlace& a, const RankPlace& b);

// Describes the place of this process; its fabric is left unknown.
RankPlace this_rank_place();

} // namespace epx
