# SPDX-License-Identifier: Apache-2.0
"""Row formats: what the operators take and return of them, and where their gradients go.

The rows of a dispatch have a gradient where they are wide. PyTorch casts the gradient of a tensor to the tensor's dtype, which
of quantised rows is one of 8 or 4 bits. So theirs comes through a tensor that stands for them (`with_wide`)."""

import typing

import torch

from .._formats import ZEROS_DTYPE, dtype_name, format_of, on_wire, parts_of_tokens, require_room_for_gradients
from .._values import refuse
from ._group import call, require_usable
from ._library import new_tensor, ops
from ._sidecars import as_bytes

_WIDE = torch.float32, torch.float16, torch.bfloat16


def _dtype_of(name):
    return torch.float4_e2m1fn_x2 if name == "float4_e2m1fn" else getattr(torch, name)


class More(typing.NamedTuple):
    """What a dispatch takes beside rows and weights where there is more: a sidecar's bytes or None, the format in which gradients
    travel home, and the operators' arguments of the rows' own format. There are no codes without one."""

    sidecar: torch.Tensor | None
    in_backward: tuple = ()
    codes: tuple[int, ...] | None = None
    amax_floor: float = 0.0
    scales: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None
    encode_scale: torch.Tensor | None = None
    with_wide: bool = False
    num_parts: int = 1  # that recv_tokens is


class Operator:
    """An operator that dispatches: alone, with a sidecar, with a format, or into memory of the caller's. tokens: their place among
    the arguments behind the group's number, of which the last is the number of rows to make, or recv_tokens to write.  rows,
    weights: the places of recv_tokens and recv_weights among the results."""

    def __init__(self, name, tokens, rows, weights):
        self.alone, self.with_sidecar, self.with_format = [
            getattr(ops, name + variant).default for variant in ("", "_sidecar", "_format")
        ]
        self.into = None if name == "prepare_dispatch" else getattr(ops, name + "_into").default
        self.tokens, self.rows, self.weights = tokens, rows, weights

    def run(self, more, number, *args):
        """Makes the call. Returns what that alone does, and behind it the bytes of a sidecar, scales and row_scales where there
        are some, and last, where it is wanted, the tensor that stands for quantised rows. That has one element of memory."""
        sidecar = None if more is None else more.sidecar
        if isinstance(args[-1], torch.Tensor):
            return self._run_into(sidecar, number, *args)
        if more is None or (more.codes is None and sidecar is None):
            return call(number, self.alone, number, *args)
        if more.codes is None:
            return call(number, self.with_sidecar, number, *args, sidecar)
        in_format = list(more.codes), more.amax_floor, more.scales, more.row_scales, more.encode_scale, sidecar
        *results, scales, row_scales, recv_sidecar = call(number, self.with_format, number, *args, *in_format)
        sidecars = [] if sidecar is None else [recv_sidecar]
        wide = []
        if more.with_wide:
            tokens = args[self.tokens]
            wide = [tokens.new_zeros(1).expand(*results[self.rows].shape[:-1], tokens.shape[1])]
        return *results, *sidecars, *[scales, row_scales][: more.num_parts - 1], *wide

    def _run_into(self, sidecar, number, *args):
        recv_tokens = args[-1]
        sidecars = [] if sidecar is None else [sidecar.new_empty(*recv_tokens.shape[:-1], sidecar.shape[1])]
        made = call(number, self.into, number, *args, sidecar, *(sidecars or [None]))
        return recv_tokens, *(made if isinstance(made, tuple) else (made,)), *sidecars

    def mark(self, ctx, more, written, outputs):
        """Tells autograd which outputs have a gradient: weights, and rows or what stands for them, if these are wide. written:
        recv_tokens of the caller's, or None."""
        ctx.in_backward = () if more is None else more.in_backward
        ctx.rows = len(outputs) - 1 if more is not None and more.with_wide else self.rows
        ctx.has_rows_gradient = outputs[ctx.rows].dtype in _WIDE
        differentiable = (self.weights, ctx.rows) if ctx.has_rows_gradient else (self.weights,)
        others = [each for i, each in enumerate(outputs) if i not in differentiable]
        if written is not None:
            ctx.mark_dirty(written)
        if others:
            ctx.mark_non_differentiable(*others)
        # PyTorch has no zeros of all dtypes of outputs, and nobody needs those of rows and scales.
        ctx.set_materialize_grads(False)
        ctx.zeros = [
            dict(size=each.shape, dtype=each.dtype, device=each.device) for each in (outputs[ctx.rows], outputs[self.weights])
        ]

    def grads(self, ctx, grads):
        """The gradients of the rows that have been brought, and of their weights. Rows that have none get one column of zeros,
        which the call for the weights' gradient takes along."""
        found = [grads[ctx.rows], grads[self.weights]]
        if not ctx.has_rows_gradient:
            like = ctx.zeros[0]
            found[0] = torch.zeros(*like["size"][:-1], 1, dtype=_dtype_of(ZEROS_DTYPE), device=like["device"])
        return [torch.zeros(**zeros) if grad is None else grad for zeros, grad in zip(ctx.zeros, found)]


def split(group, tokens, topk_weights, sidecar, row_format, with_wide, grad_format, records):
    """The tensor of tokens, More or None, and whether autograd records the call. records: a function that tells whether it
    records a call on tensors."""
    parts = parts_of_tokens(tokens, row_format, with_wide=with_wide)
    for name, part in zip(("tokens", "scales", "row_scales"), parts):
        require_usable(group, name, part)
    sidecar = as_bytes(group, sidecar, parts[0])
    if topk_weights is not None:
        require_usable(group, "topk_weights", topk_weights)
    in_backward = on_wire("grad_format", grad_format, group, sums=True)
    arrives_wide = parts[0].dtype in _WIDE and (row_format is None or row_format.wire_only)
    if len(parts) > 1:
        parts = [part.detach() for part in parts]
    elif not arrives_wide and not with_wide and records(tokens):
        _refuse_narrow_gradient(tokens, row_format)
    tokens, scales, row_scales = parts + (3 - len(parts)) * [None]
    more = None if sidecar is None and not in_backward else More(sidecar, in_backward)
    if row_format is not None:
        if row_format.encode_scale is not None:
            require_usable(group, "encode_scale", row_format.encode_scale)
        in_format = row_format.codes, row_format.amax_floor, scales, row_scales, row_format.encode_scale
        more = More(sidecar, in_backward, *in_format, with_wide, row_format.num_recv_parts)
    is_recorded = records(tokens, topk_weights)
    if is_recorded and not in_backward and not (row_format is None and arrives_wide):
        require_room_for_gradients(group.max_token_dtype, tokens.dtype if arrives_wide or with_wide else None)
    return tokens, more, is_recorded


def _refuse_narrow_gradient(tokens, row_format):
    if row_format is None:
        refuse(
            f"tokens is {dtype_name(tokens.dtype)} and requires a gradient, which rows of 8 or 4 bits do not have: give "
            "tokens.detach(), or wide tokens with a format"
        )
    refuse(
        f"tokens requires a gradient, which PyTorch would cast to {row_format.dtype}, the dtype of the rows that arrive: give "
        "with_wide=True, and use the tensor that it returns for the rows' gradient; or give tokens.detach()"
    )


def received(results, topk_weights, sidecar, more):
    """What a dispatch returns to its caller, of (recv_tokens, recv_weights, ...) as Operator.run() has them."""
    if more is None:
        rows, weights = results
        return rows, None if topk_weights is None else weights
    rows, weights, *rest = results
    returned, first = [], 0  # scales begin at `first`
    if sidecar is not None:
        returned, first = [rest[0].view(sidecar.dtype)], 1
    if more.num_parts > 1:
        rows = (rows, *rest[first : first + more.num_parts - 1])
    if more.with_wide:
        returned.append(rest[-1])
    return rows, None if topk_weights is None else weights, *returned


def fake_format(tokens, lead, codes, topk_results, sidecar):
    """The results of a fake kernel with a format: recv_tokens, then topk_results, then scales, row_scales and the sidecar."""
    known = format_of(codes)
    shapes = known.recv_shapes(lead, tokens.shape[1] * (2 if tokens.dtype == torch.float4_e2m1fn_x2 else 1))
    dtypes = [tokens.dtype]
    if not known.wire_only:
        dtypes = [_dtype_of(known.dtype), _dtype_of(known.recv_scales_dtype), torch.float32]
    rows, *rest = [new_tensor(tokens, *shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes)]
    rest += [new_tensor(tokens, 0, dtype=torch.float32) for _ in range(2 - len(rest))]
    if sidecar is None:
        recv_sidecar = new_tensor(tokens, 0, dtype=torch.float32)
    else:
        recv_sidecar = new_tensor(sidecar, *lead, sidecar.shape[1])
    return rows, *topk_results, *rest, recv_sidecar
