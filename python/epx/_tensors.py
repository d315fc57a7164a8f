# SPDX-License-Identifier: Apache-2.0
"""numpy arrays as epx_tensor."""

import numpy

from ._structs import Tensor
from ._values import refuse, refuse_dtype, refuse_strides, require_kind, require_shape, require_sidecar

CODES = {"float32": 1, "float16": 2, "bfloat16": 3, "int32": 4, "int64": 5, "float64": 6, "uint8": 7}
_CODE_OF_DTYPE = {numpy.dtype(name): code for name, code in CODES.items() if name != "bfloat16"}


def dtype_code(dtype):
    """The epx_dtype of a numpy dtype, of its name, or of a scalar type. bfloat16 is that of the package ml_dtypes."""
    code = _CODE_OF_DTYPE.get(dtype) if isinstance(dtype, numpy.dtype) else None
    if code is None:
        if isinstance(dtype, numpy.dtype) and not dtype.isnative:
            refuse(f"dtype {dtype.str} is not in the byte order of this machine")
        name = dtype if isinstance(dtype, str) else numpy.dtype(dtype).name
        code = CODES.get(name)
        if code is None:
            refuse(f"dtype {name} is not one of {', '.join(CODES)}")
    return code


def require_contiguous(name, array):
    require_kind(name, array, numpy.ndarray)
    if not array.flags.c_contiguous:
        refuse_strides(name, [stride // max(array.itemsize, 1) for stride in array.strides], array.shape)


def tensor(name, array, shape=None, dtypes=None):
    """A view of a contiguous numpy array. `shape` may have None where any size will do; `dtypes` are those that will do."""
    require_contiguous(name, array)
    sizes = array.shape
    if shape is not None:
        require_shape(name, sizes, shape)
    if not 1 <= len(sizes) <= 4:
        refuse(f"{name} has {len(sizes)} dimensions; a tensor has 1 to 4")
    if dtypes is not None and array.dtype not in dtypes:
        refuse_dtype(name, array.dtype, dtypes)
    return Tensor(array.ctypes.data, dtype_code(array.dtype), len(sizes), sizes)


def with_sidecar(view, sidecar, max_bytes):
    """Gives the view of tokens [T, H] the sidecar [T, S] of any dtype; None for none. max_bytes: of a row, those of the group."""
    if sidecar is None:
        return view
    require_contiguous("sidecar", sidecar)
    if sidecar.dtype.hasobject:
        refuse(f"sidecar has dtype {sidecar.dtype}, whose elements are references to Python objects")
    require_sidecar(sidecar.shape, sidecar.dtype, 8 * sidecar.itemsize, view.sizes[0], max_bytes)
    return attach(view, sidecar)


def attach(view, sidecar):
    """Gives a view a sidecar that has a row for each of its rows."""
    view.sidecar = sidecar.ctypes.data
    view.sidecar_row_bytes = sidecar.shape[-1] * sidecar.itemsize
    return view


def output(name, array):
    """A view of an array that a call writes."""
    if not array.flags.writeable:
        refuse(f"{name} is read-only")
    return tensor(name, array)


def aligned_bytes(count, alignment=16):
    """An uninitialised array of `count` bytes whose address is a multiple of `alignment`."""
    memory = numpy.empty(count + alignment, numpy.uint8)
    begin = -memory.ctypes.data % alignment
    return memory[begin : begin + count]
