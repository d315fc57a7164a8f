# SPDX-License-Identifier: Apache-2.0
"""An MoE layer as a torch.nn.Module, by the block of epx_moe.h."""

import contextlib
import ctypes
import dataclasses
import functools
import math

import torch

from .. import _moe_structs
from .._formats import RowFormat
from .._lifetime import LocalMemory, destroy_abandoned, finalize
from .._structs import DTYPES, Status
from .._values import refuse, refuse_choice, refuse_destroyed, refuse_dtype, require_kind, set_fields
from ..errors import last_sentence, raise_call_failed, raise_if_failed
from ..moe import Ffn, Path, Recipe, Router, make_block_config
from ._block import WEIGHTS, Block, Fp8Block, KeptWeights, params_of, require_masters
from ._gathered import GatheredWeights, gather_in_fp8
from ._group import Group, OutOfMemoryError, call, require_usable
from ._library import layers, lib, new_tensor, ops
from ._means import create_mean_routes, with_mean_gradient
from ._ops import _records

_block_fwd, _block_fwd_fp8 = ops.block_fwd.default, ops.block_fwd_fp8.default
_aux_loss, _update_selection_bias = ops.aux_loss.default, ops.update_selection_bias.default
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@torch.library.register_fake("epx::aux_loss")
def _(block, logits, topk_idx, global_counts):
    return new_tensor(logits, 1, dtype=torch.float64)


@torch.library.register_fake("epx::update_selection_bias")
def _(block, global_counts, rate, selection_bias):
    return None


def _make_config(group, router, ffn, dtype, weighting, alignment, recompute, recipe, path, dispatch_format=None):
    require_kind("group", group, Group)
    if dtype not in _DTYPES:
        refuse_dtype("dtype", dtype, _DTYPES)
    options = weighting, dispatch_format, recipe, path, alignment
    return make_block_config(group.num_experts, router, ffn, DTYPES[_DTYPES[dtype]], *options, recompute=bool(recompute))


def _call_on_device(group, function, *args):
    with torch.cuda.device(group.device) if group.device.type == "cuda" else contextlib.nullcontext():
        status = function(*args)
    if status:
        raise_call_failed(group.handle, status)


def _require_number(number, free):
    """The number that registering has returned; where there was no memory, frees what was to be registered and raises."""
    if number == 0:
        sentence = last_sentence()
        free()
        raise OutOfMemoryError(sentence, Status.OUT_OF_MEMORY)
    return number


def _free_arena(flights, arena):
    lib.epx_torch_retire_flights(flights)
    _moe_structs.epx_moe_arena_destroy_local(arena)


def _free_block(number, block):
    lib.epx_torch_retire_block(number)
    _moe_structs.epx_moe_block_destroy_local(block)


class Arena:
    """The memory of several layers of a group: flights, and what a call needs while it runs.

    router, ffn, dtype, weighting, alignment, recompute, recipe, path: those of the layer that needs the most.  num_flights:
    forwards of all layers together whose backward is still to come.  max_rows: the most rows that a rank receives in a call; 0:
    the group's R. Routes beyond are dropped, which group.check() tells; other paths than "dispatch" refuse too few.
    Created by all ranks, and destroyed by all of them, after its layers; one that nobody destroys is freed as a layer is.
    """

    def __init__(
        self,
        group: Group,
        *,
        router: Router,
        ffn: Ffn,
        num_flights: int = 1,
        max_rows: int = 0,
        dtype: torch.dtype = torch.float32,
        weighting: str | None = None,
        alignment: int | None = None,
        recompute: bool = False,
        recipe: Recipe | str = "wide",
        path: Path | str = "dispatch",
    ):
        self.group = group
        block = _make_config(group, router, ffn, dtype, weighting, alignment, recompute, recipe, path)
        config = _moe_structs.ArenaConfig()
        raise_if_failed(_moe_structs.epx_moe_arena_config_init(config, ctypes.sizeof(config)))
        config.block = ctypes.pointer(block)
        set_fields(config, num_flights=num_flights, max_rows=max_rows)
        destroy_abandoned()
        arena = _moe_structs.ARENA()
        _call_on_device(group, _moe_structs.epx_moe_arena_create, group.handle, config, arena)
        free = functools.partial(_moe_structs.epx_moe_arena_destroy_local, arena)
        self._flights = _require_number(lib.epx_torch_register_flights(num_flights), free)
        self._memory = LocalMemory(arena.value, functools.partial(_free_arena, self._flights))
        self._finalizer = finalize(self, self._memory)

    @property
    def handle(self) -> int:
        """The epx_moe_arena, as an integer."""
        if self._memory.value is None:
            refuse_destroyed("arena")
        return self._memory.value

    def info(self) -> dict[str, int]:
        """What the arena holds, as a dict of the fields of epx_moe_arena_info."""
        info = _moe_structs.ArenaInfo(struct_size=ctypes.sizeof(_moe_structs.ArenaInfo))
        raise_if_failed(_moe_structs.epx_moe_arena_query(self.handle, info))
        return {name: getattr(info, name) for name, _ in info._fields_ if name not in ("struct_size", "reserved0")}

    def destroy(self) -> None:
        """Frees the arena; a second time it does nothing. Collective."""
        if self.group.is_destroyed:
            self._memory.destroy()
        elif (value := self._memory.take()) is not None:
            self._finalizer.detach()
            lib.epx_torch_retire_flights(self._flights)
            _call_on_device(self.group, _moe_structs.epx_moe_arena_destroy, value)


@dataclasses.dataclass(eq=False)
class Routing:
    """How a forward routed. logits: [T, E], detached.  topk_idx: [T, K] int32, -1 where masked.  topk_weights: [T, K] float32.
    global_counts: [P, E] int64.  info: [3] int64: masked tokens, bad tokens (their scores are not numbers), index of the first
    bad one or -1."""

    logits: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    global_counts: torch.Tensor
    info: torch.Tensor


class MoELayer(torch.nn.Module):
    """Router, dispatch, experts and combine: [..., H] -> [..., H]. The experts of this rank are its parameters.

    group: an epx.torch.Group, whose hidden_dim, max_top_k and max_alignment the layer must fit.  router: an epx.moe.Router.
    ffn: an epx.moe.Ffn.  bias: whether the experts have biases.  selection_bias: whether the router has a bias for selection
    (DeepSeek-V3), a buffer that update_selection_bias() changes.  dtype: of tokens and experts; float32 on the host transport.
    weighting: "late" or "early"; default: "late", with a recipe in FP8 or another path than "dispatch" "early".  alignment:
    rows that zones are padded to; default: 1, with a recipe in FP8 16.  max_in_flight: forwards whose backward is still to come;
    a checkpointed forward is none.
    arena: an Arena that it shares with other layers, instead of max_in_flight flights of its own.  recompute: the backward
    computes the FFN's activations again.  dispatch_format: an epx.RowFormat with wire_only, in which the forward's tokens travel
    to their experts, also where these are on the same rank; gradients pass straight through.
    recipe: which products of the experts multiply float8_e4m3fn, "wide", "fp8_activations" or "fp8", as epx.moe.Block has them;
    see below.  path: how rows come to their experts and back, "dispatch", "ring" or "ragged", as epx.moe.Block has them; with
    the latter two the weighting is "early", the recipe "wide", and there is no dispatch_format.
    reduce_gradients: "mean" or "none", see below.
    seed: experts and router are drawn from it alone, so all ranks have the same router, and the experts do not depend on the
    number of ranks; with None all parameters are 0.

    Parameters: gate_weight [E, H] (the router's, float32), the same on all ranks; first_weight [E_l, 2F, H] (gate and up
    stacked; [E_l, F, H] without a gate), down_weight [E_l, H, F], first_bias, down_bias: of this rank's experts, which
    expert_parameters() tells.

    Gradients: with reduce_gradients "mean" those of all parameters are of the mean over the group's ranks of their losses, to
    which each adds the load-balance loss of all tokens. So an optimizer can use them as they are; a further mean over the ranks
    leaves those of gate_weight as they are, and is wrong for experts, which differ from rank to rank. With "none", for a
    framework that reduces gradients itself, gate_weight's are of this rank's loss and share of the load-balance loss, and
    experts' are of the sum of all ranks' losses. All ranks freeze gate_weight (requires_grad_(False)) or none does, and all ask
    for the same gradients.

    With a recipe in FP8 dtype is float32 on the host transport and bfloat16 on GPUs, H and F are multiples of 128, the weighting
    is "early", the alignment with "fp8" a multiple of 16, and there is no bias and no dispatch_format. Parameters stay what the
    optimizer changes, and so do their gradients; with layer.float() they are float32 also where tokens are bfloat16. Each forward
    and each backward quantises the weights that it reads, until quantise_parameters() is called: from then on calls read what
    that has quantised. Nothing tells reliably that weights have changed: a tensor's _version counts no step of a fused optimizer,
    no write through .data, no gathering by FSDP2, and nothing that a CUDA graph does. So it is the caller who says that calls
    share what was quantised. Where FSDP2 shards the layer, gather_in_fp8() has each rank quantise its shard instead.

    Created by all ranks. destroy() is collective. Of a layer that nobody refers to any more, this rank's own memory is freed by
    the next creation or destroy(), and what peers reach at the end of the group.
    """

    def __init__(
        self,
        group: Group,
        *,
        router: Router,
        ffn: Ffn,
        bias: bool = False,
        selection_bias: bool = False,
        dtype: torch.dtype = torch.float32,
        weighting: str | None = None,
        alignment: int | None = None,
        max_in_flight: int = 1,
        arena: Arena | None = None,
        recompute: bool = False,
        dispatch_format: RowFormat | None = None,
        recipe: Recipe | str = "wide",
        path: Path | str = "dispatch",
        reduce_gradients: str = "mean",
        seed: int | None = 0,
    ):
        super().__init__()
        if reduce_gradients not in ("mean", "none"):
            refuse_choice("reduce_gradients", reduce_gradients, ("mean", "none"))
        self.group, self.router, self.ffn, self.reduce_gradients = group, router, ffn, reduce_gradients
        self.aux_loss_grad = 1.0
        # Which refuses what is no group.
        config = _make_config(group, router, ffn, dtype, weighting, alignment, recompute, recipe, path, dispatch_format)
        self.recipe, self._dtype, self._recomputes = Recipe(config.recipe), dtype, bool(recompute)
        if bias and self.recipe != Recipe.WIDE:
            refuse("bias is True; with a recipe in FP8 experts have no biases")
        self._kept, self._gathers_in_fp8 = KeptWeights(group), False
        self._takes_mean = reduce_gradients == "mean" and group.num_ranks > 1
        self._create(config, arena, max_in_flight)
        local, hidden, inner = group.num_local_experts, ffn.hidden_dim, ffn.ffn_dim
        first = 2 * inner if ffn.activation == "swiglu" else inner

        def parameter(*sizes, dtype=dtype):
            return torch.nn.Parameter(torch.zeros(*sizes, dtype=dtype, device=group.device))

        self.gate_weight = parameter(group.num_experts, hidden, dtype=torch.float32)
        self.first_weight = parameter(local, first, hidden)
        self.down_weight = parameter(local, hidden, inner)
        self.first_bias = parameter(local, first) if bias else None
        self.down_bias = parameter(local, hidden) if bias else None
        made = torch.zeros(group.num_experts, dtype=torch.float32, device=group.device) if selection_bias else None
        self.register_buffer("selection_bias", made)
        if seed is not None:
            self.reset_parameters(seed)

    def _create(self, config, arena, max_in_flight):
        group = self.group
        if arena is None:
            set_fields(config, max_in_flight=max_in_flight)
        else:
            if arena.group is not group:
                refuse("the arena is of another group")
            config.arena = arena.handle
        destroy_abandoned()
        block = _moe_structs.BLOCK()
        _call_on_device(group, _moe_structs.epx_moe_block_create, group.handle, config, block)
        free = functools.partial(_moe_structs.epx_moe_block_destroy_local, block)
        flights = _require_number(lib.epx_torch_register_flights(max_in_flight), free) if arena is None else arena._flights
        has_gate = int(self.ffn.activation == "swiglu")
        number = lib.epx_torch_register_block(
            group.number, flights, block.value, config.router, self.ffn.hidden_dim, config.dtype, has_gate
        )
        _require_number(number, free)
        if arena is None:
            lib.epx_torch_retire_flights(flights)
        self._memory = LocalMemory(
            block.value,
            functools.partial(_free_block, number),
            is_idle=lambda: lib.epx_torch_block_is_idle(number) == 1,
            needs=(group, arena),
        )
        self._finalizer = finalize(self, self._memory)
        self._numbers = number, group.number, group.num_ranks if self._takes_mean else 1
        layers[number] = self
        if self._takes_mean:
            create_mean_routes(group)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draws the parameters anew: weights uniform in +-1/sqrt(inputs), biases zero."""
        generator = torch.Generator()

        def draw(target, number):
            generator.manual_seed(seed * 1_000_003 + number)
            bound = 1 / math.sqrt(target.shape[-1])
            target.copy_(torch.empty(target.shape).uniform_(-bound, bound, generator=generator))

        draw(self.gate_weight, 0)
        for expert in range(self.first_weight.shape[0]):
            number = 1 + 2 * (self.group.first_local_expert + expert)
            draw(self.first_weight[expert], number)
            draw(self.down_weight[expert], number + 1)
        for bias in (self.first_bias, self.down_bias):
            if bias is not None:
                bias.zero_()

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        token_mask: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        with_routing: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Routing]:
        """Collective, and so is its backward, which autograd runs once for each forward that is part of the loss.

        tokens: [..., H], under autocast of any dtype.  token_mask: [...] bool or uint8; 0 masks the token, whose output is 0.
        logits: [..., E] float32 (on GPUs also bfloat16) instead of those of gate_weight. Returns out [..., H], and a Routing
        when with_routing is set.
        """
        if self._gathers_in_fp8:
            self._require_gathered()
        shape = tokens.shape
        flat = tokens.reshape(-1, shape[-1])
        logits = self._gate(flat) if logits is None else logits.reshape(-1, logits.shape[-1])
        if torch.is_autocast_enabled(flat.device.type):
            flat = flat.to(self._dtype)
        if token_mask is not None:
            if token_mask.dtype not in (torch.bool, torch.uint8):
                refuse_dtype("token_mask", token_mask.dtype, (torch.bool, torch.uint8))
            token_mask = token_mask.reshape(-1).view(torch.uint8)
        params = self.first_weight, self.down_weight, self.first_bias, self.down_bias
        require_usable(self.group, "tokens", flat)
        require_usable(self.group, "logits", logits)
        for name, each in zip(("first_weight", "down_weight", "first_bias", "down_bias"), params):
            if each is not None:
                require_usable(self.group, name, each)
        inputs = self.selection_bias, token_mask, flat, logits
        outputs = (self._run if self.recipe == Recipe.WIDE else self._run_fp8)(inputs, params)
        out = outputs[0].view(shape)
        return (out, Routing(logits.detach(), *outputs[1:])) if with_routing else out

    def _run(self, inputs, params):
        if _records(*inputs[2:], *params):
            return Block.apply(self._numbers, self.aux_loss_grad, *inputs, *params)
        block, group, _ = self._numbers
        selection_bias, token_mask, tokens, logits = inputs
        return call(group, _block_fwd, block, tokens, logits, selection_bias, token_mask, *params, False)[:-1]

    def _run_fp8(self, inputs, params):
        weights = params[:2]
        require_masters(*weights)
        self._kept.require_current(*weights)
        if _records(*inputs[2:], *weights):
            return Fp8Block.apply(self._numbers, self._recomputes, self.aux_loss_grad, *inputs, *weights, *self._kept.tensors)
        block, group, _ = self._numbers
        selection_bias, token_mask, tokens, logits = inputs
        params = self._kept.tensors[:4] or params_of(group, weights)
        return call(group, _block_fwd_fp8, block, tokens, logits, selection_bias, token_mask, *params, False)[:-1]

    def _require_gathered(self):
        if torch.compiler.is_compiling():
            refuse("weights gathered in FP8 are not supported under torch.compile: torch.compiler.disable leaves them out")
        for name in WEIGHTS:
            if not isinstance(getattr(self, name), GatheredWeights):
                refuse(f"{name} has not been gathered in FP8: call gather_in_fp8() again, as its shard has been replaced")

    def _gate(self, tokens):
        """[T, E] logits, in float32 also under autocast: a rounded logit selects other experts."""
        with torch.autocast(tokens.device.type, enabled=False):
            weight = self.gate_weight.float()
            if self._takes_mean and _records(weight):
                weight = with_mean_gradient(self.group, "gate_weight", weight)
            return torch.nn.functional.linear(tokens.float(), weight)

    @torch.no_grad()
    def aux_loss(self, routing: Routing) -> torch.Tensor:
        """This rank's share of the load-balance loss (epx_moe_aux_loss), [] float64; the loss is the sum over the ranks. Its
        gradient, times aux_loss_grad (default 1), is part of every backward already, so do not add it to the loss that is
        differentiated."""
        number, group, _ = self._numbers
        return call(group, _aux_loss, number, routing.logits, routing.topk_idx, routing.global_counts).view(())

    @torch.no_grad()
    def update_selection_bias(self, routing: Routing, rate: float) -> None:
        """Balances without a loss (arXiv:2408.15664): adds rate * sign(mean - n_e) to the bias of expert e."""
        if self.selection_bias is None:
            refuse("the layer was created without selection_bias")
        number, group, _ = self._numbers
        call(group, _update_selection_bias, number, routing.global_counts, rate, self.selection_bias)

    def quantise_parameters(self) -> None:
        """Quantises the experts' weights for all calls that follow, with a recipe in FP8. Local. Call it after each step of the
        optimizer: it is worth it where several forwards follow a step, as in pipelines, with accumulated gradients, with
        checkpoints, or in inference. Without it they quantise weights themselves, and are right whatever changes those.

        The layer then keeps 2 bytes for each weight, in memory that later calls of this write. So a CUDA graph may hold forwards
        without it, which read what the last call has written, or it together with the optimizer's step. A forward refuses
        weights whose _version says that they have changed since; see above for what it does not see. A backward that is still
        to come is refused by autograd after it, as after a change of the weights themselves. Weights that FSDP2 has sharded are
        refused."""
        if self.recipe == Recipe.WIDE:
            refuse("the layer was created with recipe wide, whose weights are not quantised")
        self._kept.update(self.first_weight, self.down_weight)

    def gather_in_fp8(self) -> None:
        """Has FSDP2 gather the experts' weights in FP8, with a recipe in FP8: each rank quantises its shard, and codes and
        scales are gathered, half the bytes of bfloat16. Forwards read them as they are, and backwards transpose them. The
        bits are those of wide weights that are gathered and quantised. Shards, gradients and checkpoints stay wide.

        Local. All ranks call it after fully_shard() and before the first forward, and again where layer.float() or
        load_state_dict(assign=True) replaces shards before this forward. Shards are of whole experts (dimension 0, FSDP2's
        default), or of multiples of 128 rows or columns (shard_placement_fn). Others are refused, and so are shards on the
        host of a layer on a GPU."""
        if self.recipe == Recipe.WIDE:
            refuse("the layer was created with recipe wide, whose weights are not quantised")
        gather_in_fp8(self.group, first_weight=self.first_weight, down_weight=self.down_weight)
        self._kept, self._gathers_in_fp8 = KeptWeights(self.group), True

    def expert_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that differ from rank to rank of the group."""
        return [p for p in (self.first_weight, self.down_weight, self.first_bias, self.down_bias) if p is not None]

    def destroy(self) -> None:
        """Frees the layer's memory; a second time it does nothing. Collective, but after its group, whose end has freed what
        peers reached."""
        if self.group.is_destroyed:
            self._memory.destroy()
        elif (value := self._memory.take()) is not None:
            self._finalizer.detach()
            lib.epx_torch_retire_block(self._numbers[0])
            _call_on_device(self.group, _moe_structs.epx_moe_block_destroy, value)

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "an MoELayer cannot be copied or pickled, since all ranks of its group create it: create another one, and have it "
            "load_state_dict() this one's state_dict()"
        )

    def extra_repr(self):
        return f"{self.router}, {self.ffn}, group={self.group!r}"


def expert_parameter_names(module: torch.nn.Module) -> list[str]:
    """The names of all parameters below `module` that belong to experts of an MoELayer, for
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names) for instance."""
    own = {id(p) for layer in module.modules() if isinstance(layer, MoELayer) for p in layer.expert_parameters()}
    return [name for name, parameter in module.named_parameters() if id(parameter) in own]


__all__ = ["Arena", "MoELayer", "Routing", "expert_parameter_names"]
