# SPDX-License-Identifier: Apache-2.0
"""How many ranks and nodes a token goes to: exact expectations over a random routing."""
import dataclasses
import functools
import math
from fractions import Fraction


@dataclasses.dataclass(frozen=True)
class Routing:
    """A token's top_k experts are distinct, and drawn uniformly from the experts of top_groups groups, which are drawn
    uniformly from num_groups groups of consecutive experts. One group is the uniform routing."""
    num_experts: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1

    def __post_init__(self):
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"the routing takes {self.top_groups} of {self.num_groups} groups; it must take at least one, and "
                             "no more than there are")
        if self.num_experts < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts cannot be split into {self.num_groups} groups of equal size")
        if not 1 <= self.top_k <= self.num_candidates:
            raise ValueError(f"top-k is {self.top_k}; it must be 1 to {self.num_candidates}, the experts that a token can "
                             "choose")

    @property
    def group_size(self):
        return self.num_experts // self.num_groups

    @property
    def num_candidates(self):
        """The experts that a token can still choose after its groups are chosen."""
        return self.top_groups * self.group_size

    def probability(self, first, end, count):
        """Returns the probability, a Fraction, that exactly `count` of a token's experts are in [first, end)."""
        overlaps = [min(end, start + self.group_size) - max(first, start)
                    for start in range(0, self.num_experts, self.group_size)]
        return _probability(self, tuple(sorted(overlap for overlap in overlaps if overlap > 0)), count)


@functools.lru_cache(maxsize=None)
def _probability(routing, overlaps, count):
    """overlaps: for each group that has some of the experts in question, how many of them."""
    # ways[groups, experts]: the choices of so many of the groups with overlaps, which have so many of the experts together.
    ways = {(0, 0): 1}
    for overlap in overlaps:
        for (groups, experts), number in list(ways.items()):
            key = (groups + 1, experts + overlap)
            ways[key] = ways.get(key, 0) + number
    rest, size, top_k = routing.num_groups - len(overlaps), routing.num_candidates, routing.top_k
    favorable = 0
    for (groups, experts), number in ways.items():
        if groups <= routing.top_groups and count <= top_k:
            favorable += (number * math.comb(rest, routing.top_groups - groups) * math.comb(experts, count)
                          * math.comb(size - experts, top_k - count))
    return Fraction(favorable, math.comb(routing.num_groups, routing.top_groups) * math.comb(size, top_k))


def experts_of_rank(num_experts, num_ranks, rank):
    """Returns (first, end) of the rank's experts: contiguous blocks, of which the first E mod P have one expert more."""
    each, more = divmod(num_experts, num_ranks)
    return rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more)


class Placement:
    """The expectations, over one token, for N nodes of G ranks; floats, by rank or by node."""

    def __init__(self, routing, nodes, ranks_per_node):
        num_ranks = nodes * ranks_per_node
        self.routing, self.nodes, self.ranks_per_node = routing, nodes, ranks_per_node
        self.experts = [experts_of_rank(routing.num_experts, num_ranks, rank) for rank in range(num_ranks)]
        # [P] the probability that the token goes to the rank, and that it has more than one route there; [P] expected routes
        self.rank_hit = [float(1 - routing.probability(*block, 0)) for block in self.experts]
        self.rank_hit_again = [float(1 - routing.probability(*block, 0) - routing.probability(*block, 1))
                               for block in self.experts]
        self.rank_routes = [routing.top_k * (end - first) / routing.num_experts for first, end in self.experts]
        # [N] the probability that the token goes to a rank of the node
        self.node_hit = [float(1 - routing.probability(self.experts[first][0], self.experts[first + ranks_per_node - 1][1], 0))
                         for first in range(0, num_ranks, ranks_per_node)]

    @property
    def distinct_ranks(self):
        return sum(self.rank_hit)

    @property
    def distinct_nodes(self):
        return sum(self.node_hit)
