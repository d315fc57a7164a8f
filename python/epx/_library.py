# SPDX-License-Identifier: Apache-2.0
"""Loads libepx and libepx_moe: those that the package carries, else those that are installed on the machine."""

import ctypes
import pathlib

_CARRIED = pathlib.Path(__file__).parent / "_libs"
OLDEST_VERSION = 200  # 0.2.0


def version_text(number):
    """Returns "0.2.0" for 200, as epx_version() numbers them."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def load(name):
    """Returns the library `name` ("libepx.so.0"). Raises ImportError with the loader's reason."""
    carried = _CARRIED / name
    try:
        return ctypes.CDLL(str(carried) if carried.exists() else name)
    except OSError as error:
        raise ImportError(
            f"epx: {name} is neither part of this package nor installed where the loader looks: {error}"
        ) from error


libepx = load("libepx.so.0")
libepx.epx_version.restype = ctypes.c_int32
libepx.epx_version.argtypes = []
if libepx.epx_version() < OLDEST_VERSION:
    raise ImportError(f"epx: the libepx that is loaded has version {version_text(libepx.epx_version())}; "
                      f"the package needs {version_text(OLDEST_VERSION)}")
