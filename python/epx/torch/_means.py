# SPDX-License-Identifier: Apache-2.0
"""Means of gradients over ranks: of a router's weights in a group, by the group's own operations, and of other parameters over
a process group of torch.distributed.

The group's operations need no communicator beside it, are part of its one sequence of calls, run in CUDA graphs and with any
bootstrap, and give all ranks the same bits. Each row of the gradient goes to one rank (dispatch), which has those of all ranks
in rank order, and their mean comes back (combine).
"""

import torch
import torch.distributed

from .._values import refuse, refuse_destroyed
from ._derivatives import differentiable_once
from ._group import call
from ._library import groups, keep_in_order, ops

_BYTES = torch.float32.itemsize
_TOP_K = _ALIGNMENT = 1


class _Routes:
    """Where the rows of a gradient go for their mean: a plan of the group that all layers share. Created by all ranks.

    Rows are float32. A group whose max_token_dtype is narrower moves each as four, of its first to its fourth bytes: numbers
    from 0 to 255, which any dtype holds, and which combine leaves as they are.
    num_rows: those of a call; 0 where the group has no room for one. num_own: those of them whose mean this rank computes.
    """

    def __init__(self, group):
        self.dtype = getattr(torch, group.max_token_dtype)
        self.parts = 1 if self.dtype == torch.float32 else _BYTES
        num_ranks, num_experts = group.num_ranks, group.num_experts
        owners = min(num_ranks, num_experts)  # a rank without experts receives nothing
        room = min(group.max_call_tokens, owners * (group.max_recv_tokens_per_rank // num_ranks // self.parts * self.parts))
        limit = room // self.parts
        self.num_rows = -(-num_experts // -(-num_experts // limit)) if limit else 0  # in as few calls, of the same size
        if limit:
            base, more = divmod(num_experts, num_ranks)
            first_experts = [rank * base + min(rank, more) for rank in range(owners)]
            topk_idx = [[first_experts[row % owners]] for row in range(self.num_rows) for _ in range(self.parts)]
            self.num_own = len(range(group.rank, self.num_rows, owners)) if group.rank < owners else 0
            topk_idx = torch.tensor(topk_idx, dtype=torch.int32, device=group.device)
            self.handle_mem, _ = call(group.number, ops.prepare.default, group.number, topk_idx, _ALIGNMENT, False)

    def encode(self, rows):
        """[..., H] float32 as [..., parts, H] of the group's dtype."""
        if self.parts == 1:
            return rows.unsqueeze(-2)
        return rows.flatten().view(torch.uint8).view(*rows.shape, _BYTES).transpose(-1, -2).to(self.dtype)

    def decode(self, rows):
        """The other way."""
        if self.parts == 1:
            return rows.squeeze(-2)
        values = rows.to(torch.uint8).transpose(-1, -2).flatten().view(torch.float32)
        return values.view(*rows.shape[:-2], rows.shape[-1])

    def mean(self, group, rows):
        """The mean over the ranks of [num_rows, H]."""
        number, num_ranks, hidden = group.number, group.num_ranks, rows.shape[1]
        sent = self.encode(rows).reshape(self.num_rows * self.parts, hidden)
        num_received = num_ranks * self.num_own * self.parts
        pads = 0  # there are none
        received, _ = ops.dispatch(number, self.handle_mem, sent, None, _TOP_K, _ALIGNMENT, pads, num_received)
        # The one zone in use has the rows of rank 0 first, then those of rank 1, and so on.
        mean = self.decode(received.view(num_ranks, self.num_own, self.parts, hidden)).sum(0) / num_ranks
        answer = self.encode(mean).expand(num_ranks, self.num_own, self.parts, hidden).reshape(num_received, hidden)
        home = ops.combine(number, self.handle_mem, answer, None, _TOP_K, _ALIGNMENT, len(sent))
        return self.decode(home.view(self.num_rows, self.parts, hidden))


def _mean_over_ranks(group: int, rows: torch.Tensor) -> torch.Tensor:
    known = groups.get(group)
    if known is None:
        refuse_destroyed("group")
    num_rows, means = known.mean_routes.num_rows, []
    for part in rows.split(num_rows):
        missing = num_rows - len(part)
        padded = torch.nn.functional.pad(part, (0, 0, 0, missing)) if missing else part
        means.append(known.mean_routes.mean(known, padded)[: len(part)])
    return torch.cat(means)


# An operator, so that compiled graphs have it between the calls of the block in the order of the program.
_library = torch.library.Library("epx", "FRAGMENT")
_library.define("mean_over_ranks(int group, Tensor rows) -> Tensor")
_library.impl("mean_over_ranks", _mean_over_ranks, "CompositeExplicitAutograd")
torch.library.register_fake("epx::mean_over_ranks", lambda group, rows: torch.empty_like(rows), lib=_library)
keep_in_order("mean_over_ranks")


class _MeanGradient(torch.autograd.Function):
    """A parameter, whose gradient is the mean over the ranks of a group."""

    @staticmethod
    def forward(ctx, number, parameter):
        ctx.number = number
        return parameter.view_as(parameter)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        return None, call(ctx.number, ops.mean_over_ranks.default, ctx.number, grad.contiguous())


def create_mean_routes(group) -> None:
    """Makes the group ready for with_mean_gradient(). Collective."""
    if group.mean_routes is None:
        group.mean_routes = _Routes(group)


def with_mean_gradient(group, name, parameter):
    """The parameter [E, H], float32, for a use whose backward gives it the mean of its gradients over the group's ranks.
    The mean is part of the backward itself and not of a hook, so that DistributedDataParallel and FSDP2, which look at what
    arrives at the parameter, find it there."""
    if group.mean_routes.num_rows == 0:
        refuse(
            f"the mean of {name}'s gradient needs {group.mean_routes.parts} tokens and receive rows of each rank in a call, and "
            f"{group!r} has max_tokens_per_rank {group.max_tokens_per_rank} and max_recv_tokens_per_rank "
            f"{group.max_recv_tokens_per_rank}: create it with larger ones, or the layer with reduce_gradients='none'"
        )
    return _MeanGradient.apply(group.number, parameter)


def average_gradients(parameters, process_group: "torch.distributed.ProcessGroup | None" = None) -> None:
    """Has each backward give the parameters the mean of their gradients over the ranks of a process group of torch.distributed,
    by default the default one. Called once, on all of these ranks, for parameters that no DistributedDataParallel and no FSDP
    reduces over them: experts that several groups have, for instance. The backward is then collective among them."""
    num_ranks = torch.distributed.get_world_size(process_group)

    def average(grad):
        mean = grad / num_ranks
        torch.distributed.all_reduce(mean, group=process_group)
        return mean

    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else list(parameters):
        parameter.register_hook(average)


__all__ = ["average_gradients"]
