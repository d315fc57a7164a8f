# SPDX-License-Identifier: Apache-2.0
"""The plans of the operations, as pytrees."""

import dataclasses
import functools
import weakref

import jax

from .._values import refuse_destroyed, require_kind
from ._groups import require_usable


def reference_to(group):
    """What a plan has its group by, as a static field. JAX keeps static fields of what compiled functions took and returned, and
    would keep the group alive."""
    reference = weakref.ref(group)
    hash(reference)  # which it then has for good
    return reference


def group_of(plan, kind):
    """The group that calls with this plan are made in."""
    require_kind("plan", plan, kind)
    group = plan.group
    require_usable(group)
    return group


class _HasGroup:
    @property
    def group(self):
        """The epx.Group that made the plan. A plan does not keep it alive."""
        group = self.group_reference()
        if group is None:
            refuse_destroyed("group")
        return group


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["handle_mem", "counts", "offsets", "global_counts", "info", "slot"],
    meta_fields=["group_reference", "top_k", "alignment", "zone_stride", "num_tokens", "zero_unused"],
)
@dataclasses.dataclass(frozen=True)
class Plan(_HasGroup):
    """What prepare() makes of top-k indices, as a pytree. handle_mem: [bytes] uint8.  counts: [E_l] int32, rows of each local
    expert. offsets: [E_l + 1] int32, first row of each zone; the last entry is where the last zone ends, E_l * Z with a
    zone_stride Z.  global_counts: [P, E] int32, routes from each rank to each expert, before drops.  info: [5] int32: demand,
    kept, dropped (routes to this rank), dropped (routes of this rank), rows_needed; 2^31 - 1 stands for more.  slot: [T, K]
    int32, the row of each route on its expert's rank, -1 where it is masked or dropped; or None. group, top_k, alignment,
    zone_stride, num_tokens and zero_unused are static."""

    handle_mem: jax.Array
    counts: jax.Array
    offsets: jax.Array
    global_counts: jax.Array
    info: jax.Array
    slot: jax.Array | None
    group_reference: weakref.ref
    top_k: int
    alignment: int
    zone_stride: int
    num_tokens: int
    zero_unused: bool

    @property
    def _zones(self):
        """What rows_in_use() takes."""
        return self.counts if self.zone_stride else self.offsets


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["handle_mem", "counts", "topk_idx"],
    meta_fields=["group_reference", "top_k", "num_tokens", "max_rows", "compact", "zero_unused"],
)
@dataclasses.dataclass(frozen=True)
class RankMajorPlan(_HasGroup):
    """What dispatch_rank_major() has received from whom, as a pytree. handle_mem: [bytes] uint8.  counts: [P] int32, kept rows
    from each rank.  topk_idx: [P, M, K] int32, the local expert, 0 to E_l - 1, of each route to this rank; -1 where the route
    is masked or goes to another rank, and in rows that hold no token. group, top_k, num_tokens, max_rows (M), compact and
    zero_unused are static. If compact, rows from all ranks follow each other: they are the first sum(counts) of P * M."""

    handle_mem: jax.Array
    counts: jax.Array
    topk_idx: jax.Array
    group_reference: weakref.ref
    top_k: int
    num_tokens: int
    max_rows: int
    compact: bool
    zero_unused: bool
