# SPDX-License-Identifier: Apache-2.0
"""Makes JAX's device the one that a group on GPUs is created on: the current device of CUDA, which JAX does not set on the
caller's thread."""

import contextlib
import ctypes

from .._structs import Status
from ..errors import UnsupportedError


def _check(library, result, function):
    if result != 0:
        name = ctypes.c_char_p()
        library.cuGetErrorName(result, ctypes.byref(name))
        raise UnsupportedError(f"{function} returned {(name.value or b'?').decode()} ({result})", Status.UNSUPPORTED)


@contextlib.contextmanager
def current(device):
    """Has this thread's current CUDA device be `device`, a jax.Device. Does nothing for a device that is no CUDA device."""
    if device.platform != "gpu" or "rocm" in device.client.platform_version.lower():
        yield
        return
    library = ctypes.CDLL("libcuda.so.1")  # JAX has loaded it
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    _check(library, library.cuDeviceGet(ctypes.byref(ordinal), device.local_hardware_id), "cuDeviceGet")
    retain = library.cuDevicePrimaryCtxRetain
    _check(library, retain(ctypes.byref(context), ordinal), "cuDevicePrimaryCtxRetain")
    try:
        _check(library, library.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        library.cuDevicePrimaryCtxRelease_v2(ordinal)
