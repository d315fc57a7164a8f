# SPDX-License-Identifier: Apache-2.0
"""The slices of a ragged all-to-all: what an operand and an output must have in common, and numpy arrays as its tensors. Rows
are bytes to it, so that any dtype of whole bytes will do."""

import math

import numpy

from ._structs import DTYPES, MAX_SLICES, SliceDirection, Tensor
from ._tensors import require_contiguous, require_writable, tensor
from ._values import boolean, refuse, refuse_dtype, require_shape

OFFSETS = "input_offsets", "send_sizes", "output_offsets", "recv_sizes"
_INDEX_DTYPES = (numpy.dtype(numpy.int32), numpy.dtype(numpy.int64))


def require_rows_alike(operand, output):
    """Refuses an output whose rows are not those of the operand."""
    for name, array in (("operand", operand), ("output", output)):
        if len(array.shape) == 0:
            refuse(f"{name} has shape []; it must have at least one dimension, that of its rows")
    if 0 in operand.shape[1:]:
        refuse(f"operand has shape {list(operand.shape)}; its rows must have at least one element")
    if output.dtype != operand.dtype:
        refuse_dtype("output", output.dtype, (operand.dtype,))
    require_shape("output", output.shape, (None, *operand.shape[1:]))


def require_num_slices(num_slices, num_ranks):
    if not 0 < num_slices <= MAX_SLICES or num_slices % num_ranks:
        refuse(f"input_offsets has {num_slices} slices; it must have a multiple of {num_ranks}, the ranks, up to {MAX_SLICES}")


def direction(transposed):
    return SliceDirection.TRANSPOSED if boolean("transposed", transposed) else SliceDirection.FORWARD


def _rows(array):
    """A view of the rows as bytes, [N, bytes of a row]."""
    row_bytes = math.prod(array.shape[1:]) * array.itemsize
    return Tensor(array.ctypes.data, DTYPES["uint8"], 2, (array.shape[0], row_bytes))


def tensors(operand, output, offsets):
    """Views of all of a call's arrays; offsets: those of OFFSETS."""
    require_contiguous("operand", operand)
    require_contiguous("output", output)
    require_writable("output", output)
    require_rows_alike(operand, output)
    if operand.dtype.hasobject:
        refuse(f"operand has dtype {operand.dtype}, whose elements are references to Python objects")
    first, *rest = offsets
    views = [tensor(OFFSETS[0], first, (None,), _INDEX_DTYPES)]
    views += [tensor(name, each, first.shape, (first.dtype,)) for name, each in zip(OFFSETS[1:], rest)]
    return _rows(operand), _rows(output), *views
