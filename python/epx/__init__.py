# SPDX-License-Identifier: Apache-2.0
"""epx: expert-parallel exchange for Mixture-of-Experts layers.

A Group has the five operations of the C API on numpy arrays (prepare, dispatch, combine and the two backwards); epx.moe has the
MoE block, and epx.jax the operations for JAX. docs/python.md begins with ten lines for each.
"""

from . import bootstrap
from ._library import libepx as _libepx
from ._structs import CombinePrecision, EventKind, Operation, Overflow, Pads, Phase, Status, Transport
from .errors import Error, EventError, GroupError, InvalidArgumentError, UnsupportedError
from .group import Group, Plan, memory_plan

_version = _libepx.epx_version()
__version__ = f"{_version // 10000}.{_version // 100 % 100}.{_version % 100}"

__all__ = [
    "CombinePrecision",
    "Error",
    "EventError",
    "EventKind",
    "Group",
    "GroupError",
    "InvalidArgumentError",
    "Operation",
    "Overflow",
    "Pads",
    "Phase",
    "Plan",
    "Status",
    "Transport",
    "UnsupportedError",
    "bootstrap",
    "memory_plan",
]
