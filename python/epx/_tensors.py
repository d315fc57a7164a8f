# SPDX-License-Identifier: Apache-2.0
"""numpy arrays as epx_tensor."""

import numpy

from ._structs import Tensor
from ._values import refuse

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


def tensor(name, array, shape=None, dtypes=None):
    """A view of a contiguous numpy array. `shape` may have None where any size will do; `dtypes` are those that will do."""
    if not isinstance(array, numpy.ndarray):
        refuse(f"{name} is {type(array).__name__}, not a numpy array")
    if not array.flags.c_contiguous:
        refuse(f"{name} has strides {array.strides} at shape {array.shape}: it must be contiguous in row-major order")
    sizes = array.shape
    if shape is not None and (len(sizes) != len(shape) or any(s is not None and s != n for s, n in zip(shape, sizes))):
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        refuse(f"{name} has shape {sizes}; it must be [{wanted}]")
    if not 1 <= len(sizes) <= 4:
        refuse(f"{name} has {len(sizes)} dimensions; a tensor has 1 to 4")
    if dtypes is not None and array.dtype not in dtypes:
        refuse(f"{name} is {array.dtype}; it must be {' or '.join(str(dtype) for dtype in dtypes)}")
    return Tensor(array.ctypes.data, dtype_code(array.dtype), len(sizes), sizes)


def with_sidecar(view, name, rows, sidecar):
    """Gives the view of `rows` the sidecar: as many bytes for each row, [..., S] of any dtype; None for none."""
    if sidecar is None:
        return view
    if not isinstance(sidecar, numpy.ndarray):
        refuse(f"{name} is {type(sidecar).__name__}, not a numpy array")
    if not sidecar.flags.c_contiguous:
        refuse(f"{name} has strides {sidecar.strides} at shape {sidecar.shape}: it must be contiguous in row-major order")
    if sidecar.dtype.hasobject:
        refuse(f"{name} has dtype {sidecar.dtype}, whose elements are references to Python objects")
    if sidecar.ndim != rows.ndim or sidecar.shape[:-1] != rows.shape[:-1] or sidecar.shape[-1] == 0:
        wanted = ", ".join(str(size) for size in rows.shape[:-1])
        refuse(f"{name} has shape {sidecar.shape}; it must be [{wanted}, S] with S >= 1, a row for each row of {rows.shape}")
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
