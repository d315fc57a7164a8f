# SPDX-License-Identifier: Apache-2.0
"""What the package uses of epx_moe.h, for ctypes. tests/python/layout_test.py compares it with the header."""

import ctypes
import enum
from ctypes import POINTER, c_double, c_int32, c_int64, c_size_t, c_void_p

from ._library import load
from ._structs import GROUP, RowFormat, Tensor, _declare

libepx_moe = load("libepx_moe.so.0")


class Score(enum.IntEnum):
    """How a logit becomes a score (epx_moe_score)."""

    TOPK_THEN_SOFTMAX = 0
    SOFTMAX_THEN_TOPK = 1
    SIGMOID = 2


class Activation(enum.IntEnum):
    """The activation between the two projections of an expert (epx_moe_activation)."""

    SWIGLU = 0
    GELU = 1
    RELU2 = 2


class Weighting(enum.IntEnum):
    """Where a route's weight is applied (epx_moe_weighting)."""

    LATE = 0
    EARLY = 1


class Path(enum.IntEnum):
    """How rows come to their experts and back (epx_moe_path)."""

    DISPATCH = 0
    RING = 1
    RAGGED = 2


class Recipe(enum.IntEnum):
    """Which of the experts' products multiply FLOAT8_E4M3 (epx_moe_recipe)."""

    WIDE = 0
    FP8_ACTIVATIONS = 1
    FP8 = 2


class RouterConfig(ctypes.Structure):
    _c_name_ = "epx_moe_router_config"
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("score", c_int32),
        ("num_groups", c_int32),
        ("topk_groups", c_int32),
        ("renormalize", c_int32),
        ("scaling_factor", c_double),
        ("aux_loss_coeff", c_double),
        ("group_score_top_k", c_int32),
        ("reserved0", c_int32),
        ("reserved", c_int64 * 3),
    ]


class FfnConfig(ctypes.Structure):
    _c_name_ = "epx_moe_ffn_config"
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_local_experts", c_int32),
        ("hidden_dim", c_int32),
        ("ffn_dim", c_int32),
        ("activation", c_int32),
        ("reserved", c_int64 * 4),
    ]


PARAMS = ("gate_up_weight", "gate_weight", "up_weight", "down_weight", "gate_up_bias", "gate_bias", "up_bias", "down_bias")


class FfnParams(ctypes.Structure):
    _c_name_ = "epx_moe_ffn_params"
    _fields_ = [("struct_size", c_size_t)] + [(name, POINTER(Tensor)) for name in PARAMS]


# Each has codes and scales; gate and up are stacked.
FP8_PARAMS = tuple(
    f"{weight}{form}_{part}" for form in ("", "_transposed") for weight in ("gate_up", "down") for part in ("codes", "scales")
)


class Fp8Params(ctypes.Structure):
    _c_name_ = "epx_moe_fp8_params"
    _fields_ = [("struct_size", c_size_t)] + [(name, POINTER(Tensor)) for name in FP8_PARAMS]


class QuantiseParamsArgs(ctypes.Structure):
    _c_name_ = "epx_moe_quantise_params_args"
    _fields_ = [
        ("struct_size", c_size_t),
        ("cuda", c_void_p),
        ("format", POINTER(RowFormat)),
        ("gate_up_weight", POINTER(Tensor)),
        ("down_weight", POINTER(Tensor)),
        ("fp8_params", POINTER(Fp8Params)),
    ]


class BlockConfig(ctypes.Structure):
    _c_name_ = "epx_moe_block_config"
    _fields_ = [
        ("struct_size", c_size_t),
        ("router", POINTER(RouterConfig)),
        ("ffn", POINTER(FfnConfig)),
        ("arena", c_void_p),
        ("dtype", c_int32),
        ("weighting", c_int32),
        ("alignment", c_int32),
        ("max_in_flight", c_int32),
        ("max_tokens_per_rank", c_int32),
        ("recompute", c_int32),
        ("dispatch_format", POINTER(RowFormat)),
        ("recipe", c_int32),
        ("path", c_int32),
        ("reserved", c_int64 * 4),
    ]


class ArenaConfig(ctypes.Structure):
    _c_name_ = "epx_moe_arena_config"
    _fields_ = [
        ("struct_size", c_size_t),
        ("block", POINTER(BlockConfig)),
        ("num_flights", c_int32),
        ("reserved0", c_int32),
        ("max_rows", c_int64),
        ("reserved", c_int64 * 4),
    ]


class ArenaInfo(ctypes.Structure):
    _c_name_ = "epx_moe_arena_info"
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_flights", c_int32),
        ("reserved0", c_int32),
        ("max_rows", c_int64),
        ("window_bytes", c_int64),
        ("flight_bytes", c_int64),
        ("workspace_bytes", c_int64),
        ("total_bytes", c_int64),
    ]


class BlockFwdArgs(ctypes.Structure):
    _c_name_ = "epx_moe_block_fwd_args"
    _fields_ = [
        ("struct_size", c_size_t),
        ("cuda", c_void_p),
        ("flight", c_int32),
        ("tokens", POINTER(Tensor)),
        ("logits", POINTER(Tensor)),
        ("selection_bias", POINTER(Tensor)),
        ("token_mask", POINTER(Tensor)),
        ("params", POINTER(FfnParams)),
        ("fp8_params", POINTER(Fp8Params)),
        ("out", POINTER(Tensor)),
        ("topk_idx", POINTER(Tensor)),
        ("topk_weights", POINTER(Tensor)),
        ("global_counts", POINTER(Tensor)),
        ("info", POINTER(Tensor)),
    ]


class BlockBwdArgs(ctypes.Structure):
    _c_name_ = "epx_moe_block_bwd_args"
    _fields_ = [
        ("struct_size", c_size_t),
        ("cuda", c_void_p),
        ("flight", c_int32),
        ("params", POINTER(FfnParams)),
        ("fp8_params", POINTER(Fp8Params)),
        ("grad_out", POINTER(Tensor)),
        ("aux_loss_grad", c_double),
        ("grad_tokens", POINTER(Tensor)),
        ("grad_logits", POINTER(Tensor)),
        ("grads", POINTER(FfnParams)),
        ("accumulate", c_int32),
    ]


STRUCTS = [
    RouterConfig,
    FfnConfig,
    FfnParams,
    Fp8Params,
    QuantiseParamsArgs,
    BlockConfig,
    ArenaConfig,
    ArenaInfo,
    BlockFwdArgs,
    BlockBwdArgs,
]
ENUMS = [
    ("EPX_MOE_", Score),
    ("EPX_MOE_", Activation),
    ("EPX_MOE_WEIGHT_", Weighting),
    ("EPX_MOE_PATH_", Path),
    ("EPX_MOE_RECIPE_", Recipe),
]

BLOCK = c_void_p
ARENA = c_void_p
epx_moe_arena_config_init = _declare(libepx_moe, "epx_moe_arena_config_init", c_int32, POINTER(ArenaConfig), c_size_t)
epx_moe_arena_create = _declare(libepx_moe, "epx_moe_arena_create", c_int32, GROUP, POINTER(ArenaConfig), POINTER(ARENA))
epx_moe_arena_destroy = _declare(libepx_moe, "epx_moe_arena_destroy", c_int32, ARENA)
epx_moe_arena_destroy_local = _declare(libepx_moe, "epx_moe_arena_destroy_local", None, ARENA)
epx_moe_arena_query = _declare(libepx_moe, "epx_moe_arena_query", c_int32, ARENA, POINTER(ArenaInfo))
epx_moe_router_config_init = _declare(libepx_moe, "epx_moe_router_config_init", c_int32, POINTER(RouterConfig), c_size_t)
epx_moe_ffn_config_init = _declare(libepx_moe, "epx_moe_ffn_config_init", c_int32, POINTER(FfnConfig), c_size_t)
epx_moe_block_config_init = _declare(libepx_moe, "epx_moe_block_config_init", c_int32, POINTER(BlockConfig), c_size_t)
epx_moe_block_create = _declare(libepx_moe, "epx_moe_block_create", c_int32, GROUP, POINTER(BlockConfig), POINTER(BLOCK))
epx_moe_block_destroy = _declare(libepx_moe, "epx_moe_block_destroy", c_int32, BLOCK)
epx_moe_block_destroy_local = _declare(libepx_moe, "epx_moe_block_destroy_local", None, BLOCK)
epx_moe_block_fwd = _declare(libepx_moe, "epx_moe_block_fwd", c_int32, BLOCK, POINTER(BlockFwdArgs))
epx_moe_block_bwd = _declare(libepx_moe, "epx_moe_block_bwd", c_int32, BLOCK, POINTER(BlockBwdArgs))
epx_moe_quantise_params = _declare(libepx_moe, "epx_moe_quantise_params", c_int32, POINTER(QuantiseParamsArgs))
