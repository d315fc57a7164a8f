# SPDX-License-Identifier: Apache-2.0
"""An MoE layer as a flax.linen.Module, by the operations of epx.jax."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.sharding import Mesh, PartitionSpec

from .. import jax as epx_jax
from .._values import boolean, count, refuse, refuse_choice, require_kind
from ..group import Group
from ..jax._groups import axis_of
from ..moe import Router
from ._experts import ACTIVATIONS, run_experts
from ._router import load_balance_loss, require_router, route

_SCORE_FUNCTIONS = "softmax", "sigmoid"
_FLAGS = "use_pre_softmax", "renormalize", "use_expert_bias", "apply_weights_early", "use_bias"


def _each_expert(init):
    """An initializer [E, ...] that draws each expert's matrix by `init` alone, so that its scale does not depend on E."""

    def draw(key, shape, dtype):
        return jax.vmap(lambda key: init(key, shape[1:], dtype))(jax.random.split(key, shape[0]))

    return draw


class MoEBlock(nn.Module):
    """Router, dispatch, experts and combine: [B, ..., H] -> [B, ..., H], under jit, on arrays that are sharded over a mesh.

    group                an epx.Group that epx.jax.make_group has created along an axis of the mesh, the EP axis
    mesh                 its devices divide B, in the order of its axes, so that each device has tokens of its own
    num_experts          E, that of the group
    ffn_dim              F
    top_k                K
    score_function       "softmax", over the selected logits, or "sigmoid", of each logit
    use_pre_softmax      the softmax is over all logits
    renormalize          the K weights of a token are divided by their sum
    scaling_factor       multiplies the weights after that
    num_groups, topk_groups, group_score_top_k   those of epx.moe.Router
    use_expert_bias      a parameter is added to the scores for selection only (arXiv:2408.15664). Its gradient is zero:
                         whoever balances by it changes it by hand
    apply_weights_early  weights multiply what the down projection takes, not what it returns
    activation           "swiglu", "gelu" or "relu2", as of epx.moe.Ffn
    use_bias             the experts have biases
    aux_loss_coeff       that of the load-balance loss; 0: there is no such loss
    align                rows that the rows of an expert are padded to
    fsdp_axis            the mesh axis that shards wi and wo along H, or None
    dtype                of tokens and products; None: what inputs and parameters promote to. Logits are float32
    param_dtype          of the parameters
    kernel_init          of gate_kernel, and of the matrix of each expert
    bias_init            of all biases

    Parameters, and the mesh axes that shard them (nn.get_partition_spec):

    gate_kernel  [H, E]
    wi           [E, H, 2F], gate and up beside each other ([E, H, F] without a gate), over (EP, FSDP, None)
    wo           [E, F, H], over (EP, None, FSDP)
    wi_bias      [E, 2F] or [E, F], over (EP, None)
    wo_bias      [E, H], over (EP, None)
    expert_bias  [E] float32

    Each device gathers wi and wo of its experts along fsdp_axis, in `dtype`, before it uses them; their gradients are
    reduced and scattered. Gradients are those of the function on global arrays.

    Sown, where apply() has the collection among its `mutable`: "load_balance" into "losses", the load-balance loss of all
    tokens, unless aux_loss_coeff is 0; add it to the model's loss. "expert_counts" [E] into "intermediates", the routes to
    each expert.

    apply() is collective. The calls of a block have an order, but nothing orders them with those of another block that uses
    the same group, unless one needs what the other returns, as layers behind each other do. nn.remat and jax.checkpoint
    make calls again that nothing orders, and must not be used around a block. init() makes no call. Call group.check() in
    each step.
    """

    group: Group
    mesh: Mesh
    num_experts: int
    ffn_dim: int
    top_k: int = 2
    score_function: str = "softmax"
    use_pre_softmax: bool = False
    renormalize: bool = False
    scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score_top_k: int = 0
    use_expert_bias: bool = False
    apply_weights_early: bool = False
    activation: str = "swiglu"
    use_bias: bool = False
    aux_loss_coeff: float = 0.0
    align: int = 1
    fsdp_axis: str | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, inputs) -> jax.Array:
        router = self._router()
        self._require_mesh()
        self._require_inputs(inputs)
        params = self._params(inputs.shape[-1])
        gate = params.pop("gate_kernel")
        bias = params.pop("expert_bias", None)
        inputs, gate, *experts = promote_dtype(inputs, gate, *params.values(), dtype=self.dtype)
        if self.is_initializing():
            return jnp.zeros_like(inputs)
        axes = tuple(self.mesh.axis_names)
        specs = {name: PartitionSpec(*self._names(name)) for name in params}
        counts_are_wanted = bool(router.aux_loss_coeff) or self.is_mutable_collection("intermediates")
        run = jax.shard_map(
            functools.partial(self._on_device, router, counts_are_wanted),
            mesh=self.mesh,
            in_specs=(PartitionSpec(axes), PartitionSpec(), PartitionSpec(), specs),
            out_specs=(PartitionSpec(axes), PartitionSpec(), PartitionSpec()),
            check_vma=False,
        )
        out, loss, counts = run(inputs, gate, bias, dict(zip(params, experts)))
        if router.aux_loss_coeff:
            self.sow("losses", "load_balance", loss, init_fn=lambda: 0.0, reduce_fn=lambda sum, loss: sum + loss)
        if counts is not None:
            self.sow("intermediates", "expert_counts", counts)
        return out

    def _on_device(self, router, counts_are_wanted, inputs, gate, bias, params):
        """The layer of a device in shard_map, with its tokens and its shards of the experts' parameters."""
        params = {name: self._gathered(name, shard) for name, shard in params.items()}
        tokens = inputs.reshape(-1, inputs.shape[-1])
        logits = jnp.dot(tokens, gate, preferred_element_type=jnp.float32)
        topk_idx, weights = route(router, logits, bias)
        # Rows that hold no token may be whatever memory held: run_experts() keeps them to themselves.
        plan, token = epx_jax.prepare(self.group, topk_idx, epx_jax.first_token(), alignment=self.align, zero_unused=False)
        rows, row_weights, token = epx_jax.dispatch(plan, tokens, weights, token)
        early, late = (row_weights, None) if self.apply_weights_early else (None, row_weights)
        out, token = epx_jax.combine(plan, run_experts(params, self.activation, rows, plan.offsets, early), late, token)
        out = epx_jax.finish(out, token).reshape(inputs.shape)
        if not counts_are_wanted:
            return out, None, None
        others = [name for name in self.mesh.axis_names if name != axis_of(self.group)]
        counts = jax.lax.psum(plan.global_counts.sum(0), others)
        loss = None
        if router.aux_loss_coeff:
            loss = jax.lax.psum(load_balance_loss(router, logits, counts), self.mesh.axis_names)
        return out, loss, counts

    def _params(self, hidden):
        """The parameters by name."""
        experts = self.num_experts
        first = 2 * self.ffn_dim if self.activation == "swiglu" else self.ffn_dim
        kernel_init = _each_expert(self.kernel_init)
        made = {
            "gate_kernel": (self.kernel_init, (hidden, experts), self.param_dtype),
            "wi": (kernel_init, (experts, hidden, first), self.param_dtype),
            "wo": (kernel_init, (experts, self.ffn_dim, hidden), self.param_dtype),
        }
        if self.use_bias:
            made["wi_bias"] = self.bias_init, (experts, first), self.param_dtype
            made["wo_bias"] = self.bias_init, (experts, hidden), self.param_dtype
        if self.use_expert_bias:
            made["expert_bias"] = self.bias_init, (experts,), jnp.float32
        return {
            name: self.param(name, nn.with_partitioning(init, self._names(name), self.mesh), shape, dtype)
            for name, (init, shape, dtype) in made.items()
        }

    def _names(self, name):
        """The mesh axes that shard a parameter, one for each dimension."""
        expert = axis_of(self.group)
        return {
            "gate_kernel": (None, None),
            "wi": (expert, self.fsdp_axis, None),
            "wo": (expert, None, self.fsdp_axis),
            "wi_bias": (expert, None),
            "wo_bias": (expert, None),
            "expert_bias": (None,),
        }[name]

    def _gathered(self, name, shard):
        """The whole parameter of this device's experts."""
        names = self._names(name)
        if self.fsdp_axis is None or self.fsdp_axis not in names:
            return shard
        return jax.lax.all_gather(shard, self.fsdp_axis, axis=names.index(self.fsdp_axis), tiled=True)

    def _router(self):
        """What the fields say of routing, after they have been looked at."""
        require_kind("group", self.group, Group)
        for name in _FLAGS:
            boolean(name, getattr(self, name))
        if count("num_experts", self.num_experts) != self.group.num_experts:
            refuse(f"num_experts is {self.num_experts}; the group has {self.group.num_experts}")
        if count("ffn_dim", self.ffn_dim) == 0:
            refuse("ffn_dim is 0; it must be at least 1")
        if self.activation not in ACTIVATIONS:
            refuse_choice("activation", self.activation, ACTIVATIONS)
        if self.score_function not in _SCORE_FUNCTIONS:
            refuse_choice("score_function", self.score_function, _SCORE_FUNCTIONS)
        if self.use_pre_softmax and self.score_function != "softmax":
            refuse(f"use_pre_softmax is True with score_function {self.score_function!r}; it goes with 'softmax'")
        softmax = "softmax_then_topk" if self.use_pre_softmax else "topk_then_softmax"
        router = Router(
            self.top_k,
            score=softmax if self.score_function == "softmax" else "sigmoid",
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
            renormalize=self.renormalize,
            scaling_factor=self.scaling_factor,
            aux_loss_coeff=self.aux_loss_coeff,
            group_score_top_k=self.group_score_top_k,
        )
        require_router(router, self.num_experts)
        self.group.require_layer(self.top_k, self.align)
        return router

    def _require_mesh(self):
        require_kind("mesh", self.mesh, Mesh)
        axis, sizes = axis_of(self.group), dict(self.mesh.shape)
        if axis is None:
            refuse(f"{self.group!r} has no mesh axis: create it by epx.jax.make_group")
        if sizes.get(axis) != self.group.num_ranks:
            refuse(f"the mesh has axes {sizes}; {self.group!r} lies along {axis!r} with {self.group.num_ranks} devices")
        if self.num_experts % self.group.num_ranks:
            refuse(f"num_experts is {self.num_experts}; the {self.group.num_ranks} devices along {axis!r} must divide it")
        if self.fsdp_axis is not None and (self.fsdp_axis not in sizes or self.fsdp_axis == axis):
            refuse_choice("fsdp_axis", self.fsdp_axis, [name for name in sizes if name != axis] + [None])

    def _require_inputs(self, inputs):
        if inputs.ndim < 2 or not jnp.issubdtype(inputs.dtype, jnp.floating):
            refuse(f"inputs is {inputs.dtype} of shape {list(inputs.shape)}; it must be floating point, [B, ..., H]")
        first, hidden = inputs.shape[0], inputs.shape[-1]
        if first % self.mesh.size:
            refuse(f"inputs has shape {list(inputs.shape)}; the {self.mesh.size} devices of the mesh must divide {first}")
        shards = 1 if self.fsdp_axis is None else self.mesh.shape[self.fsdp_axis]
        if hidden % shards:
            refuse(f"inputs has {hidden} columns; the {shards} devices along fsdp_axis {self.fsdp_axis!r} must divide them")
