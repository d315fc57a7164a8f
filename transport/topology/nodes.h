// SPDX-License-Identifier: Apache-2.0
// The nodes of a group: the sets of its ranks that reach each other's memory. Nodes have the same number of ranks, and the
// ranks of a node follow each other, so that rank r is on node r / ranks_per_node.
//
// These functions depend on their arguments alone: called with the places of all ranks, they yield or refuse the same on each.
#pragma once

#include <span>
#include <string>

#include "transport/topology/rank_place.h"

namespace epx {

// Returns the number of ranks of each node. `places` [P], by rank of the group. Throws UNSUPPORTED, with the nodes that were
// found, when ranks of one node do not follow each other, when nodes differ in their number of ranks, or when two machines have
// the same NCCL_HOSTID.
int find_ranks_per_node(std::span<const RankPlace> places);

// Returns "\"a\" (ranks 0-3), \"b\" (ranks 4-7)" for nodes that find_ranks_per_node has accepted; the first four, and the
// number of the others.
std::string describe_nodes(std::span<const RankPlace> places, int ranks_per_node);

// Throws UNSUPPORTED when two ranks are known to run on machines of different boots, which share no memory.
void require_one_machine(std::span<const RankPlace> places);

} // namespace epx
