# SPDX-License-Identifier: Apache-2.0
"""The rank-major layout with gradients: each token once for each rank that it goes to, without prepare.

Symbols in shapes: those of epx.group, and M, the rows of the receive tensors for each source rank.
"""

import dataclasses

import torch
from torch.autograd.graph import increment_version

from .._formats import RowFormat, on_wire, require_room_for_combine_bwd
from .._values import boolean, refuse, require_kind, require_one_size
from ._derivatives import differentiable_once
from ._formats import Operator, fake_format, received, split
from ._group import Group, call, require_usable
from ._library import groups, new_tensor, ops
from ._ops import _records, _refuse_transforms, _require_writable

_DISPATCH = Operator("dispatch_rank_major", tokens=0, rows=0, weights=3)
_combine, _combine_bwd = ops.combine_rank_major.default, ops.combine_rank_major_bwd.default
_dispatch_bwd = ops.dispatch_rank_major_bwd.default


@dataclasses.dataclass(eq=False)
class RankMajorPlan:
    """What dispatch_rank_major makes of top-k indices. All tensors lie on the group's device.

    max_rows: M.  compact: whether the rows of the ranks follow each other without gaps.  handle_mem: [bytes] uint8, the routing
    state that the other calls read; it may be copied, saved and used in any order.  counts: [P] int32, kept rows of each source
    rank: recv_tokens[r, :counts[r]], which are its tokens in ascending order; if compact they are the first counts.sum() of
    recv_tokens.flatten(0, 1), those of rank 0 first.  topk_idx: [P, M, K] int32, the local expert of each route to this rank, -1
    where it is masked or goes to another rank, and in rows that hold no token.
    """

    group: Group
    top_k: int
    num_tokens: int
    max_rows: int
    handle_mem: torch.Tensor
    topk_idx: torch.Tensor
    counts: torch.Tensor
    compact: bool = False

    @property
    def is_row(self) -> torch.Tensor:
        """[P, M] bool: which rows are kept ones."""
        if self.compact:
            rows = torch.arange(self.counts.shape[0] * self.max_rows, device=self.counts.device) < self.counts.sum()
            return rows.view(-1, self.max_rows)
        return torch.arange(self.max_rows, device=self.counts.device) < self.counts[:, None]


def _fake_plan(group, tokens, topk_idx, topk_weights, max_rows):
    known, top_k = groups[group], topk_idx.shape[1]
    weights = (0,) if topk_weights is None else (known.num_ranks, max_rows, top_k)
    return (
        new_tensor(tokens, known.handle_mem_size(top_k, 1), dtype=torch.uint8),
        new_tensor(tokens, known.num_ranks, max_rows, top_k, dtype=torch.int32),
        new_tensor(tokens, *weights, dtype=torch.float32),
        new_tensor(tokens, known.num_ranks, dtype=torch.int32),
    )


def _fake_dispatch(group, tokens, topk_idx, topk_weights, compact, max_rows, *sidecar):
    rows, *received = [new_tensor(each, groups[group].num_ranks, max_rows, each.shape[1]) for each in (tokens, *sidecar)]
    return rows, *_fake_plan(group, tokens, topk_idx, topk_weights, max_rows), *received


torch.library.register_fake("epx::dispatch_rank_major", _fake_dispatch)
torch.library.register_fake("epx::dispatch_rank_major_sidecar", _fake_dispatch)


@torch.library.register_fake("epx::dispatch_rank_major_format")
def _(group, tokens, topk_idx, topk_weights, compact, max_rows, codes, amax_floor, *scales_and_sidecar):
    plan = _fake_plan(group, tokens, topk_idx, topk_weights, max_rows)
    return fake_format(tokens, (groups[group].num_ranks, max_rows), codes, plan, scales_and_sidecar[-1])


@torch.library.register_fake("epx::dispatch_rank_major_into")
def _(group, tokens, topk_idx, topk_weights, compact, recv_tokens, sidecar, recv_sidecar):
    return _fake_plan(group, tokens, topk_idx, topk_weights, recv_tokens.shape[1])


@torch.library.register_fake("epx::combine_rank_major")
def _(group, handle_mem, expert_out, top_k, num_tokens, format=(), amax_floor=0.0):
    return new_tensor(expert_out, num_tokens, expert_out.shape[2])


@torch.library.register_fake("epx::combine_rank_major_bwd")
def _(group, handle_mem, grad_out, top_k, max_rows, format=(), amax_floor=0.0):
    return new_tensor(grad_out, groups[group].num_ranks, max_rows, grad_out.shape[1])


@torch.library.register_fake("epx::dispatch_rank_major_bwd")
def _(group, handle_mem, grad_recv, grad_recv_weights, top_k, num_tokens, format=(), amax_floor=0.0):
    weights = (0,) if grad_recv_weights is None else (num_tokens, top_k)
    return new_tensor(grad_recv, num_tokens, grad_recv.shape[2]), new_tensor(grad_recv, *weights, dtype=torch.float32)


class _Dispatch(torch.autograd.Function):
    """max_rows: of the tensor to make, or recv_tokens of the caller's, which becomes what is returned."""

    @staticmethod
    def forward(ctx, more, number, tokens, topk_idx, topk_weights, compact, max_rows):
        outputs = _DISPATCH.run(more, number, tokens, topk_idx, topk_weights, compact, max_rows)
        ctx.layer = number, topk_idx.shape[1], tokens.shape[0], topk_weights is not None
        ctx.save_for_backward(outputs[1])
        _DISPATCH.mark(ctx, more, max_rows if isinstance(max_rows, torch.Tensor) else None, outputs)
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx, *grads):
        grad_tokens, grad_weights = _dispatch_backward(ctx, *_DISPATCH.grads(ctx, grads))
        return None, None, grad_tokens if ctx.has_rows_gradient else None, None, grad_weights, None, None


def _dispatch_backward(ctx, grad_recv, grad_recv_weights):
    # All ranks make the same choice of weights: it depends on what all of them gave, not on who used what came of it.
    number, top_k, num_tokens, has_weights = ctx.layer
    (handle_mem,) = ctx.saved_tensors
    _refuse_transforms(grad_recv, grad_recv_weights)
    row_weights = grad_recv_weights.contiguous() if has_weights and ctx.needs_input_grad[4] else None
    args = handle_mem, grad_recv.contiguous(), row_weights, top_k, num_tokens
    grad_tokens, grad_weights = call(number, _dispatch_bwd, number, *args, *ctx.in_backward)
    return grad_tokens, None if row_weights is None else grad_weights


class _Combine(torch.autograd.Function):
    """formats: as in combine."""

    @staticmethod
    def forward(ctx, formats, number, handle_mem, expert_out, top_k, num_tokens):
        in_forward, in_backward = formats
        ctx.layer = number, top_k, expert_out.shape[1], in_backward
        ctx.save_for_backward(handle_mem)
        return call(number, _combine, number, handle_mem, expert_out, top_k, num_tokens, *in_forward)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_out):
        number, top_k, max_rows, in_backward = ctx.layer
        (handle_mem,) = ctx.saved_tensors
        _refuse_transforms(grad_out)
        grad_rows = call(number, _combine_bwd, number, handle_mem, grad_out.contiguous(), top_k, max_rows, *in_backward)
        return None, None, None, grad_rows, None, None


def dispatch_rank_major(
    group: Group,
    tokens: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    max_rows: int | None = None,
    compact: bool = False,
    recv_tokens: torch.Tensor | None = None,
    sidecar: torch.Tensor | None = None,
    format: RowFormat | None = None,
    with_wide: bool = False,
    grad_format: RowFormat | None = None,
) -> tuple:
    """Brings each token once to each rank that owns an expert of it. Collective, and so is its backward.

    tokens: [T, H] float32, float16 or bfloat16.  topk_idx: [T, K] int32 or int64, the global expert of each route; -1 masks it.
    topk_weights: [T, K] float32, or None on all ranks.  max_rows: M, the same on all ranks; tokens beyond are dropped, which
    group.check() tells; default group.max_tokens_per_rank, which is never too few.  compact: the same on all ranks; True: rows
    from all ranks follow each other without gaps, recv_tokens.flatten(0, 1)[:plan.counts.sum()]; the shapes are the same.
    recv_tokens: [P, M, H] to be written instead of a new tensor, in memory from group.empty() for instance; it requires no
    gradient, which the tensor that is returned has in its stead. Not under torch.compile.  sidecar, format, with_wide,
    grad_format: as in dispatch(), without scales in tiles.
    Returns (plan, recv_tokens [P, M, H], recv_weights [P, M, K] float32 or None); with a sidecar recv_sidecar [P, M, S] too, and
    with with_wide, last, the tensor [P, M, H] that stands for the rows. Scales by rows are [P, M, S], and row_scales [P, M].
    Weights are 0 where plan.topk_idx is -1. Rows of recv_tokens and recv_sidecar that hold no token hold whatever memory held,
    and so do those of the gradient that combine_rank_major's backward returns: leave them out of what you compute, by
    torch.where and plan.is_row for instance.
    """
    require_kind("group", group, Group)
    number = group.number
    tokens, more, records = split(group, tokens, topk_weights, sidecar, format, with_wide, grad_format, _records)
    require_usable(group, "topk_idx", topk_idx)
    args = number, tokens, topk_idx, topk_weights, boolean("compact", compact)
    if recv_tokens is None:
        run = _Dispatch.apply if records else _DISPATCH.run
        outputs = run(more, *args, group.max_tokens_per_rank if max_rows is None else max_rows)
    else:
        if format is not None:
            refuse("recv_tokens and format are given; with a format rows arrive in new tensors")
        if torch.compiler.is_compiling():
            refuse("recv_tokens is not supported under torch.compile, which cannot order operators that write")
        require_one_size("max_rows", max_rows, recv_tokens, "M")
        _require_writable(group, "recv_tokens", recv_tokens)
        if records:
            outputs = _Dispatch.apply(more, *args, recv_tokens.detach())  # so the caller's own tensor gets no history
        else:
            outputs = _DISPATCH.run(more, *args, recv_tokens)
            increment_version(recv_tokens)  # a tensor that was saved for a backward may have shared its memory
    rows, handle_mem, row_idx, weights, counts, *rest = outputs
    layer = topk_idx.shape[1], tokens.shape[0], rows.shape[1]
    plan = RankMajorPlan(group, *layer, handle_mem, row_idx, counts, compact)
    return plan, *received((rows, weights, *rest), topk_weights, sidecar, more)


def combine_rank_major(
    plan: RankMajorPlan,
    expert_out: torch.Tensor,
    *,
    format: RowFormat | None = None,
    grad_format: RowFormat | None = None,
) -> torch.Tensor:
    """Brings the rows back, which the caller has summed over each token's experts of this rank. Collective, and so is its
    backward. Refused in a group of combine_precision "exact".

    expert_out: [P, M, H] float32, float16 or bfloat16.  format, grad_format: as in combine().
    Returns out [T, H]: the sum of a token's kept rows over the ranks; zero for a token without one.
    """
    require_kind("plan", plan, RankMajorPlan)
    group, number = plan.group, plan.group.number
    require_usable(group, "expert_out", expert_out)
    args = number, plan.handle_mem, expert_out, plan.top_k, plan.num_tokens
    in_forward = on_wire("format", format, group, sums=True)
    in_backward = on_wire("grad_format", grad_format, group, expert_out.shape, sums=False)
    if _records(expert_out):
        require_room_for_combine_bwd(format, grad_format, group, expert_out.dtype)
        return _Combine.apply((in_forward, in_backward), *args)
    return call(number, _combine, *args, *in_forward)


__all__ = ["RankMajorPlan", "combine_rank_major", "dispatch_rank_major"]
