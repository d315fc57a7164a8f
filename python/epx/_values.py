# SPDX-License-Identifier: Apache-2.0
"""The sentences that refuse what a caller gives: one for each mistake, on numpy arrays, in JAX and in PyTorch. The operators of
torch_ops have the same ones. Fields of C are checked where ctypes would cut a value or raise its own error."""

import ctypes
import math
import operator

from ._structs import Status
from .errors import InvalidArgumentError

_INTEGERS = (ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64)


def refuse(message):
    raise InvalidArgumentError(message, Status.INVALID_ARGUMENT)


def name_of(kind):
    """The public name of a class: epx.torch.Plan, int."""
    module = kind.__module__.split("._")[0].removesuffix(".group")  # epx.group.Group is epx.Group
    name = kind.__name__.rsplit(".")[-1]  # JAX gives its Array the name jaxlib._jax.Array
    return name if module == "builtins" else f"{module}.{name}"


def require_kind(name, value, kind):
    if not isinstance(value, kind):
        refuse_kind(name, value, kind)


def refuse_kind(name, value, kind):
    refuse(f"{name} is {name_of(type(value))}; this call takes {name_of(kind)}")


def refuse_choice(name, value, choices):
    refuse(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def refuse_dtype(name, dtype, dtypes):
    refuse(f"{name} is {dtype}; it must be {' or '.join(map(str, dtypes))}")


def refuse_destroyed(what):
    refuse(f"the {what} has been destroyed")


def refuse_strides(name, strides, sizes):
    refuse(f"{name} has strides {list(strides)} at shape {list(sizes)}: it must be contiguous in row-major order")


def require_shape(name, sizes, shape):
    """Refuses sizes other than those of `shape`, which has None where any size will do."""
    if len(sizes) != len(shape) or any(want is not None and want != size for want, size in zip(shape, sizes)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        refuse(f"{name} has shape {list(sizes)}; it must be [{wanted}]")


def require_sidecar(sizes, dtype, bits, num_tokens, max_bytes):
    """Refuses a sidecar that is not [T, S] of whole bytes, with 1 to `max_bytes` in a row. bits: those of an element."""
    require_shape("sidecar", sizes, (num_tokens, None))
    if sizes[1] == 0 or bits % 8:
        refuse(f"sidecar is {dtype} of shape {list(sizes)}; it must have whole bytes, at least one in each row")
    row_bytes = sizes[1] * bits // 8
    if row_bytes > max_bytes:
        refuse(f"sidecar has {row_bytes} bytes in each row; the group's max_sidecar_bytes is {max_bytes}")


def require_one_size(name, size, recv_tokens, symbol):
    """Refuses a number of rows beside rows that have one."""
    if size is not None and recv_tokens is not None:
        refuse(f"{name} and recv_tokens are given; recv_tokens alone says what {symbol} is")


def integer(name, value, kind=ctypes.c_int32):
    """The value as an int, which a field of type `kind` can hold. ctypes would take it modulo 2^32."""
    try:
        value = operator.index(value)
    except TypeError:
        refuse(f"{name} is {value!r}; it must be an integer")
    if kind(value).value != value:
        refuse(f"{name} is {value}; it must fit in {8 * ctypes.sizeof(kind)} bits")
    return value


def boolean(name, value):
    if not isinstance(value, bool):
        refuse_kind(name, value, bool)
    return value


def count(name, value):
    """The value as an int that is no less than 0."""
    value = integer(name, value, ctypes.c_int64)
    if value < 0:
        refuse(f"{name} is {value}; it must be at least 0")
    return value


def number(name, value):
    """The value as a float."""
    try:
        return float(value)
    except (TypeError, ValueError):
        refuse(f"{name} is {value!r}; it must be a number")


def milliseconds(name, seconds):
    """Seconds as milliseconds, rounded up: 0 has a meaning of its own."""
    try:
        return integer(name, math.ceil(seconds * 1000), ctypes.c_int64)
    except (TypeError, ValueError, OverflowError):
        refuse(f"{name} is {seconds!r}; it must be a number of seconds")


def member(enumeration, value, name):
    """The member of an enumeration that has this value, or this name in lower case."""
    try:
        return enumeration[value.upper()] if isinstance(value, str) else enumeration(value)
    except (KeyError, ValueError):
        refuse_choice(name, value, [each.name.lower() for each in enumeration])


def set_fields(struct, **values):
    """Sets fields of a struct of C."""
    kinds = dict(struct._fields_)
    for name, value in values.items():
        setattr(struct, name, integer(name, value, kinds[name]) if kinds[name] in _INTEGERS else value)
