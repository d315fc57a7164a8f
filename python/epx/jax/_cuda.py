# SPDX-License-Identifier: Apache-2.0
"""What a group on GPUs needs of this process while it is created: the current device of CUDA, which JAX does not set on the
caller's thread, and NCCL, which XLA loads when it first needs it itself."""

import contextlib
import ctypes
import importlib.util
import pathlib

from .._structs import Status
from ..errors import UnsupportedError


def _check(library, result, function):
    if result != 0:
        name = ctypes.c_char_p()
        library.cuGetErrorName(result, ctypes.byref(name))
        raise UnsupportedError(f"{function} returned {(name.value or b'?').decode()} ({result})", Status.UNSUPPORTED)


def _load_nccl():
    """Loads the NCCL that JAX's wheels bring, from where the loader does not look by itself. libepx then takes it, as XLA
    does."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # there is no package nvidia
        return
    for folder in found.submodule_search_locations or () if found else ():
        library = pathlib.Path(folder) / "lib" / "libnccl.so.2"
        if library.exists():
            ctypes.CDLL(str(library))
            return


@contextlib.contextmanager
def current(device):
    """Has this thread's current CUDA device be `device`, a jax.Device, and NCCL loaded. Does nothing for a device that is no
    CUDA device."""
    if device.platform != "gpu" or "rocm" in device.client.platform_version.lower():
        yield
        return
    _load_nccl()
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
