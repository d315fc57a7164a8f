# SPDX-License-Identifier: Apache-2.0
"""Row formats: what the operators take and return of them, and where their gradients go.

The rows of a dispatch have a gradient where they are wide. PyTorch casts the gradient of a tensor to the tensor's dtype, which
of quantised rows is one of 8 or 4 bits. So theirs comes through a tensor that stands for them (`with_wide`)."""

import typing

import torch

from .._formats import ZEROS_DTYPE, format_of, parts_of_tokens, require_room_for_gradients
from .._values import refuse, require_kind
from ._group import call, require_usable
from ._library import new_tensor, ops
from ._sidecars import as_bytes


def _dtype_of(name):
    return torch.float4_e2m1fn_x2 if name == "float4_e2m1fn" else getattr(torch, name)


class More(typing.NamedTuple):
    """What a dispatch takes beside rows and weights where there is more: a sidecar's bytes or None, and the operators' arguments
    of a format. There are no codes without a format."""

    sidecar: torch.Tensor | None
    codes: tuple[int, ...] | None = None
    amax_floor: float = 0.0
    scales: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None
    encode_scale: torch.Tensor | None = None
    with_wide: bool = False
    num_parts: int = 1  # that recv_tokens is

    @property
    def has_rows_gradient(self):
        return self.with_wide or self.num_parts == 1

    def sidecar_alone(self):
        """What a dispatch into recv_tokens takes. Refuses a format."""
        if self.codes is not None:
            refuse("recv_tokens and format are given; with a format rows arrive in new tensors")
        return self.sidecar


class Operator:
    """An operator that dispatches: alone, with a sidecar or with a format. tokens: their place among the arguments behind the
    group's number.  rows, weights: the places of recv_tokens and recv_weights among the results."""

    def __init__(self, name, tokens, rows, weights):
        self.alone, self.with_sidecar, self.with_format = [
            getattr(ops, name + variant).default for variant in ("", "_sidecar", "_format")
        ]
        self.tokens, self.rows, self.weights = tokens, rows, weights

    def run(self, more, number, *args):
        """Makes the call. Returns what that alone does, and behind it the bytes of a sidecar, scales and row_scales where there
        are some, and last, where it is wanted, the tensor that stands for quantised rows. That has one element of memory."""
        if more is None:
            return call(number, self.alone, number, *args)
        if more.codes is None:
            return call(number, self.with_sidecar, number, *args, more.sidecar)
        in_format = list(more.codes), more.amax_floor, more.scales, more.row_scales, more.encode_scale, more.sidecar
        *results, scales, row_scales, sidecar = call(number, self.with_format, number, *args, *in_format)
        sidecars = [] if more.sidecar is None else [sidecar]
        wide = []
        if more.with_wide:
            tokens = args[self.tokens]
            wide = [tokens.new_zeros(1).expand(*results[self.rows].shape[:-1], tokens.shape[1])]
        return *results, *sidecars, *[scales, row_scales][: more.num_parts - 1], *wide

    def mark(self, ctx, more, outputs):
        """Tells autograd which outputs have a gradient: weights, and rows or what stands for them."""
        with_wide = more is not None and more.with_wide
        ctx.has_rows_gradient = more is None or more.has_rows_gradient
        ctx.rows = len(outputs) - 1 if with_wide else self.rows
        differentiable = (self.weights, ctx.rows) if ctx.has_rows_gradient else (self.weights,)
        others = [each for i, each in enumerate(outputs) if i not in differentiable]
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


def split(group, tokens, topk_weights, sidecar, row_format, with_wide, records):
    """The tensor of tokens, More or None, and whether autograd records the call. records: a function that tells whether it
    records a call on tensors."""
    parts = parts_of_tokens(tokens, row_format, with_wide=with_wide)
    for name, part in zip(("tokens", "scales", "row_scales"), parts):
        require_usable(group, name, part)
    sidecar = as_bytes(group, sidecar, parts[0])
    if topk_weights is not None:
        require_usable(group, "topk_weights", topk_weights)
    if row_format is None:
        return tokens, None if sidecar is None else More(sidecar), records(tokens, topk_weights)
    if row_format.encode_scale is not None:
        require_usable(group, "encode_scale", row_format.encode_scale)
    if len(parts) > 1:
        parts = [part.detach() for part in parts]
    elif not row_format.wire_only and not with_wide and records(tokens):
        refuse(
            f"tokens requires a gradient, which PyTorch would cast to {row_format.dtype}, the dtype of the rows that arrive: give "
            "with_wide=True, and use the tensor that it returns for the rows' gradient; or give tokens.detach()"
        )
    tokens, scales, row_scales = parts + (3 - len(parts)) * [None]
    in_format = row_format.codes, row_format.amax_floor, scales, row_scales, row_format.encode_scale
    more, is_recorded = More(sidecar, *in_format, with_wide, row_format.num_recv_parts), records(tokens, topk_weights)
    if is_recorded:
        require_room_for_gradients(group.max_token_dtype, tokens.dtype if more.has_rows_gradient else None)
    return tokens, more, is_recorded


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
