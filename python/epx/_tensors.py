# SPDX-License-Identifier: Apache-2.0
"""numpy arrays as epx_tensor."""

import numpy

from ._structs import DTYPES, Tensor
from ._values import refuse, refuse_dtype, refuse_strides, require_kind, require_shape, require_sidecar

_OWN = {"float32", "float16", "int32", "int64", "float64", "uint8"}  # those of numpy; others are of the package ml_dtypes
_FLOAT4 = DTYPES["float4_e2m1fn"]
_CODE_OF_DTYPE = {numpy.dtype(name): DTYPES[name] for name in _OWN}


def dtype_code(dtype):
    """The epx_dtype of a numpy dtype, of its name, or of a scalar type. numpy has bfloat16 and those of 8 and 4 bits
    from the package ml_dtypes."""
    code = _CODE_OF_DTYPE.get(dtype) if isinstance(dtype, numpy.dtype) else None
    if code is None:
        if isinstance(dtype, numpy.dtype) and not dtype.isnative:
            refuse(f"dtype {dtype.str} is not in the byte order of this machine")
        name = dtype if isinstance(dtype, str) else numpy.dtype(dtype).name
        code = DTYPES.get(name)
        if code is None:
            refuse(f"dtype {name} is not one of {', '.join(DTYPES)}")
    return code


def dtype_of(name):
    """The numpy dtype of a name. Refuses one of ml_dtypes where that is not installed."""
    if name in _OWN:
        return numpy.dtype(name)
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        refuse(f"arrays of {name} need the package ml_dtypes, which is not installed")
    return numpy.dtype(getattr(ml_dtypes, name))


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
    code = dtype_code(array.dtype)
    if code == _FLOAT4:
        refuse(f"{name} is float4_e2m1fn, whose arrays have one element to a byte; give uint8 with two to a byte")
    return Tensor(array.ctypes.data, code, len(sizes), sizes)


def packed(view):
    """A view of bytes [..., H / 2] as one of float4_e2m1fn [..., H]."""
    view.dtype = _FLOAT4
    view.sizes[view.ndim - 1] *= 2
    return view


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


def require_writable(name, array):
    require_kind(name, array, numpy.ndarray)
    if not array.flags.writeable:
        refuse(f"{name} is read-only")


def output(name, array, shape=None, dtypes=None):
    """A view of an array that a call writes."""
    require_writable(name, array)
    return tensor(name, array, shape, dtypes)


def aligned_bytes(count, alignment=16):
    """An uninitialised array of `count` bytes whose address is a multiple of `alignment`."""
    memory = numpy.empty(count + alignment, numpy.uint8)
    begin = -memory.ctypes.data % alignment
    return memory[begin : begin + count]
