# SPDX-License-Identifier: Apache-2.0
"""Registers the handlers of libepx_ffi with XLA, and groups with the handlers.

Calls are a primitive of epx's own instead of jax.ffi.ffi_call, because of those that XLA must keep although nobody uses what
they return: an effect of JAX, which is ffi_call's way to say so, is refused in functions with gradients of their own and in
jax.checkpoint. Here only the custom call in XLA's program has a side effect.
"""

import ctypes
import functools
import weakref

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._library import load
from .._structs import CALLS, Status
from .._values import refuse
from ..errors import UnsupportedError, last_sentence

_library = load("libepx_ffi.so.0")
_library.epx_ffi_register.restype = ctypes.c_int64
_library.epx_ffi_register.argtypes = [ctypes.c_void_p]
_library.epx_ffi_retire.restype = ctypes.c_int32
_library.epx_ffi_retire.argtypes = [ctypes.c_int64]

for _operation in (*CALLS, "ragged_all_to_all", "ragged_all_to_all_bwd", "hold"):
    for _platform in ("cpu", "CUDA"):
        _handler = getattr(_library, f"epx_ffi_{_operation}_{_platform.lower()}")
        jax.ffi.register_ffi_target(f"epx_{_operation}", jax.ffi.pycapsule(_handler), platform=_platform)

_numbers = weakref.WeakKeyDictionary()


def number_of(group):
    """The number by which compiled programs refer to the group. It is the same on all ranks that use their groups with JAX for
    the first time in the same order."""
    handle = group.handle  # refuses a group that has been destroyed
    number = _numbers.get(group)
    if number is None:
        number = _library.epx_ffi_register(handle)
        if number == 0:
            refuse(last_sentence())
        _numbers[group] = number
        group.add_user(lambda: _library.epx_ffi_retire(number) == 1)
    return number


_primitive = Primitive("epx")
_primitive.multiple_results = True


@_primitive.def_abstract_eval
def _abstract_eval(*operands, results, **_):
    return [jax.core.ShapedArray(result.shape, result.dtype) for result in results]


@functools.lru_cache
def _compiled(parameters):
    return jax.jit(lambda *operands: _primitive.bind(*operands, **dict(parameters)))


@_primitive.def_impl
def _run(*operands, **parameters):
    with jax.disable_jit(False):  # else the compiled function would come back here
        return _compiled(tuple(sorted(parameters.items())))(*operands)


def _lower(context, *operands, operation, results, has_side_effect, aliases, **attributes):
    del results
    aliases = {0: 0, **dict(aliases)}
    rule = jax.ffi.ffi_lowering(f"epx_{operation}", has_side_effect=has_side_effect, operand_output_aliases=aliases)
    return rule(context, *operands, **attributes)


def _refuse_vmap(*_, operation, **__):
    refuse(f"{operation} is called under vmap: a call moves the tokens of one batch, so flatten the batch into the tokens")


def _refuse_jvp(*_, **__):
    # The operations have a custom_vjp, so what is differentiated here is a call of their gradient.
    raise UnsupportedError(
        "second derivatives of epx's operations are not supported: a function of their gradient is differentiated",
        Status.UNSUPPORTED,
    )


mlir.register_lowering(_primitive, _lower)
ad.primitive_jvps[_primitive] = _refuse_jvp
batching.primitive_batchers[_primitive] = _refuse_vmap


def call(operation, operands, results, has_side_effect=False, aliases=(), **attributes):
    """A custom call to a handler. The first operand is a token, which becomes the first result, a list of arrays. `results` are
    jax.ShapeDtypeStruct. XLA keeps a call with a side effect even if nobody uses its results. aliases: pairs of another operand
    and the result that is written in its place, and begins with what the operand has."""
    return _primitive.bind(
        *operands,
        operation=operation,
        results=(jax.typeof(operands[0]), *results),
        has_side_effect=has_side_effect,
        aliases=aliases,
        **attributes,
    )
