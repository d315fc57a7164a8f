# SPDX-License-Identifier: Apache-2.0
"""Loads libepx_torch, whose operators are torch.ops.epx.*, and gives them fake kernels and effects."""

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


def _new(tensor, *sizes, dtype=None):
    return tensor.new_empty(sizes, dtype=dtype)


def size_of_info(dtype):
    """How many elements of a dtype prepare's info takes, 5 int64, which come first in its tensor of results."""
    return 5 * torch.int64.itemsize // dtype.itemsize


def _plan(group, topk_idx, alignment, int64_counts):
    known = groups[group]
    known.require_layer(topk_idx.shape[1], alignment)
    dtype = torch.int64 if int64_counts else torch.int32
    num_counts = 2 * known.num_local_experts + 1 + known.num_ranks * known.num_experts
    return (
        _new(topk_idx, known.handle_mem_size(topk_idx.shape[1], alignment), dtype=torch.uint8),
        _new(topk_idx, size_of_info(dtype) + num_counts, dtype=dtype),
    )


torch.library.register_fake("epx::prepare", _plan)


@torch.library.register_fake("epx::prepare_dispatch")
def _(group, topk_idx, tokens, topk_weights, alignment, int64_counts, pads, num_rows):
    weights = 0 if topk_weights is None else num_rows
    plan = _plan(group, topk_idx, alignment, int64_counts)
    return *plan, _new(tokens, num_rows, tokens.shape[1]), _new(tokens, weights, dtype=torch.float32)


@torch.library.register_fake("epx::dispatch")
def _(group, handle_mem, tokens, topk_weights, top_k, alignment, pads, num_rows):
    weights = 0 if topk_weights is None else num_rows
    return _new(tokens, num_rows, tokens.shape[1]), _new(tokens, weights, dtype=torch.float32)


@torch.library.register_fake("epx::dispatch_into")
def _(group, handle_mem, tokens, topk_weights, top_k, alignment, pads, recv_tokens):
    return _new(tokens, 0 if topk_weights is None else recv_tokens.shape[0], dtype=torch.float32)


@torch.library.register_fake("epx::combine")
def _(group, handle_mem, expert_out, recv_weights, top_k, alignment, num_tokens):
    return _new(expert_out, num_tokens, expert_out.shape[1])


@torch.library.register_fake("epx::combine_bwd")
def _(group, handle_mem, grad_out, expert_out, recv_weights, top_k, alignment, num_rows):
    weights = 0 if expert_out is None else num_rows
    return _new(grad_out, num_rows, grad_out.shape[1]), _new(grad_out, weights, dtype=torch.float32)


@torch.library.register_fake("epx::dispatch_bwd")
def _(group, handle_mem, grad_recv, grad_recv_weights, top_k, alignment, num_tokens):
    weights = (0,) if grad_recv_weights is None else (num_tokens, top_k)
    return _new(grad_recv, num_tokens, grad_recv.shape[1]), _new(grad_recv, *weights, dtype=torch.float32)


def _rank_major_plan(group, tokens, topk_idx, topk_weights, max_rows):
    known, top_k = groups[group], topk_idx.shape[1]
    weights = (0,) if topk_weights is None else (known.num_ranks, max_rows, top_k)
    return (
        _new(tokens, known.handle_mem_size(top_k, 1), dtype=torch.uint8),
        _new(tokens, known.num_ranks, max_rows, top_k, dtype=torch.int32),
        _new(tokens, *weights, dtype=torch.float32),
        _new(tokens, known.num_ranks, dtype=torch.int32),
    )


@torch.library.register_fake("epx::dispatch_rank_major")
def _(group, tokens, topk_idx, topk_weights, max_rows):
    rows = _new(tokens, groups[group].num_ranks, max_rows, tokens.shape[1])
    return rows, *_rank_major_plan(group, tokens, topk_idx, topk_weights, max_rows)


@torch.library.register_fake("epx::dispatch_rank_major_into")
def _(group, tokens, topk_idx, topk_weights, recv_tokens):
    return _rank_major_plan(group, tokens, topk_idx, topk_weights, recv_tokens.shape[1])


@torch.library.register_fake("epx::combine_rank_major")
def _(group, handle_mem, expert_out, top_k, num_tokens):
    return _new(expert_out, num_tokens, expert_out.shape[2])


@torch.library.register_fake("epx::combine_rank_major_bwd")
def _(group, handle_mem, grad_out, top_k, max_rows):
    return _new(grad_out, groups[group].num_ranks, max_rows, grad_out.shape[1])


@torch.library.register_fake("epx::dispatch_rank_major_bwd")
def _(group, handle_mem, grad_recv, grad_recv_weights, top_k, num_tokens):
    weights = (0,) if grad_recv_weights is None else (num_tokens, top_k)
    return _new(grad_recv, num_tokens, grad_recv.shape[2]), _new(grad_recv, *weights, dtype=torch.float32)


@torch.library.register_fake("epx::block_fwd")
def _(block, tokens, logits, selection_bias, token_mask, first_weight, down_weight, first_bias, down_bias, keeps_flight):
    layer = layers[block]
    num_tokens, top_k = tokens.shape[0], layer.router.top_k
    return (
        torch.empty_like(tokens),
        _new(tokens, num_tokens, top_k, dtype=torch.int32),
        _new(tokens, num_tokens, top_k, dtype=torch.float32),
        _new(tokens, layer.group.num_ranks, layer.group.num_experts, dtype=torch.int64),
        _new(tokens, 3, dtype=torch.int64),
        torch.empty(2, dtype=torch.int64, device="cpu"),
    )


@torch.library.register_fake("epx::block_bwd")
def _(block, flight, grad_out, logits, first_weight, down_weight, first_bias, down_bias, aux_loss_grad):
    nothing = _new(grad_out, 0)
    return (
        torch.empty_like(grad_out),
        torch.empty_like(logits),
        torch.empty_like(first_weight),
        torch.empty_like(down_weight),
        nothing if first_bias is None else torch.empty_like(first_bias),
        nothing.clone() if down_bias is None else torch.empty_like(down_bias),
    )


@torch.library.register_fake("epx::aux_loss")
def _(block, logits, topk_idx, global_counts):
    return _new(logits, 1, dtype=torch.float64)


@torch.library.register_fake("epx::update_selection_bias")
def _(block, global_counts, rate, selection_bias):
    return None


def _refuse_vmap(name):
    def refuse(info, in_dims, *args):
        raise RuntimeError(f"epx::{name} cannot be called under vmap: each call is one exchange of all ranks")

    return refuse


def keep_in_order(name):
    """Gives an operator the effect by which torch.compile threads it through a token, forward and backward: it neither merges,
    drops, reorders nor recomputes the call, whatever the shapes of a rank let it do with other operators."""
    torch.library._register_effectful_op(f"epx::{name}", torch._library.effects.EffectType.ORDERED)
    torch.library.register_vmap(f"epx::{name}", _refuse_vmap(name))


for _name in (*CALLS, "block_fwd", "block_bwd"):
    keep_in_order(_name)
