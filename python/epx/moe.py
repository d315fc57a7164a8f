# SPDX-License-Identifier: Apache-2.0
"""The MoE block of epx_moe.h on numpy arrays of the host: router, prepare, dispatch, FFN and combine, forward and backward.

Symbols in shapes: those of epx.group, and F, the size of the FFN's inner layer.
"""

import ctypes
import dataclasses

import numpy

from . import _moe_structs
from ._formats import RowFormat, require_wire_only
from ._lifetime import LocalMemory, Unique, destroy_abandoned, finalize
from ._moe_structs import FP8_PARAMS, PARAMS, Activation, FfnParams, Fp8Params, Path, Recipe, Score, Weighting
from ._tensors import dtype_code, dtype_of, output, tensor
from ._values import integer, member, refuse, refuse_destroyed, require_kind, require_shape, set_fields
from .errors import raise_call_failed, raise_if_failed

_NUM_FLIGHT_INFO = 3
_UINT8 = numpy.dtype(numpy.uint8)
_WEIGHTS = "gate_up_weight", "down_weight"  # of experts in FP8
_FP8_BLOCK = 128  # rows and columns of a weight that have one scale
_FP8_ALIGNMENT = 16  # of which zones in FP8 are multiples


@dataclasses.dataclass(frozen=True)
class Router:
    """How experts are selected and weighed. score: "topk_then_softmax" (Mixtral), "softmax_then_topk" (Switch, DeepSeek-V2) or
    "sigmoid" (DeepSeek-V3). The other fields are those of epx_moe_router_config: group_score_top_k is 1 for the groups of
    DeepSeek-V2, 2 for those of DeepSeek-V3, and 0 for Megatron's."""

    top_k: int
    score: str = "topk_then_softmax"
    num_groups: int = 1
    topk_groups: int = 1
    renormalize: bool = False
    scaling_factor: float = 1.0
    aux_loss_coeff: float = 0.0
    group_score_top_k: int = 0

    def to_c(self, num_experts):
        config = _moe_structs.RouterConfig()
        raise_if_failed(_moe_structs.epx_moe_router_config_init(config, ctypes.sizeof(config)))
        set_fields(
            config,
            num_experts=num_experts,
            top_k=self.top_k,
            score=member(Score, self.score, "score"),
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
            renormalize=bool(self.renormalize),
            scaling_factor=self.scaling_factor,
            aux_loss_coeff=self.aux_loss_coeff,
            group_score_top_k=self.group_score_top_k,
        )
        return config


@dataclasses.dataclass(frozen=True)
class Ffn:
    """The experts: hidden_dim H, ffn_dim F, and activation "swiglu", "gelu" or "relu2"."""

    hidden_dim: int
    ffn_dim: int
    activation: str = "swiglu"

    def to_c(self):
        config = _moe_structs.FfnConfig()
        raise_if_failed(_moe_structs.epx_moe_ffn_config_init(config, ctypes.sizeof(config)))
        activation = member(Activation, self.activation, "activation")
        set_fields(config, hidden_dim=self.hidden_dim, ffn_dim=self.ffn_dim, activation=activation)
        return config


def make_block_config(num_experts, router, ffn, dtype, weighting, dispatch_format, recipe, path, alignment, **fields):
    """An epx_moe_block_config. dtype: its code.  weighting, alignment: None for what suits the recipe and the path.  fields:
    others of it, integers."""
    require_kind("router", router, Router)
    require_kind("ffn", ffn, Ffn)
    recipe, path = member(Recipe, recipe, "recipe"), member(Path, path, "path")
    if weighting is None:
        weighting = Weighting.LATE if recipe == Recipe.WIDE and path == Path.DISPATCH else Weighting.EARLY
    if alignment is None:
        alignment = 1 if recipe == Recipe.WIDE else _FP8_ALIGNMENT
    config = _moe_structs.BlockConfig()
    raise_if_failed(_moe_structs.epx_moe_block_config_init(config, ctypes.sizeof(config)))
    config.router, config.ffn = ctypes.pointer(router.to_c(num_experts)), ctypes.pointer(ffn.to_c())
    if dispatch_format is not None:
        require_wire_only("dispatch_format", dispatch_format)
        config.dispatch_format = ctypes.pointer(dispatch_format.to_c())
    weighting = member(Weighting, weighting, "weighting")
    set_fields(config, dtype=dtype, weighting=weighting, recipe=recipe, path=path, alignment=alignment, **fields)
    return config


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
    """What a forward returns. out: [T, H].  topk_idx: [T, K] int32, -1 where masked.  topk_weights: [T, K].  global_counts: [P,
    E] int64. info: [3] int64: masked tokens, bad tokens (their scores are not numbers), index of the first bad one or -1."""

    out: numpy.ndarray
    topk_idx: numpy.ndarray
    topk_weights: numpy.ndarray
    global_counts: numpy.ndarray
    info: numpy.ndarray


class _Params:
    """A struct of arrays by name. kind: epx_moe_ffn_params or epx_moe_fp8_params.  hint: how a refusal of a name ends."""

    def __init__(self, arrays, what, kind=FfnParams, view=tensor, hint=""):
        self.struct = kind(struct_size=ctypes.sizeof(kind))
        names = FP8_PARAMS if kind is Fp8Params else PARAMS
        require_kind(what, arrays, dict)
        for name, array in arrays.items():
            if name not in names:
                refuse(f"{what} has {name!r}; the names are {', '.join(names)}{hint}")
            if array is not None:
                setattr(self.struct, name, ctypes.pointer(view(f"{what}[{name!r}]", array)))


def _weights(params):
    """The two arrays that experts in FP8 have as weights."""
    require_kind("params", params, dict)
    given = {name: array for name, array in params.items() if array is not None}
    if given.keys() != set(_WEIGHTS):
        refuse(f"params has {', '.join(map(repr, given)) or 'no arrays'}; experts in FP8 have {' and '.join(_WEIGHTS)}")
    dtypes = numpy.dtype(numpy.float32), numpy.dtype(numpy.float16), dtype_of("bfloat16")
    for name in _WEIGHTS:
        tensor(f"params[{name!r}]", given[name], (None, None, None), dtypes)
    local, stacked, hidden = given["gate_up_weight"].shape
    if stacked % (2 * _FP8_BLOCK) or hidden % _FP8_BLOCK or not stacked or not hidden:
        refuse(
            f"params['gate_up_weight'] has shape {[local, stacked, hidden]}, [E_l, 2F, H]; in FP8 F and H are positive "
            f"multiples of {_FP8_BLOCK}"
        )
    require_shape("params['down_weight']", given["down_weight"].shape, (local, hidden, stacked // 2))
    return [given[name] for name in _WEIGHTS]


def quantise_params(params) -> dict[str, numpy.ndarray]:
    """What a Block with a recipe in FP8 takes as its params. It is called once for each step of the optimizer, which keeps the
    weights themselves: forwards and backwards of the step share what it returns.

    params: a dict of gate_up_weight [E_l, 2F, H] and down_weight [E_l, H, F], float32, float16 or bfloat16 (of the package
    ml_dtypes). H and F are multiples of 128.
    Returns a dict by the names of epx_moe_fp8_params. For gate_up it has gate_up_codes [E_l, 2F, H] float8_e4m3fn (of ml_dtypes)
    and gate_up_scales [E_l, 2F / 128, H / 128] float32, one for each 128 x 128 weights; gate_up_transposed_codes [E_l, H, 2F] and
    gate_up_transposed_scales [E_l, H / 128, 2F / 128] are the same transposed. down_... are those of down_weight. A forward looks
    at the arrays without "transposed", a backward at the others, and with recompute at all. Raises InvalidArgumentError for
    other names, shapes and dtypes, and without ml_dtypes.
    """
    gate_up, down = _weights(params)
    local, stacked, hidden = gate_up.shape
    ffn = down.shape[2]
    shapes = {
        "gate_up": (stacked, hidden),
        "down": (hidden, ffn),
        "gate_up_transposed": (hidden, stacked),
        "down_transposed": (ffn, hidden),
    }
    made = {}
    for name, (rows, columns) in shapes.items():
        made[f"{name}_codes"] = numpy.empty((local, rows, columns), dtype_of("float8_e4m3fn"))
        made[f"{name}_scales"] = numpy.empty((local, rows // _FP8_BLOCK, columns // _FP8_BLOCK), numpy.float32)
    args = _moe_structs.QuantiseParamsArgs(
        struct_size=ctypes.sizeof(_moe_structs.QuantiseParamsArgs),
        format=ctypes.pointer(RowFormat("block128").to_c()),
        gate_up_weight=ctypes.pointer(tensor("params['gate_up_weight']", gate_up)),
        down_weight=ctypes.pointer(tensor("params['down_weight']", down)),
        fp8_params=ctypes.pointer(_Params(made, "params", Fp8Params, view=output).struct),
    )
    raise_if_failed(_moe_structs.epx_moe_quantise_params(args))
    return made


class Block(Unique):
    """An MoE layer. Parameters are the caller's, as a dict of arrays by the names of epx_moe_ffn_params (weights are [E_l, out,
    in]).

    group: on the host transport, or None for a layer whose experts are all on this rank, with num_experts E.
    dtype: "float32"; without a group also "float64".  weighting: "late" or "early"; default: "late", with a recipe in FP8
    or another path than "dispatch" "early".  alignment: rows that zones are padded to; default: 1, with a recipe in FP8 16.
    max_in_flight: forwards whose backward is still to come, each in a flight of its own.  recompute: the backward computes the
    FFN's activations again instead of keeping them.  max_tokens_per_rank: the largest T, without a group.  dispatch_format: an
    epx.RowFormat with wire_only, in which the forward's rows travel to their experts, also where these are on the same rank.
    Gradients pass straight through. dtype is then float32.

    recipe: which products of the experts multiply float8_e4m3fn, a Recipe or its name: "wide", none; "fp8_activations", those of
    the forward and of the rows' gradients; "fp8", all. With the latter two rows travel to their experts in FP8, and gradients
    pass straight through the quantisers. Parameters are then what quantise_params() returns. dtype is float32, the activation
    "swiglu", the weighting "early", H and F are multiples of 128, and there is no dispatch_format; with "fp8" the alignment is
    a multiple of 16.

    path: how rows come to their experts and back, a Path or its name: "dispatch", a row travels once to each rank of its
    experts; "ring", all tokens come to every rank, and partial sums of them go home, with the bits of "dispatch" in a group of
    precision "wire"; "ragged", each rank sorts its rows by expert, and a row travels once to each expert, with the bits of
    "dispatch" in a group of precision "exact". With the latter two the weighting is "early", the recipe "wide", there is no
    dispatch_format, and the group has room for all routes. Without a group all are the same.

    Created by all ranks of the group. destroy() is collective, since it frees memory that peers reach. Of a block that nobody
    refers to any more, the rank's own memory is freed by the next creation or destroy(), and what peers reach at the end of the
    group.
    """

    def __init__(
        self,
        group,
        *,
        router,
        ffn,
        num_experts=None,
        dtype="float32",
        weighting=None,
        alignment=None,
        max_in_flight=1,
        max_tokens_per_rank=0,
        recompute=False,
        dispatch_format=None,
        recipe="wide",
        path="dispatch",
    ):
        if group is not None:
            group.require_host()
        if (group is None) == (num_experts is None):
            refuse("num_experts is given iff the block has no group")
        self._group = group
        self._num_experts = num_experts if group is None else group.num_experts
        self._num_ranks = 1 if group is None else group.num_ranks
        self._router, self._ffn = router, ffn
        self._dtype = numpy.dtype(dtype)
        config = make_block_config(
            self._num_experts,
            router,
            ffn,
            dtype_code(self._dtype),
            weighting,
            dispatch_format,
            recipe,
            path,
            alignment,
            max_in_flight=max_in_flight,
            max_tokens_per_rank=max_tokens_per_rank,
            recompute=bool(recompute),
        )
        self._recipe = Recipe(config.recipe)
        destroy_abandoned()
        block = _moe_structs.BLOCK()
        self._raise_if_failed(_moe_structs.epx_moe_block_create(self._group_handle(), config, block))
        self._memory = LocalMemory(block.value, _moe_structs.epx_moe_block_destroy_local)
        self._finalizer = finalize(self, self._memory)

    @property
    def params_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of this rank's parameters, by name, with gate and up stacked and without biases. With a recipe in FP8 those
        of what quantise_params() takes."""
        local = self._num_experts if self._group is None else self._group.num_local_experts
        hidden, ffn = self._ffn.hidden_dim, self._ffn.ffn_dim
        first = (
            {"gate_up_weight": (local, 2 * ffn, hidden)}
            if self._ffn.activation == "swiglu"
            else {"up_weight": (local, ffn, hidden)}
        )
        return {**first, "down_weight": (local, hidden, ffn)}

    def forward(self, tokens, logits, params, *, flight=0, selection_bias=None, token_mask=None) -> Output:
        """Collective. tokens: [T, H], logits: [T, E] and selection_bias: [E], of the block's dtype.  params: with a recipe in FP8
        what quantise_params() returns.  token_mask: [T] uint8 or bool; 0 masks the token.
        Keeps in `flight` what backward needs. Returns an Output."""
        handle = self._handle()
        sent = tensor("tokens", tokens, (None, self._ffn.hidden_dim), (self._dtype,))
        num_tokens, top_k = len(tokens), self._router.top_k
        result = Output(
            numpy.empty_like(tokens),
            numpy.empty((num_tokens, top_k), numpy.int32),
            numpy.empty((num_tokens, top_k), self._dtype),
            numpy.empty((self._num_ranks, self._num_experts), numpy.int64),
            numpy.empty(_NUM_FLIGHT_INFO, numpy.int64),
        )
        if isinstance(token_mask, numpy.ndarray) and token_mask.dtype == numpy.bool_:
            token_mask = token_mask.view(numpy.uint8)
        args = _moe_structs.BlockFwdArgs(
            struct_size=ctypes.sizeof(_moe_structs.BlockFwdArgs),
            flight=integer("flight", flight),
            **self._params(params),
            tokens=ctypes.pointer(sent),
            logits=ctypes.pointer(tensor("logits", logits, (num_tokens, self._num_experts))),
        )
        if selection_bias is not None:
            args.selection_bias = ctypes.pointer(tensor("selection_bias", selection_bias, (self._num_experts,)))
        if token_mask is not None:
            args.token_mask = ctypes.pointer(tensor("token_mask", token_mask, (num_tokens,), (_UINT8,)))
        for field in dataclasses.fields(Output):
            setattr(args, field.name, ctypes.pointer(tensor(field.name, getattr(result, field.name))))
        self._raise_if_failed(_moe_structs.epx_moe_block_fwd(handle, args))
        return result

    def backward(
        self, grad_out, params, *, flight=0, aux_loss_grad=0.0, grads=None
    ) -> tuple[numpy.ndarray, numpy.ndarray, dict]:
        """Collective. grad_out: [T, H] of the block's dtype, for the forward in `flight`.  aux_loss_grad: gradient of the loss with
        respect to the router's load-balance loss.  grads: arrays by name that the gradients of the parameters are added to;
        None: new ones; with a recipe in FP8 gate_up_weight and down_weight, float32.
        Returns (grad_tokens [T, H], grad_logits [T, E], grads). grad_tokens is through the experts; what comes through the
        logits is the caller's to add."""
        handle = self._handle()
        grad = tensor("grad_out", grad_out, (None, self._ffn.hidden_dim), (self._dtype,))
        given, accumulate = self._params(params), grads is not None
        if grads is None:
            grads = self._new_grads(params)
        grad_tokens = numpy.empty_like(grad_out)
        grad_logits = numpy.empty((len(grad_out), self._num_experts), self._dtype)
        made = _Params(grads, "grads", view=output)
        args = _moe_structs.BlockBwdArgs(
            struct_size=ctypes.sizeof(_moe_structs.BlockBwdArgs),
            flight=integer("flight", flight),
            **given,
            grad_out=ctypes.pointer(grad),
            aux_loss_grad=aux_loss_grad,
            grad_tokens=ctypes.pointer(tensor("grad_tokens", grad_tokens)),
            grad_logits=ctypes.pointer(tensor("grad_logits", grad_logits)),
            grads=ctypes.pointer(made.struct),
            accumulate=int(accumulate),
        )
        self._raise_if_failed(_moe_structs.epx_moe_block_bwd(handle, args))
        return grad_tokens, grad_logits, grads

    def _params(self, params):
        """The fields of a call's args that have its parameters."""
        hint = f" with recipe {self._recipe.name.lower()}"
        if self._recipe == Recipe.WIDE:
            return {"params": ctypes.pointer(_Params(params, "params", hint=hint).struct)}
        hint += ", as quantise_params returns them"
        return {"fp8_params": ctypes.pointer(_Params(params, "params", Fp8Params, hint=hint).struct)}

    def _new_grads(self, params):
        if self._recipe == Recipe.WIDE:
            return {name: numpy.empty_like(array) for name, array in params.items() if array is not None}
        return {name: numpy.empty(shape, numpy.float32) for name, shape in self.params_shapes.items()}

    def destroy(self) -> None:
        """Frees the block; a second time it does nothing. Collective when it has a group that has not failed and has not been
        destroyed."""
        if self._group is None or self._group.is_destroyed:
            self._memory.destroy()
        elif (value := self._memory.take()) is not None:
            self._finalizer.detach()
            self._raise_if_failed(_moe_structs.epx_moe_block_destroy(value))

    def __enter__(self) -> "Block":
        return self

    def __exit__(self, kind, *_):
        if kind is None:  # else the peers may never come to it
            self.destroy()

    def _group_handle(self):
        return None if self._group is None else self._group.handle

    def _handle(self):
        if self._memory.value is None:
            refuse_destroyed("block")
        self._group_handle()
        return self._memory.value

    def _raise_if_failed(self, status):
        if status and self._group is not None:
            raise_call_failed(self._group.handle, status)
        raise_if_failed(status)


__all__ = ["Activation", "Block", "Ffn", "Output", "Path", "Recipe", "Router", "Score", "Weighting", "quantise_params"]
