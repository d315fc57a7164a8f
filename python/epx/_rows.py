# SPDX-License-Identifier: Apache-2.0
"""The rows that a call sends and receives, as numpy arrays: whether they are quantised, their scales and their sidecar."""

import ctypes

import numpy

from . import _structs
from ._formats import parts_of, parts_of_tokens
from ._structs import ScaleLayout
from ._tensors import attach, dtype_of, output, packed, tensor, with_sidecar
from ._values import refuse_dtype

_FLOAT32 = numpy.dtype(numpy.float32)
_UINT8 = numpy.dtype(numpy.uint8)


def _element_dtype(row_format):
    """numpy's dtype of quantised rows: two elements of 4 bits are a byte."""
    return _UINT8 if row_format.elements_per_byte == 2 else dtype_of(row_format.dtype)


def _as_rows(view, num_leading):
    """A view of [P, M, ...] as the C API has scales: [P * M, ...]."""
    if num_leading == 1:
        return view
    rows, *rest = view.sizes[0] * view.sizes[1], *view.sizes[2 : view.ndim]
    return _structs.Tensor(view.data, view.dtype, 1 + len(rest), (ctypes.c_int64 * 4)(rows, *rest))


class Rows:
    """The tensors of one call, which point into its arrays: `sent` and `received`, and `format`, a pointer or None.

    tokens: an array [T, H], or a tuple of quantised rows and their scales.  lead: (N,) or (P, M).  new: numpy.empty or
    numpy.zeros, which makes what is received.  name: of tokens, in sentences.  recv_tokens: what the caller gives to be written.
    sidecar: of tokens, at most max_sidecar_bytes in a row.  What is received is in recv_tokens and recv_sidecar.
    """

    def __init__(
        self, tokens, num_tokens, lead, row_format, new, *, name="tokens", recv_tokens=None, sidecar=None, max_sidecar_bytes=0
    ):
        self.row_format = row_format
        parts = parts_of_tokens(tokens, row_format, name)
        scales = self._view_tokens(name, parts, num_tokens)
        hidden = self.sent.sizes[1]
        shapes = [(*lead, hidden)] if row_format is None else row_format.recv_shapes(lead, hidden)
        dtypes = [parts[0].dtype]
        if row_format is not None and not row_format.wire_only:
            dtypes = _element_dtype(row_format), dtype_of(row_format.recv_scales_dtype), _FLOAT32
        if recv_tokens is None:
            arrays = [new(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
            self.recv_tokens = arrays[0] if len(arrays) == 1 else tuple(arrays)
        else:
            arrays = parts_of("recv_tokens", recv_tokens, row_format, quantised=len(shapes) > 1)
            self.recv_tokens = recv_tokens
        names = "recv_tokens", "recv_scales", "recv_row_scales"
        # Without a format the library's own sentences tell of a recv_tokens that does not fit.
        wanted = [(None, None)] if row_format is None else [(shape, (dtype,)) for shape, dtype in zip(shapes, dtypes)]
        self.received, *recv_scales = [output(part, array, *want) for part, array, want in zip(names, arrays, wanted)]
        if recv_scales and row_format.elements_per_byte == 2:
            packed(self.received)
        self.format = None if row_format is None else ctypes.pointer(self._make_format(scales, recv_scales, len(lead)))
        self._attach_sidecar(sidecar, lead, max_sidecar_bytes, new)

    def _view_tokens(self, name, parts, num_tokens):
        """Sets `sent`, and returns views of the scales of rows that come quantised."""
        row_format = self.row_format
        rows, *scales = parts
        self.sent = tensor(name, rows, (num_tokens, None))
        if not scales:
            return []
        if rows.dtype != _element_dtype(row_format):
            refuse_dtype(name, rows.dtype, (_element_dtype(row_format),))
        if row_format.elements_per_byte == 2:
            packed(self.sent)
        wanted = (num_tokens, row_format.num_scales(self.sent.sizes[1])), (num_tokens,)
        dtypes = dtype_of(row_format.scale_dtype), _FLOAT32
        names = "scales", "row_scales"
        return [tensor(part, each, shape, (dtype,)) for part, each, shape, dtype in zip(names, scales, wanted, dtypes)]

    def _make_format(self, scales, recv_scales, num_leading):
        row_format, encode_scale = self.row_format, self.row_format.encode_scale
        made = row_format.to_c()
        if encode_scale is not None:
            made.encode_scale = ctypes.pointer(tensor("encode_scale", encode_scale, (1,), (_FLOAT32,)))
        for name, view in zip(("scales", "row_scales"), scales):
            setattr(made, name, ctypes.pointer(view))
        for name, view in zip(("recv_scales", "recv_row_scales"), recv_scales):
            by_row = name == "recv_row_scales" or row_format.scale_layout == ScaleLayout.ROWS
            setattr(made, name, ctypes.pointer(_as_rows(view, num_leading if by_row else 1)))
        return made

    def _attach_sidecar(self, sidecar, lead, max_bytes, new):
        with_sidecar(self.sent, sidecar, max_bytes)
        self.recv_sidecar = None
        if sidecar is not None:
            self.recv_sidecar = new((*lead, sidecar.shape[1]), sidecar.dtype)
            attach(self.received, self.recv_sidecar)

    def first(self, num_rows):
        """The first rows of recv_tokens [N, H], with their scales."""
        if not isinstance(self.recv_tokens, tuple):
            return self.recv_tokens[:num_rows]
        rows, scales, *row_scales = self.recv_tokens
        layout = self.row_format.scale_layout
        if layout in (ScaleLayout.COLUMNS, ScaleLayout.PACKED):
            scales = scales[:, : -(-num_rows // 4) * 4]
        else:
            scales = scales[: num_rows if layout == ScaleLayout.ROWS else -(-num_rows // 128)]
        return rows[:num_rows], scales, *[each[:num_rows] for each in row_scales]
