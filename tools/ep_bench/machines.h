// SPDX-License-Identifier: Apache-2.0
// Tells which ranks of a run are processes of one machine. These need not be those of a node of the group: in tests NCCL_HOSTID
// splits the ranks of one machine into several nodes.
#pragma once

#include <array>
#include <span>

#include "tools/ep_bench/peers.h"

namespace epx::bench {

// A MachineName has the host name and the id of the boot, which hosts of equal names do not share.
using MachineName = std::array<char, 320>;

MachineName this_machine();

class Machines {
public:
  // `names` [P] are those of all ranks.
  Machines(std::span<const MachineName> names, int rank);
  explicit Machines(const Peers& peers) : Machines(peers.gather(this_machine()), peers.rank()) {} // collective

  bool is_one() const { return num_ranks_here_ == num_ranks_; }
  int num_ranks_here() const { return num_ranks_here_; } // ranks on this rank's machine, itself too

private:
  int num_ranks_;
  int num_ranks_here_;
};

} // namespace epx::bench
