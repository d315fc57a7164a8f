# SPDX-License-Identifier: Apache-2.0
"""The rows that a dispatch sends and receives, in a row format or without, and where their gradients go.

JAX casts the gradient of an array to the array's dtype, which of quantised rows is one of 8 or 4 bits. So theirs comes through an
array that stands for them (`with_wide`)."""

import math

import jax
import jax.numpy as jnp
import numpy

from .._formats import ZEROS_DTYPE, on_wire, parts_of_tokens, require_room_for_gradients
from .._structs import ScaleLayout
from .._values import refuse, refuse_dtype, refuse_kind, require_shape, require_sidecar

ROW_DTYPES = jnp.float32, jnp.float16, jnp.bfloat16
# The optional operands and results that a handler is told of, one bit for each; those that are there come in this order.
_OPTIONAL = "weights", "scales", "row_scales", "encode_scale", "sidecar", "slot"
SLOT = 1 << _OPTIONAL.index("slot")


def struct(shape, dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def is_symbolic_zero(cotangent):
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def instantiate(cotangent):
    if not is_symbolic_zero(cotangent):
        return cotangent
    if cotangent.dtype == jax.dtypes.float0:
        return numpy.zeros(cotangent.shape, cotangent.dtype)
    return jnp.zeros(cotangent.shape, cotangent.dtype)


def require_is_array(name, array):
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        refuse_kind(name, array, jax.Array)


def require_array(name, array, shape, dtypes):
    require_is_array(name, array)
    require_shape(name, array.shape, shape)
    dtypes = [jnp.dtype(dtype) for dtype in dtypes]
    if jnp.dtype(array.dtype) not in dtypes:
        refuse_dtype(name, array.dtype, dtypes)


def require_rows(group, name, rows, *sizes, dtypes=ROW_DTYPES):
    require_array(name, rows, (*sizes, None), dtypes)
    if rows.shape[-1] > group.hidden_dim:
        refuse(f"{name} has {rows.shape[-1]} columns; the group's hidden_dim is {group.hidden_dim}")


def _zero(dtype):
    """The zero byte of an array of scales: float8_e8m0fnu has no number zero."""
    dtype = jnp.dtype(dtype)
    return jax.lax.bitcast_convert_type(jnp.uint8(0), dtype) if dtype == jnp.float8_e8m0fnu else jnp.zeros((), dtype)


def where_in_use(in_use, array, fill=None):
    """The array with `fill`, or with zeros, in rows that are not in use, which epx does not write. in_use: bool, [N] or [P, M];
    the array has these dimensions first."""
    mask = in_use.reshape(in_use.shape + (1,) * (array.ndim - in_use.ndim))
    return jnp.where(mask, array, _zero(array.dtype) if fill is None else jnp.asarray(fill, array.dtype))


def _scales_in_use(in_use, scales, layout):
    """Likewise of scales in a layout that is not by rows."""
    in_use = in_use.reshape(-1)
    if layout == ScaleLayout.TILES:  # zones are of whole tiles
        mask = in_use[::128, None, None]
    else:
        mask = jnp.pad(in_use, (0, scales.shape[1] - in_use.size))
    return jnp.where(mask, scales, _zero(scales.dtype))


def attributes_of_format(codes=(), amax_floor=0.0):
    """What a handler is told of a format; no codes stand for none."""
    scaling, dtype, _, scale_layout, _ = codes or 5 * (0,)
    return dict(scaling=scaling, dtype=dtype, scale_layout=scale_layout, amax_floor=numpy.float32(amax_floor))


def _present(optional):
    """A bit for each array, in the order of _OPTIONAL, that is not None."""
    return sum((each is not None) << bit for bit, each in enumerate(optional))


class Rows:
    """The rows of one dispatch.

    tokens: an array [T, H], or a tuple of quantised rows and their scales.  lead: (N,) or (P, M).
    `operands` are those that the call takes behind its plan, tokens and what is optional; `results` are the shapes and dtypes of
    what it returns of rows, and `attributes` tell its handler of both. `returned` are those of what its backward returns, and
    `in_backward` tells that one's handler of grad_format.
    """

    def __init__(self, group, tokens, num_tokens, top_k, topk_weights, lead, *, sidecar, row_format, with_wide, grad_format):
        parts = parts_of_tokens(tokens, row_format, with_wide=with_wide)
        rows, *scales = parts
        self._format, self._lead, self._with_wide = row_format, lead, with_wide
        self._has_weights, self._has_sidecar = topk_weights is not None, sidecar is not None
        require_rows(group, "tokens", rows, num_tokens, dtypes=[row_format.dtype] if scales else ROW_DTYPES)
        self._hidden, self._dtype, self._max_dtype = rows.shape[1], rows.dtype, group.max_token_dtype
        self._shapes = [(*lead, self._hidden)] if row_format is None else row_format.recv_shapes(lead, self._hidden)
        # Whether tokens have a gradient: where rows arrive quantised, only through what stands for them.
        self._has_gradient = with_wide or (not scales and len(self._shapes) == 1)
        self._is_refused = not scales and not self._has_gradient
        operands = [rows, topk_weights, *scales, *[None] * (2 - len(scales)), None, sidecar]
        if row_format is not None:
            operands = self._in_format(operands, num_tokens, row_format)
        if topk_weights is not None:
            require_array("topk_weights", topk_weights, (num_tokens, top_k), (jnp.float32,))
        if sidecar is not None:
            require_is_array("sidecar", sidecar)
            bits = jax.dtypes.itemsize_bits(sidecar.dtype)
            require_sidecar(sidecar.shape, sidecar.dtype, bits, num_tokens, group.max_sidecar_bytes)
        weights = struct(lead if len(lead) == 1 else (*lead, top_k), jnp.float32) if self._has_weights else None
        recv_sidecar = struct((*lead, sidecar.shape[1]), sidecar.dtype) if self._has_sidecar else None
        recv_rows, *recv_scales = self._received()
        results = [recv_rows, weights, *recv_scales, *[None] * (2 - len(recv_scales)), None, recv_sidecar]
        self.operands = [each for each in operands if each is not None]
        self.results = [each for each in results if each is not None]
        in_format = () if row_format is None else (row_format.codes, row_format.amax_floor)
        self.attributes = dict(
            zone_stride=0,
            row_spacing=0,
            optional_operands=_present(operands[1:]),
            optional_results=_present(results[1:]),
            **attributes_of_format(*in_format),
        )
        self._has_grad_format = grad_format is not None
        self.in_backward = attributes_of_format(*on_wire("grad_format", grad_format, group, sums=True))
        gradient = struct(rows.shape, rows.dtype) if self._has_gradient else struct((num_tokens, 1), ZEROS_DTYPE)
        self.returned = [gradient] + [struct((num_tokens, top_k), jnp.float32)] * self._has_weights

    def _in_format(self, operands, num_tokens, row_format):
        """The operands, whose rows that come quantised and scales have been checked, and are constants to JAX."""
        rows, weights, scales, row_scales, _, sidecar = operands
        if scales is not None:
            require_array("scales", scales, (num_tokens, row_format.num_scales(self._hidden)), (row_format.scale_dtype,))
            rows, scales = jax.lax.stop_gradient(rows), jax.lax.stop_gradient(scales)
            if row_format.elements_per_byte == 2:  # XLA's own order in a byte is of no concern to a handler
                rows = jax.lax.bitcast_convert_type(rows.reshape(num_tokens, self._hidden // 2, 2), jnp.uint8)
        if row_scales is not None:
            require_array("row_scales", row_scales, (num_tokens,), (jnp.float32,))
            row_scales = jax.lax.stop_gradient(row_scales)
        encode_scale = row_format.encode_scale
        if encode_scale is not None:
            require_array("encode_scale", encode_scale, (1,), (jnp.float32,))
            encode_scale = jax.lax.stop_gradient(encode_scale)
        return rows, weights, scales, row_scales, encode_scale, sidecar

    def _received(self):
        """Rows, and scales as the C API has them: to it rows of all ranks, [P, M, ...], are rows of one matrix."""
        row_format = self._format
        if len(self._shapes) == 1:
            return [struct(self._shapes[0], self._dtype)]
        elements = jnp.uint8 if row_format.elements_per_byte == 2 else row_format.dtype
        dtypes = elements, row_format.recv_scales_dtype, jnp.float32
        shapes = self._shapes[0], *row_format.recv_shapes((math.prod(self._lead),), self._hidden)[1:]
        return [struct(shape, dtype) for shape, dtype in zip(shapes, dtypes)]

    def outputs(self, results, in_use):
        """What a function with a gradient of its own returns of the call's results: rows, weights, a sidecar, scales and what
        stands for quantised rows, where there are these. in_use: bool, [N] or [P, M], by which rows become zero; or None."""
        rows, *rest = results
        weights = [rest.pop(0)] if self._has_weights else []
        sidecar = [rest.pop()] if self._has_sidecar else []
        scales = [each.reshape(shape) for each, shape in zip(rest, self._shapes[1:])]
        rows, *others = [rows, *weights, *sidecar]
        if in_use is not None:
            rows, *others = [where_in_use(in_use, each) for each in (rows, *others)]
            by_row = [True] if self._format is None else [self._format.scale_layout == ScaleLayout.ROWS, True]
            scales = [
                where_in_use(in_use, each) if is_by_row else _scales_in_use(in_use, each, self._format.scale_layout)
                for each, is_by_row in zip(scales, by_row)
            ]
        if len(self._shapes) > 1 and self._format.elements_per_byte == 2:
            rows = jax.lax.bitcast_convert_type(rows, jnp.float4_e2m1fn).reshape(*self._lead, self._hidden)
        wide = [jnp.zeros((*self._lead, self._hidden), self._dtype)] if self._with_wide else []
        return rows, *others, *scales, *wide

    def require_gradient(self, tokens):
        """Refuses tokens, as the forward of a function with a gradient of its own has them, whose gradient would be lost, and
        a backward that the group has no room for. The backward makes its call also where tokens and weights are constants."""
        if self._is_refused and tokens.perturbed:
            refuse(
                f"tokens are differentiated, and their gradient would be cast to {self._format.dtype}, the dtype of the rows that "
                "arrive: give with_wide=True, and use the array that it returns for the rows' gradient; or give "
                "jax.lax.stop_gradient(tokens)"
            )
        if self._format is not None and not self._has_grad_format:
            require_room_for_gradients(self._max_dtype, self._dtype if self._has_gradient else None)

    def cotangents(self, cotangents):
        """Those of outputs() that the backward takes. Rows that have none get one column of zeros, which the call for the
        gradient of the weights takes along."""
        if self._has_gradient:
            rows = instantiate(cotangents[-1 if self._with_wide else 0])
        else:
            rows = jnp.zeros((*self._lead, 1), ZEROS_DTYPE)
        return [rows, *[instantiate(each) for each in cotangents[1 : 1 + self._has_weights]]]

    def gradients(self, returned):
        """The gradients of `operands`, of what the backward has returned."""
        rows, *weights = returned
        gradients = [rows if self._has_gradient else None, *weights]
        return gradients + [None] * (len(self.operands) - len(gradients))

    def received(self, outputs):
        """What a dispatch returns to its caller: rows or a tuple, weights or None, a sidecar, what stands for quantised rows."""
        rows, *rest = outputs
        weights = rest.pop(0) if self._has_weights else None
        sidecar = [rest.pop(0)] if self._has_sidecar else []
        wide = [rest.pop()] if self._with_wide else []
        return (rows, *rest) if rest else rows, weights, *sidecar, *wide
