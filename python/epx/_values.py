# SPDX-License-Identifier: Apache-2.0
"""What a caller gives for the fields of C: refused with a sentence where ctypes would cut it or raise its own error."""

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
    return kind.__name__ if module == "builtins" else f"{module}.{kind.__name__}"


def require_kind(name, value, kind):
    if not isinstance(value, kind):
        refuse(f"{name} is {name_of(type(value))}; this call takes {name_of(kind)}")


def integer(name, value, kind=ctypes.c_int32):
    """The value as an int, which a field of type `kind` can hold. ctypes would take it modulo 2^32."""
    try:
        value = operator.index(value)
    except TypeError:
        refuse(f"{name} is {value!r}; it must be an integer")
    if kind(value).value != value:
        refuse(f"{name} is {value}; it must fit in {8 * ctypes.sizeof(kind)} bits")
    return value


def count(name, value):
    """The value as an int that is no less than 0."""
    value = integer(name, value, ctypes.c_int64)
    if value < 0:
        refuse(f"{name} is {value}; it must be at least 0")
    return value


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
        names = ", ".join(repr(each.name.lower()) for each in enumeration)
        refuse(f"{name} is {value!r}; it must be one of {names}")


def set_fields(struct, **values):
    """Sets fields of a struct of C."""
    kinds = dict(struct._fields_)
    for name, value in values.items():
        setattr(struct, name, integer(name, value, kinds[name]) if kinds[name] in _INTEGERS else value)
