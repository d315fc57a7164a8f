# SPDX-License-Identifier: Apache-2.0
"""prepare, dispatch and combine with gradients.

Symbols in shapes: those of epx.group. Gradients are those of autograd.Function, since torch.library.register_autograd costs
three times as much for each call.
"""

import dataclasses

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from .._formats import RowFormat, on_wire, require_room_for_combine_bwd
from .._structs import Pads
from .._values import count, refuse, refuse_choice, refuse_dtype, require_kind, require_one_size
from ._derivatives import differentiable_once
from ._formats import Operator, fake_format, received, split
from ._group import Group, call, require_usable
from ._library import groups, new_tensor, ops

_DISPATCH = Operator("dispatch", tokens=1, rows=0, weights=1)
_PREPARE_DISPATCH = Operator("prepare_dispatch", tokens=0, rows=2, weights=3)
_prepare, _combine = ops.prepare.default, ops.combine.default
_combine_bwd, _dispatch_bwd = ops.combine_bwd.default, ops.dispatch_bwd.default
_WEIGHTS_INPUT = 4  # topk_weights among the arguments of the functions that dispatch
_COUNTS_DTYPES = (torch.int32, torch.int64)
_PADS = {member.name.lower(): int(member) for member in Pads}


def size_of_info(dtype):
    """How many elements of a dtype prepare's info takes, 5 int64, which come first in its tensor of results."""
    return 5 * torch.int64.itemsize // dtype.itemsize


@dataclasses.dataclass(eq=False)
class Plan:
    """What prepare makes of top-k indices. All tensors lie on the group's device.

    handle_mem: [bytes] uint8, the routing state that the other calls read; it may be copied, saved and used in any order.
    results: info, counts, offsets and global_counts in one tensor, which spares prepare three allocations: each of the four is
    a view of it, made when it is asked for.
    """

    group: Group
    top_k: int
    alignment: int
    num_tokens: int
    handle_mem: torch.Tensor
    results: torch.Tensor

    def _counts(self, first, count):
        begin = size_of_info(self.results.dtype) + first
        return self.results[begin : begin + count]

    @property
    def info(self) -> torch.Tensor:
        """[5] int64: demand, kept, dropped (routes to this rank), dropped (routes of this rank), rows_needed."""
        return self.results[: size_of_info(self.results.dtype)].view(torch.int64)

    @property
    def counts(self) -> torch.Tensor:
        """[E_l] rows of each local expert, after drops, without padding."""
        return self._counts(0, self.group.num_local_experts)

    @property
    def offsets(self) -> torch.Tensor:
        """[E_l + 1] first slot of each zone; the last entry is where the last zone ends, E_l * Z with a zone_stride Z."""
        num_local = self.group.num_local_experts
        return self._counts(num_local, num_local + 1)

    @property
    def global_counts(self) -> torch.Tensor:
        """[P, E] routes from each rank to each expert, before drops."""
        num_ranks, num_experts = self.group.num_ranks, self.group.num_experts
        return self._counts(2 * self.group.num_local_experts + 1, num_ranks * num_experts).view(num_ranks, num_experts)

    @property
    def num_rows(self) -> int:
        """N of receive tensors that have all zones, which loses nothing: offsets[-1]. With a zone_stride not all of these rows
        are in use. On a GPU this waits for prepare."""
        return int(self.offsets[-1])


def _fake_plan(group, topk_idx, alignment, int64_counts, zone_stride=0):
    known = groups[group]
    known.require_layer(topk_idx.shape[1], alignment)
    dtype = torch.int64 if int64_counts else torch.int32
    num_counts = 2 * known.num_local_experts + 1 + known.num_ranks * known.num_experts
    return (
        new_tensor(topk_idx, known.handle_mem_size(topk_idx.shape[1], alignment), dtype=torch.uint8),
        new_tensor(topk_idx, size_of_info(dtype) + num_counts, dtype=dtype),
    )


torch.library.register_fake("epx::prepare", _fake_plan)


def _fake_rows(tokens, topk_weights, num_rows, *sidecar):
    weights = 0 if topk_weights is None else num_rows
    rows = new_tensor(tokens, num_rows, tokens.shape[1]), new_tensor(tokens, weights, dtype=torch.float32)
    return *rows, *[new_tensor(each, num_rows, each.shape[1]) for each in sidecar]


def _fake_prepare_dispatch(
    group, tokens, topk_idx, topk_weights, alignment, int64_counts, zone_stride, pads, num_rows, *sidecar
):
    return *_fake_plan(group, topk_idx, alignment, int64_counts), *_fake_rows(tokens, topk_weights, num_rows, *sidecar)


def _fake_dispatch(group, handle_mem, tokens, topk_weights, top_k, alignment, pads, num_rows, *sidecar):
    return _fake_rows(tokens, topk_weights, num_rows, *sidecar)


@torch.library.register_fake("epx::dispatch_format")
def _fake_dispatch_format(
    group, handle_mem, tokens, topk_weights, top_k, alignment, pads, num_rows, codes, amax_floor, *scales_and_sidecar
):
    weights = new_tensor(tokens, 0 if topk_weights is None else num_rows, dtype=torch.float32)
    return fake_format(tokens, (num_rows,), codes, [weights], scales_and_sidecar[-1])


@torch.library.register_fake("epx::prepare_dispatch_format")
def _(
    group,
    tokens,
    topk_idx,
    topk_weights,
    alignment,
    int64_counts,
    zone_stride,
    pads,
    num_rows,
    codes,
    amax_floor,
    *scales_and_sidecar,
):
    layer = topk_idx.shape[1], alignment, pads
    rows = _fake_dispatch_format(
        group, None, tokens, topk_weights, *layer, num_rows, codes, amax_floor, *scales_and_sidecar
    )
    return *_fake_plan(group, topk_idx, alignment, int64_counts), *rows


torch.library.register_fake("epx::prepare_dispatch", _fake_prepare_dispatch)
torch.library.register_fake("epx::prepare_dispatch_sidecar", _fake_prepare_dispatch)
torch.library.register_fake("epx::dispatch", _fake_dispatch)
torch.library.register_fake("epx::dispatch_sidecar", _fake_dispatch)


@torch.library.register_fake("epx::dispatch_into")
def _(group, handle_mem, tokens, topk_weights, top_k, alignment, pads, recv_tokens, sidecar, recv_sidecar):
    return new_tensor(tokens, 0 if topk_weights is None else recv_tokens.shape[0], dtype=torch.float32)


@torch.library.register_fake("epx::combine")
def _(group, handle_mem, expert_out, recv_weights, top_k, alignment, num_tokens, format=(), amax_floor=0.0):
    return new_tensor(expert_out, num_tokens, expert_out.shape[1])


@torch.library.register_fake("epx::combine_bwd")
def _(group, handle_mem, grad_out, expert_out, recv_weights, top_k, alignment, num_rows, format=(), amax_floor=0.0):
    weights = 0 if expert_out is None else num_rows
    return new_tensor(grad_out, num_rows, grad_out.shape[1]), new_tensor(grad_out, weights, dtype=torch.float32)


@torch.library.register_fake("epx::dispatch_bwd")
def _(group, handle_mem, grad_recv, grad_recv_weights, top_k, alignment, num_tokens, format=(), amax_floor=0.0):
    weights = (0,) if grad_recv_weights is None else (num_tokens, top_k)
    return new_tensor(grad_recv, num_tokens, grad_recv.shape[1]), new_tensor(grad_recv, *weights, dtype=torch.float32)


class _Dispatch(torch.autograd.Function):
    """num_rows: of the tensor to make, or recv_tokens of the caller's, which becomes what is returned."""

    @staticmethod
    def forward(ctx, more, number, handle_mem, tokens, topk_weights, top_k, alignment, pads, num_rows):
        ctx.layer = number, top_k, alignment, tokens.shape[0], topk_weights is not None
        ctx.save_for_backward(handle_mem)
        outputs = _DISPATCH.run(more, number, handle_mem, tokens, topk_weights, top_k, alignment, pads, num_rows)
        _DISPATCH.mark(ctx, more, num_rows if isinstance(num_rows, torch.Tensor) else None, outputs)
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx, *grads):
        grad_tokens, grad_weights = _dispatch_backward(ctx, *_DISPATCH.grads(ctx, grads))
        return None, None, None, grad_tokens if ctx.has_rows_gradient else None, grad_weights, *4 * [None]


class _PrepareDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, more, number, tokens, topk_idx, topk_weights, alignment, int64_counts, zone_stride, pads, num_rows):
        outputs = _PREPARE_DISPATCH.run(
            more, number, tokens, topk_idx, topk_weights, alignment, int64_counts, zone_stride, pads, num_rows
        )
        ctx.layer = number, topk_idx.shape[1], alignment, tokens.shape[0], topk_weights is not None
        ctx.save_for_backward(outputs[0])
        _PREPARE_DISPATCH.mark(ctx, more, None, outputs)
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx, *grads):
        grad_tokens, grad_weights = _dispatch_backward(ctx, *_PREPARE_DISPATCH.grads(ctx, grads))
        return None, None, grad_tokens if ctx.has_rows_gradient else None, None, grad_weights, *5 * [None]


def _dispatch_backward(ctx, grad_recv, grad_recv_weights):
    """The gradients of tokens and of topk_weights. All ranks make the same choice of weights: it depends on what all of them
    gave, not on who used what came of it."""
    number, top_k, alignment, num_tokens, has_weights = ctx.layer
    (handle_mem,) = ctx.saved_tensors
    _refuse_transforms(grad_recv, grad_recv_weights)
    row_weights = grad_recv_weights.contiguous() if has_weights and ctx.needs_input_grad[_WEIGHTS_INPUT] else None
    args = handle_mem, grad_recv.contiguous(), row_weights, top_k, alignment, num_tokens
    grad_tokens, grad_weights = call(number, _dispatch_bwd, number, *args, *ctx.in_backward)
    return grad_tokens, None if row_weights is None else grad_weights


class _Combine(torch.autograd.Function):
    """formats: the operators' arguments of those in which rows travel, forward and backward."""

    @staticmethod
    def forward(ctx, formats, number, handle_mem, expert_out, recv_weights, top_k, alignment, num_tokens):
        in_forward, in_backward = formats
        ctx.layer = number, top_k, alignment, expert_out.shape[0], in_backward
        wants_weights = recv_weights is not None and ctx.needs_input_grad[4]
        ctx.save_for_backward(handle_mem, expert_out if wants_weights else None, recv_weights)
        args = handle_mem, expert_out, recv_weights, top_k, alignment, num_tokens
        return call(number, _combine, number, *args, *in_forward)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_out):
        number, top_k, alignment, num_rows, in_backward = ctx.layer
        handle_mem, expert_out, recv_weights = ctx.saved_tensors
        _refuse_transforms(grad_out)
        args = handle_mem, grad_out.contiguous(), expert_out, recv_weights, top_k, alignment, num_rows
        grad_rows, grad_weights = call(number, _combine_bwd, number, *args, *in_backward)
        return None, None, None, grad_rows, None if expert_out is None else grad_weights, None, None, None


def _refuse_transforms(*tensors):
    """Refuses what PyTorch would give wrong or no derivatives for: torch.func's transforms, vmap, and forward mode."""
    if torch.compiler.is_compiling():
        return  # there the operators themselves refuse vmap
    if torch._C._are_functorch_transforms_active():
        refuse(
            "epx's operations cannot be called under vmap or another transform of torch.func: each call is one exchange of all "
            "ranks; use loss.backward() or torch.autograd.grad for gradients"
        )
    if forward_ad._current_level >= 0 and any(
        [tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors]
    ):
        refuse("epx's operations have no forward-mode derivatives: use loss.backward() or torch.autograd.grad")


def _records(*tensors):
    """Whether autograd records a call on these tensors."""
    _refuse_transforms(*tensors)
    return torch.is_grad_enabled() and any([tensor is not None and tensor.requires_grad for tensor in tensors])


def _require_writable(group, name, tensor):
    """Refuses a tensor that autograd has a history or a gradient of: only what the call returns has those of its rows."""
    require_usable(group, name, tensor)
    if tensor.requires_grad:
        refuse(f"{name} requires a gradient: give memory that does not, and use the tensor that the call returns")


def _is_int64(counts_dtype):
    if counts_dtype not in _COUNTS_DTYPES:
        refuse_dtype("counts_dtype", counts_dtype, _COUNTS_DTYPES)
    return counts_dtype == torch.int64


def _pads(pads):
    if pads not in _PADS:
        refuse_choice("pads", pads, _PADS)
    return _PADS[pads]


def _zone_stride(rows):
    """torch.compile cannot trace the check; there the library refuses what is negative, and the operator what is no integer."""
    return rows if torch.compiler.is_compiling() else count("zone_stride", rows)


def prepare(
    group: Group,
    topk_idx: torch.Tensor,
    *,
    alignment: int = 1,
    counts_dtype: torch.dtype = torch.int32,
    zone_stride: int = 0,
) -> Plan:
    """Turns top-k indices into a Plan. Collective.

    topk_idx: [T, K] int32 or int64, the global expert of each route; -1 masks it.  alignment: rows that zones are padded to.
    counts_dtype: torch.int32 or torch.int64, of counts, offsets and global_counts.
    zone_stride: rows from one zone to the next, a multiple of alignment, the same on all ranks. Routes to an expert beyond it
    are dropped. Rows of a zone behind its pads hold whatever memory held, in dispatch and in the gradient of combine. 0: a
    zone begins where the one before it ends.
    """
    require_kind("group", group, Group)
    number = group.number
    require_usable(group, "topk_idx", topk_idx)
    _refuse_transforms(topk_idx)
    made = call(number, _prepare, number, topk_idx, alignment, _is_int64(counts_dtype), _zone_stride(zone_stride))
    return Plan(group, topk_idx.shape[1], alignment, topk_idx.shape[0], *made)


def prepare_dispatch(
    group: Group,
    tokens: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    alignment: int = 1,
    counts_dtype: torch.dtype = torch.int32,
    num_rows: int | None = None,
    pads: str = "zero",
    sidecar: torch.Tensor | None = None,
    format: RowFormat | None = None,
    with_wide: bool = False,
    grad_format: RowFormat | None = None,
    zone_stride: int = 0,
) -> tuple:
    """prepare and dispatch in one call, which is the faster form unless tokens are many and SMs few. Collective, and so is its
    backward; all ranks make this call, or all make the two others.

    tokens: [T, H], or a tuple with a format.  topk_idx: [T, K] int32 or int64.  topk_weights: [T, K] float32, or None on all
    ranks.  num_rows: N, which is chosen before plan.num_rows is known; default: R, group.max_recv_tokens_per_rank, which always
    suffices.  The other options are those of the two.
    Returns (plan, recv_tokens [N, H], recv_weights [N] float32 or None); with a sidecar recv_sidecar [N, S] too, and with
    with_wide, last, the tensor that stands for the rows.
    """
    require_kind("group", group, Group)
    number, int64_counts = group.number, _is_int64(counts_dtype)
    if num_rows is None:
        num_rows = group.max_recv_tokens_per_rank
    tokens, more, records = split(group, tokens, topk_weights, sidecar, format, with_wide, grad_format, _records)
    require_usable(group, "topk_idx", topk_idx)
    plan_args = alignment, int64_counts, _zone_stride(zone_stride)
    args = number, tokens, topk_idx, topk_weights, *plan_args, _pads(pads), num_rows
    run = _PrepareDispatch.apply if records else _PREPARE_DISPATCH.run
    handle_mem, results, *rows = run(more, *args)
    plan = Plan(group, topk_idx.shape[1], alignment, topk_idx.shape[0], handle_mem, results)
    return plan, *received(rows, topk_weights, sidecar, more)


def dispatch(
    plan: Plan,
    tokens: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    num_rows: int | None = None,
    recv_tokens: torch.Tensor | None = None,
    pads: str = "zero",
    sidecar: torch.Tensor | None = None,
    format: RowFormat | None = None,
    with_wide: bool = False,
    grad_format: RowFormat | None = None,
) -> tuple:
    """Brings tokens to the ranks of their experts. Collective, and so is its backward.

    tokens: [T, H] float32, float16 or bfloat16; or of 8 or 4 bits, which are copied.  topk_weights: [T, K] float32, or None on
    all ranks.
    num_rows: N. Without it plan.num_rows, for which a GPU is waited for; torch.compile and CUDA graphs need a number that does
    not depend on the routing, group.max_recv_tokens_per_rank at most.
    recv_tokens: [N, H] to be written instead of a new tensor, in memory from group.empty() for instance; it requires no
    gradient, which the tensor that is returned has in its stead. Not under torch.compile.  pads: "zero", or "untouched": pads
    inside zones hold whatever memory held.  sidecar: [T, S] of any dtype, block scales for instance, with the same bytes of a row
    on all ranks, at most group.max_sidecar_bytes; or None on all ranks. It has no gradient.
    format: an epx.RowFormat, or None on all ranks. With one the rows travel in 8 or 4 bits; tokens, recv_tokens or both are
    tuples (rows, scales), with NV (rows, scales, row_scales), as it says. Rows are float8_e4m3fn, float8_e5m2, or
    float4_e2m1fn_x2 [..., H / 2]. recv_tokens cannot be given. Rows that come quantised have no gradient, and that of wide rows
    is the one that dispatch has without a format.  with_wide: the same on all ranks; where wide rows arrive quantised, also
    returns a tensor [N, H] of tokens' dtype that stands for the rows: give it to the autograd.Function that computes with them,
    which returns their gradient for it. It has one element of memory, and its elements are 0.
    grad_format: an epx.RowFormat of "block128" or "mx" with wire_only, or None on all ranks: the format in which the ranks' partial
    sums of the rows' gradients travel home in the backward. It needs combine_precision "wire". With the default amax_floor of
    "block128" small gradients vanish: give it amax_floor=0.
    Returns (recv_tokens [N, H], recv_weights [N] float32 or None); with a sidecar recv_sidecar [N, S] of its dtype too, and
    with with_wide, last, the tensor that stands for the rows. Rows behind plan.num_rows hold whatever memory held, and so do
    those of the gradient that combine's backward returns, whose pads are zero.
    """
    require_kind("plan", plan, Plan)
    group, number = plan.group, plan.group.number
    pads = _pads(pads)
    tokens, more, records = split(group, tokens, topk_weights, sidecar, format, with_wide, grad_format, _records)
    args = number, plan.handle_mem, tokens, topk_weights, plan.top_k, plan.alignment, pads
    if recv_tokens is not None:
        require_one_size("num_rows", num_rows, recv_tokens, "N")
        if format is not None:
            refuse("recv_tokens and format are given; with a format rows arrive in new tensors")
        if torch.compiler.is_compiling():
            refuse("dispatch into recv_tokens is not supported under torch.compile, which cannot order operators that write")
        _require_writable(group, "recv_tokens", recv_tokens)
        if records:
            rows = _Dispatch.apply(more, *args, recv_tokens.detach())  # so the caller's own tensor gets no history
        else:
            rows = _DISPATCH.run(more, *args, recv_tokens)
            increment_version(recv_tokens)  # a tensor that was saved for a backward may have shared its memory
    else:
        if num_rows is None:
            if torch.compiler.is_compiling():
                refuse("dispatch needs num_rows under torch.compile: group.max_recv_tokens_per_rank, or a bound that suffices")
            num_rows = plan.num_rows
        rows = (_Dispatch.apply if records else _DISPATCH.run)(more, *args, num_rows)
    return received(rows, topk_weights, sidecar, more)


def combine(
    plan: Plan,
    expert_out: torch.Tensor,
    recv_weights: torch.Tensor | None = None,
    *,
    format: RowFormat | None = None,
    grad_format: RowFormat | None = None,
) -> torch.Tensor:
    """Brings the experts' outputs back. Collective, and so is its backward.

    expert_out: [N, H] float32, float16 or bfloat16.  recv_weights: [N] float32 as dispatch returned them, or None: all 1.
    format: an epx.RowFormat of "block128" or "mx" with wire_only, or None on all ranks: the format in which the ranks' partial sums
    travel home. It needs combine_precision "wire". Gradients are those of a combine without it.
    grad_format: an epx.RowFormat with wire_only, or None on all ranks: the format in which the gradient of out travels in the
    backward. The gradients of expert_out and of recv_weights are then those of a gradient that has been quantised. With the
    default amax_floor of "block128" small sums and gradients vanish: give both formats amax_floor=0.
    Returns out [T, H]: the sum over a token's routes of weight * row; zero for a token without routes.
    """
    require_kind("plan", plan, Plan)
    group, number = plan.group, plan.group.number
    require_usable(group, "expert_out", expert_out)
    if recv_weights is not None:
        require_usable(group, "recv_weights", recv_weights)
    args = number, plan.handle_mem, expert_out, recv_weights, plan.top_k, plan.alignment, plan.num_tokens
    in_forward = on_wire("format", format, group, sums=True)
    in_backward = on_wire("grad_format", grad_format, group, expert_out.shape, sums=False)
    if _records(expert_out, recv_weights):
        require_room_for_combine_bwd(format, grad_format, group, expert_out.dtype)
        return _Combine.apply((in_forward, in_backward), *args)
    return call(number, _combine, *args, *in_forward)


def saves_exchange():
    """A context_fn for torch.utils.checkpoint.checkpoint(..., use_reentrant=False): what epx's operations return is saved, and
    everything else is computed again in the backward. Without it they are called again there, on all ranks alike; under
    torch.compile it is required, since PyTorch 2.11 does not compute operators with an effect again."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(_context, op, *_args, **_kwargs):
        # torch.compile asks for the operator that passes the effect's token through.
        is_own = getattr(op, "namespace", "") == "epx" or op is torch.ops.higher_order.with_effects
        is_exchange = is_own and op is not ops.quantise_weights.default  # whose results are large
        return CheckpointPolicy.MUST_SAVE if is_exchange else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


__all__ = ["Plan", "combine", "dispatch", "prepare", "prepare_dispatch", "saves_exchange"]
