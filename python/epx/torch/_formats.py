# SPDX-License-Identifier: Apache-2.0
"""Row formats: what the operators take and return of them, and where their gradients go.

The rows of a dispatch have a gradient where they are wide. PyTorch casts the gradient of a tensor to the tensor's dtype, which
of quantised rows is one of 8 or 4 bits. So theirs comes through a tensor that stands for them (`with_wide`)."""

import typing

import torch

from .._formats import RowFormat, format_of
from .._values import refuse, require_kind, require_parts
from ._group import require_usable
from ._library import new_tensor
from ._sidecars import as_bytes

_QUANTISED = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2


def _dtype_of(name):
    return torch.float4_e2m1fn_x2 if name == "float4_e2m1fn" else getattr(torch, name)


class More(typing.NamedTuple):
    """What a dispatch takes beside rows and weights where there is more: a sidecar's bytes or None, and the operators' arguments
    of a format. There are no codes without a format."""

    sidecar: torch.Tensor | None
    codes: list[int] | None = None
    amax_floor: float = 0.0
    scales: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None
    encode_scale: torch.Tensor | None = None
    with_wide: bool = False
    num_parts: int = 1  # that recv_tokens is

    @property
    def is_quantised(self):
        """Whether rows arrive quantised."""
        return self.num_parts > 1

    def call(self, run, with_sidecar, with_format, *args):
        """Calls one of two operators. Returns what that without both does, and behind it the bytes of a sidecar, scales and
        row_scales where there are some."""
        if self.codes is None:
            return run(with_sidecar, *args, self.sidecar)
        format_args = self.codes, self.amax_floor, self.scales, self.row_scales, self.encode_scale, self.sidecar
        *results, scales, row_scales, sidecar = run(with_format, *args, *format_args)
        return *results, *([] if self.sidecar is None else [sidecar]), *(scales, row_scales)[: self.num_parts - 1]

    def outputs(self, results, tokens, rows):
        """The outputs of an autograd.Function: the results, of which `rows` is the place of recv_tokens, and last the tensor that
        stands for quantised rows where it is wanted. That has one element of memory."""
        if not self.with_wide:
            return results
        lead = results[rows].shape[:-1]
        return *results, tokens.new_zeros(1).expand(*lead, tokens.shape[1])


def mark(ctx, more, outputs, rows, weights):
    """Tells autograd which outputs have a gradient: weights, and rows or what stands for them."""
    ctx.has_rows_gradient, ctx.zeros = True, None
    if more is None:
        others = outputs[:rows] + outputs[rows + 1 : weights] + outputs[weights + 1 :]
        if others:
            ctx.mark_non_differentiable(*others)
        return
    ctx.has_rows_gradient = more.with_wide or not more.is_quantised
    ctx.rows = len(outputs) - 1 if more.with_wide else rows
    differentiable = (weights, ctx.rows) if ctx.has_rows_gradient else (weights,)
    ctx.mark_non_differentiable(*[each for i, each in enumerate(outputs) if i not in differentiable])
    # PyTorch has no zeros of all dtypes of outputs, and nobody needs those of rows and scales.
    ctx.set_materialize_grads(False)
    ctx.zeros = [dict(size=each.shape, dtype=each.dtype, device=each.device) for each in (outputs[ctx.rows], outputs[weights])]


def grads_of_rows(ctx, grads, rows, weights):
    """The gradients of the rows that a dispatch has brought, and of their weights. Rows that have none get one column of zeros,
    which the call for the weights' gradient takes along."""
    if ctx.zeros is None:
        return grads[rows], grads[weights]
    found = [grads[ctx.rows], grads[weights]]
    if not ctx.has_rows_gradient:
        like = ctx.zeros[0]
        found[0] = torch.zeros(*like["size"][:-1], 1, dtype=torch.float32, device=like["device"])
    return [torch.zeros(**ctx.zeros[i]) if grad is None else grad for i, grad in enumerate(found)]


def split(group, tokens, sidecar, row_format, with_wide, records):
    """The tensor of tokens, and More or None. records: a function that tells whether autograd records a call on a tensor."""
    if row_format is None and sidecar is None and not with_wide and not isinstance(tokens, tuple):
        require_usable(group, "tokens", tokens)
        return tokens, None
    require_kind("with_wide", with_wide, bool)
    if row_format is None:
        if with_wide:
            refuse("with_wide is True and format is None; it is for a format that quantises wide rows")
        (tokens,) = require_parts("tokens", tokens, None)
        require_usable(group, "tokens", tokens)
        return tokens, More(as_bytes(group, sidecar, tokens))
    require_kind("format", row_format, RowFormat)
    given = isinstance(tokens, tuple)  # rows have been quantised
    if given and row_format.wire_only:
        refuse("tokens is a tuple of quantised rows; a format with wire_only takes a tensor of wide rows")
    if with_wide and (given or row_format.wire_only):
        refuse("with_wide is True; it is for a format that quantises wide rows, which arrive quantised")
    parts = require_parts("tokens", tokens, row_format, quantised=True) if given else [tokens]
    for name, part in zip(("tokens", "scales", "row_scales"), parts):
        require_usable(group, name, part)
    tokens, scales, row_scales = [part.detach() if given else part for part in parts] + (3 - len(parts)) * [None]
    if row_format.encode_scale is not None:
        require_usable(group, "encode_scale", row_format.encode_scale)
    if not given and tokens.dtype in _QUANTISED:
        refuse(f"tokens is {tokens.dtype} without scales; with a format quantised rows are a tuple (rows, scales)")
    if not given and not row_format.wire_only and not with_wide and records(tokens):
        refuse(
            f"tokens requires a gradient, which PyTorch would cast to {row_format.dtype}, the dtype of the rows that arrive: give "
            "with_wide=True, and use the tensor that it returns for the rows' gradient; or give tokens.detach()"
        )
    sidecar = as_bytes(group, sidecar, tokens)
    num_parts = 1 if row_format.wire_only else row_format.num_parts
    made = More(sidecar, row_format.codes, row_format.amax_floor, scales, row_scales, row_format.encode_scale, with_wide, num_parts)
    return tokens, made


def received(results, topk_weights, sidecar, more):
    """What a dispatch returns to its caller, of (recv_tokens, recv_weights, ...) as More.outputs() has them."""
    if more is None:
        rows, weights = results
        return rows, None if topk_weights is None else weights
    rows, weights, *rest = results
    returned, first = [], 0  # scales begin at `first`
    if sidecar is not None:
        returned, first = [rest[0].view(sidecar.dtype)], 1
    if more.is_quantised:
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
