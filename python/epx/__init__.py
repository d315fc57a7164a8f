# SPDX-License-Identifier: Apache-2.0
"""epx: expert-parallel exchange for Mixture-of-Experts layers.

A Group has the operations of the C API on numpy arrays (prepare, dispatch, combine, the backwards, the rank-major calls, and
ragged_all_to_all); epx.moe has the MoE block, epx.jax the operations for JAX and epx.torch those for PyTorch. docs/python.md
begins with ten lines for each.
"""

from . import bootstrap
from ._formats import RowFormat
from ._library import libepx as _libepx, version_text as _version_text
from ._structs import CombinePrecision, EventKind, Operation, Overflow, Pads, Phase, ScaleLayout, Scaling, Status, Transport
from .errors import Error, EventError, GroupError, InvalidArgumentError, UnsupportedError
from .group import Group, Load, Plan, RankMajorPlan, memory_plan

__version__ = _version_text(_libepx.epx_version())

__all__ = [
    "CombinePrecision",
    "Error",
    "EventError",
    "EventKind",
    "Group",
    "GroupError",
    "InvalidArgumentError",
    "Load",
    "Operation",
    "Overflow",
    "Pads",
    "Phase",
    "Plan",
    "RankMajorPlan",
    "RowFormat",
    "ScaleLayout",
    "Scaling",
    "Status",
    "Transport",
    "UnsupportedError",
    "bootstrap",
    "memory_plan",
]
