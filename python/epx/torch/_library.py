# SPDX-License-Identifier: Apache-2.0
"""Loads libepx_torch, whose operators are torch.ops.epx.*, and gives them effects. Their fake kernels stand beside their
gradients."""

import ctypes
import weakref

import torch

from .. import _moe_structs  # noqa: F401  (loads libepx_moe, which libepx_torch is linked with)
from .._library import load
from .._structs import CALLS

OLDEST_TORCH = (2, 11)

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
    raise ImportError(
        f"epx.torch: PyTorch is {torch.__version__}; libepx_torch needs {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer"
    )

try:
    lib = load("libepx_torch.so.0")
except ImportError as error:
    raise ImportError(
        f"{error}. epx.torch needs it; a package that is built beside PyTorch has it: pip install . --no-build-isolation "
        '--config-settings=setup-args=-Dtorch_python="$(command -v python)"'
    ) from error
lib.epx_torch_take_failure.restype = ctypes.c_int32
lib.epx_torch_register_group.restype = ctypes.c_int64
lib.epx_torch_register_group.argtypes = [ctypes.c_void_p, ctypes.c_int32]
lib.epx_torch_retire_group.restype = ctypes.c_int32
lib.epx_torch_retire_group.argtypes = [ctypes.c_int64]
lib.epx_torch_register_block.restype = ctypes.c_int64
lib.epx_torch_register_block.argtypes = 2 * [ctypes.c_int64] + 2 * [ctypes.c_void_p] + 3 * [ctypes.c_int32]
lib.epx_torch_register_flights.restype = ctypes.c_int64
lib.epx_torch_register_flights.argtypes = [ctypes.c_int32]
lib.epx_torch_retire_flights.restype = None
lib.epx_torch_retire_flights.argtypes = [ctypes.c_int64]
lib.epx_torch_block_is_idle.restype = ctypes.c_int32
lib.epx_torch_block_is_idle.argtypes = [ctypes.c_int64]
lib.epx_torch_retire_block.restype = None
lib.epx_torch_retire_block.argtypes = [ctypes.c_int64]

ops = torch.ops.epx
groups = weakref.WeakValueDictionary()  # epx.torch.Group by number
layers = weakref.WeakValueDictionary()  # epx.torch.MoELayer by number


def new_tensor(tensor, *sizes, dtype=None):
    """A result of a fake kernel: of these sizes, and on the device of `tensor`, whose dtype it has unless another is given."""
    return tensor.new_empty(sizes, dtype=dtype)


def _refuse_vmap(name):
    def refuse(info, in_dims, *args):
        raise RuntimeError(f"epx::{name} cannot be called under vmap: each call is one exchange of all ranks")

    return refuse


def keep_in_order(name):
    """Gives an operator the effect by which torch.compile threads it through a token, forward and backward: it neither merges,
    drops, reorders nor recomputes the call, whatever the shapes of a rank let it do with other operators."""
    torch.library._register_effectful_op(f"epx::{name}", torch._library.effects.EffectType.ORDERED)
    torch.library.register_vmap(f"epx::{name}", _refuse_vmap(name))


_DISPATCHES = "dispatch", "prepare_dispatch", "dispatch_rank_major"
_VARIANTS = [f"{name}_{variant}" for name in _DISPATCHES for variant in ("sidecar", "format")]
for _name in (*CALLS, *_VARIANTS, "ragged_all_to_all", "block_fwd", "block_bwd", "block_fwd_fp8", "block_bwd_fp8"):
    keep_in_order(_name)
