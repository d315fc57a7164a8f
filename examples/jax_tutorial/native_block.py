# SPDX-License-Identifier: Apache-2.0
"""The layer of epx.flax.MoEBlock on JAX's own collectives: the same options, the same parameters, the same router.

Routes are sorted by expert, travel to the devices of their experts, are sorted by expert there, and travel back. They
travel by ragged_all_to_all between GPUs, and by all_to_all of padded rows on CPUs, where XLA has no ragged one.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.sharding import Mesh, PartitionSpec

import epx.flax
import epx.moe


def swiglu(pre_act):
    gate, up = jnp.split(pre_act, 2, axis=-1)
    return jax.nn.silu(gate) * up


ACTIVATIONS = {
    "swiglu": swiglu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu2": lambda up: jax.nn.relu(up) ** 2,
}


class NativeBlock(nn.Module):
    """[B, ..., H] -> [B, ..., H]; the fields are those of epx.flax.MoEBlock, with the EP axis in place of the group, and
    without `align`: rows are not padded. is_ragged: whether ragged_all_to_all moves the rows."""

    mesh: Mesh
    num_experts: int
    ffn_dim: int
    ep_axis: str = "ep"
    fsdp_axis: str | None = None
    is_ragged: bool = False
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
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

    @property
    def compiler_options(self):
        """For jax.jit of the block. From JAX 0.11 on XLA refuses ragged_all_to_all between processes without this, which an
        older one does not know."""
        is_refused = self.is_ragged and jax.version.__version_info__ >= (0, 11)
        return {"xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback": True} if is_refused else None

    def router(self):
        softmax = "softmax_then_topk" if self.use_pre_softmax else "topk_then_softmax"
        return epx.moe.Router(
            self.top_k,
            score=softmax if self.score_function == "softmax" else "sigmoid",
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
            renormalize=self.renormalize,
            scaling_factor=self.scaling_factor,
            aux_loss_coeff=self.aux_loss_coeff,
            group_score_top_k=self.group_score_top_k,
        )

    @nn.compact
    def __call__(self, inputs):
        params, specs = {}, {}

        def param(name, init, names, shape, dtype=self.param_dtype):
            params[name] = self.param(name, nn.with_partitioning(init, names, self.mesh), shape, dtype)
            specs[name] = PartitionSpec(*names)

        def experts_init(key, shape, dtype):
            return jax.vmap(lambda key: self.kernel_init(key, shape[1:], dtype))(jax.random.split(key, shape[0]))

        experts, hidden, ffn = self.num_experts, inputs.shape[-1], self.ffn_dim
        first = 2 * ffn if self.activation == "swiglu" else ffn
        param("gate_kernel", self.kernel_init, (None, None), (hidden, experts))
        param("wi", experts_init, (self.ep_axis, self.fsdp_axis, None), (experts, hidden, first))
        param("wo", experts_init, (self.ep_axis, None, self.fsdp_axis), (experts, ffn, hidden))
        if self.use_bias:
            param("wi_bias", self.bias_init, (self.ep_axis, None), (experts, first))
            param("wo_bias", self.bias_init, (self.ep_axis, None), (experts, hidden))
        inputs, *casts = promote_dtype(inputs, *params.values(), dtype=self.dtype)
        params = dict(zip(params, casts))
        if self.use_expert_bias:  # stays float32
            param("expert_bias", self.bias_init, (None,), (experts,), jnp.float32)
        by_token = PartitionSpec(tuple(self.mesh.axis_names))
        layer = jax.shard_map(
            self.on_device,
            mesh=self.mesh,
            in_specs=(by_token, specs),
            out_specs=(by_token, PartitionSpec(), PartitionSpec()),
            check_vma=False,
        )
        out, loss, counts = layer(inputs, params)
        if not self.is_initializing():
            if self.aux_loss_coeff:
                self.sow("losses", "load_balance", loss, init_fn=lambda: 0.0, reduce_fn=lambda sum, loss: sum + loss)
            self.sow("intermediates", "expert_counts", counts)
        return out

    def on_device(self, inputs, params):
        """The layer of one device in shard_map: its tokens, and its shards of the parameters."""
        if self.fsdp_axis is not None:
            for name, axis in (("wi", 1), ("wo", 2)):
                params[name] = jax.lax.all_gather(params[name], self.fsdp_axis, axis=axis, tiled=True)
        tokens, router = inputs.reshape(-1, inputs.shape[-1]), self.router()
        logits = jnp.dot(tokens, params["gate_kernel"], preferred_element_type=jnp.float32)
        topk_idx, weights = epx.flax.route(router, logits, params.get("expert_bias"))
        out, counts = self.experts_of(tokens, topk_idx, weights, params)
        counts = jax.lax.psum(counts, self.mesh.axis_names)
        loss = jax.lax.psum(epx.flax.load_balance_loss(router, logits, counts), self.mesh.axis_names)
        return out.reshape(inputs.shape), loss, counts

    def experts_of(self, tokens, topk_idx, weights, params):
        """Returns the weighted sums of the experts' outputs [T, H], and this device's routes to each expert [E]."""
        num_ranks = self.mesh.shape[self.ep_axis]
        num_local = self.num_experts // num_ranks
        routes = topk_idx.reshape(-1)
        by_expert = jnp.argsort(routes, stable=True)
        mine = jnp.bincount(routes, length=self.num_experts)
        counts = jax.lax.all_gather(mine, self.ep_axis)  # [P, E]
        by_rank = counts.reshape(num_ranks, num_ranks, num_local).sum(2)  # [P, P]: from, to
        arriving = jax.lax.dynamic_slice_in_dim(counts, jax.lax.axis_index(self.ep_axis) * num_local, num_local, 1)
        num_rows = num_ranks * len(routes)  # the most that may arrive
        rows = self.exchange(tokens[by_expert // self.top_k], by_rank, num_rows)
        # Rows have come by rank and then by expert; the experts want them by expert, and rows that are not in use last.
        expert = jnp.repeat(jnp.tile(jnp.arange(num_local), num_ranks), arriving.ravel(), total_repeat_length=num_rows)
        expert = jnp.where(jnp.arange(num_rows) < arriving.sum(), expert, num_local)
        by_local_expert = jnp.argsort(expert, stable=True)
        early = None
        if self.apply_weights_early:
            sent = weights.reshape(-1)[by_expert, None].astype(tokens.dtype)
            early = self.exchange(sent, by_rank, num_rows)[by_local_expert]
        outs = self.run_experts(rows[by_local_expert], expert[by_local_expert], arriving.sum(0), early, params)
        leaving = jnp.zeros_like(outs).at[by_local_expert].set(outs, unique_indices=True)
        returned = self.exchange(leaving, by_rank.T, len(routes))
        outs = jnp.zeros_like(returned).at[by_expert].set(returned, unique_indices=True).reshape(*topk_idx.shape, -1)
        late = jnp.ones_like(weights) if self.apply_weights_early else weights
        return jnp.einsum("tkh,tk->th", outs, late.astype(outs.dtype)), mine

    def run_experts(self, rows, expert, counts, weights, params):
        """Rows [N, H] that are ordered by expert, of which expert e has counts[e]. expert: [N], the expert of each row."""

        def with_bias(rows, name, factor=1):
            if not self.use_bias:
                return rows
            of_none = jnp.zeros_like(params[name][:1])
            return rows + jnp.concatenate([params[name], of_none])[expert] * factor

        inner = ACTIVATIONS[self.activation](with_bias(jax.lax.ragged_dot(rows, params["wi"], counts), "wi_bias"))
        if weights is None:
            return with_bias(jax.lax.ragged_dot(inner, params["wo"], counts), "wo_bias")
        return with_bias(jax.lax.ragged_dot(inner * weights, params["wo"], counts), "wo_bias", weights)

    def exchange(self, rows, counts, num_rows):
        """counts[source, target] rows travel; they are ordered by target, and arrive ordered by source, [num_rows, ...]."""
        me = jax.lax.axis_index(self.ep_axis)
        if self.is_ragged:
            at_source = jnp.cumsum(counts, axis=1) - counts  # where a source's rows for a target begin at the source
            at_target = jnp.cumsum(counts, axis=0) - counts  # and at the target
            sizes = at_source[me], counts[me], at_target[me], counts[:, me]
            out = jnp.zeros((num_rows, *rows.shape[1:]), rows.dtype)
            return jax.lax.ragged_all_to_all(rows, out, *(each.astype(jnp.int32) for each in sizes), axis_name=self.ep_axis)
        capacity = min(len(rows), num_rows)  # of a pair of ranks
        target, place = places(counts[me], len(rows))
        blocks = jnp.zeros((len(counts), capacity, *rows.shape[1:]), rows.dtype)
        blocks = jax.lax.all_to_all(blocks.at[target, place].set(rows, mode="drop"), self.ep_axis, 0, 0)
        source, place = places(counts[:, me], num_rows)
        return blocks.at[source, place].get(mode="fill", fill_value=0)


def places(sizes, num_rows):
    """The part that each of num_rows rows belongs to, and its place there, when sizes[p] rows of part p follow each other.
    Rows behind the last part have the part len(sizes), which does not exist."""
    row = jnp.arange(num_rows)
    part = jnp.searchsorted(jnp.cumsum(sizes), row, side="right")
    return part, row - (jnp.cumsum(sizes) - sizes)[jnp.minimum(part, len(sizes) - 1)]
