# SPDX-License-Identifier: Apache-2.0
"""What prepare() and dispatch_rank_major() return. Symbols in shapes: those of epx.group."""

import dataclasses

import numpy


@dataclasses.dataclass(frozen=True)
class Load:
    """How the routing of a prepare loads the ranks, and what it needs of the receive capacity: the same on all ranks.

    routes: of all ranks.  dropped: those beyond a rank's receive capacity, or the zone_stride.  rows_needed: by the rank that
    needs most, pads included; without a zone_stride a max_recv_tokens_per_rank of as many drops nothing.
    most_routes_of_rank, most_routes_of_expert: balanced they are routes / P and routes / E.
    """

    routes: int
    dropped: int
    rows_needed: int
    most_routes_of_rank: int
    most_routes_of_expert: int


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What prepare() makes of top-k indices: the handle memory that the other four operations take, and what it says.

    top_k, alignment: of the layer.  num_tokens: T.  handle_mem: [bytes] uint8, of use in this group alone.
    counts: [E_l] rows of each local expert, after drops, without padding.  offsets: [E_l + 1] first slot of each zone; the last
    entry is where the last zone ends, E_l * Z with a zone_stride Z.  global_counts: [P, E] routes from each rank to each expert,
    before drops.  info: [5] int64: demand, kept, dropped (routes to this rank), dropped (routes of this rank), rows_needed.
    slot: [T, K] int32 slot of each route on its expert's rank, or None.  slot_origin: [R, 3] int32 (source rank, token, k) of
    each slot, or None.
    """

    top_k: int
    alignment: int
    num_tokens: int
    handle_mem: numpy.ndarray
    counts: numpy.ndarray
    offsets: numpy.ndarray
    global_counts: numpy.ndarray
    info: numpy.ndarray
    slot: numpy.ndarray | None
    slot_origin: numpy.ndarray | None

    @property
    def num_rows(self) -> int:
        """N of receive arrays that have all zones, which loses nothing: offsets[-1]. With a zone_stride not all of these rows
        are in use."""
        return int(self.offsets[-1])


@dataclasses.dataclass(frozen=True, eq=False)
class RankMajorPlan:
    """What dispatch_rank_major() has received from whom, and the handle memory that the three other rank-major calls take.

    top_k: of the layer.  num_tokens: T.  max_rows: M.  compact: whether the rows of the ranks follow each other without gaps.
    handle_mem: [bytes] uint8, of use in this group alone.
    counts: [P] kept rows from each rank; those that hold a token are recv_tokens[r, :counts[r]]. If compact they are the first
    num_rows of the P * M rows: those from rank 0, then those from rank 1, and so on.
    topk_idx: [P, M, K] int32, the local expert, 0 to E_l - 1, of each route to this rank; -1 where the route is masked or goes
    to another rank, and in rows that hold no token.
    """

    top_k: int
    num_tokens: int
    max_rows: int
    handle_mem: numpy.ndarray
    counts: numpy.ndarray
    topk_idx: numpy.ndarray
    compact: bool = False

    alignment = 1  # the layout has no zones

    @property
    def num_rows(self) -> int:
        """How many rows hold a token."""
        return int(self.counts.sum())


def read_only(plan):
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, numpy.ndarray):
            value.flags.writeable = False
    return plan
