# SPDX-License-Identifier: Apache-2.0
"""epx for PyTorch: prepare, dispatch and combine with gradients, an MoE layer, and groups of torch.distributed.

group = epx.torch.Group(num_experts=8, ...)        # the ranks of torch.distributed's default group
layer = epx.torch.MoELayer(group, router=epx.moe.Router(top_k=2), ffn=epx.moe.Ffn(hidden_dim=512, ffn_dim=1024))
out = layer(tokens)                                 # on the current stream; out.backward() exchanges the gradients

Calls are collective: all ranks of a group make the same ones in the same order, backward too. Under torch.compile they have an
effect, so that they stay in the order of the program on every rank.
"""

from ._group import Group, OutOfMemoryError, empty, from_process_group
from ._layer import Arena, MoELayer, Routing, expert_parameter_names
from ._means import average_gradients
from ._ops import Plan, combine, dispatch, prepare, prepare_dispatch, saves_exchange
from ._rank_major import RankMajorPlan, combine_rank_major, dispatch_rank_major

__all__ = [
    "Arena",
    "Group",
    "MoELayer",
    "OutOfMemoryError",
    "Plan",
    "RankMajorPlan",
    "Routing",
    "average_gradients",
    "combine",
    "combine_rank_major",
    "dispatch",
    "dispatch_rank_major",
    "empty",
    "expert_parameter_names",
    "from_process_group",
    "prepare",
    "prepare_dispatch",
    "saves_exchange",
]
