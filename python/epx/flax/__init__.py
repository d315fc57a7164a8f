# SPDX-License-Identifier: Apache-2.0
"""An MoE layer for flax.linen, on arrays that are sharded over a mesh, with one process for each device.

    mesh = jax.make_mesh((2, 2), ("fsdp", "ep"), axis_types=2 * (jax.sharding.AxisType.Auto,))
    group = epx.jax.make_group(mesh, "ep", num_experts=8, max_tokens_per_rank=1024, hidden_dim=512, max_top_k=2,
                               max_token_dtype="bfloat16")
    block = epx.flax.MoEBlock(group, mesh, num_experts=8, ffn_dim=1024, fsdp_axis="fsdp", dtype=jnp.bfloat16)
    variables = jax.jit(block.init)(jax.random.key(0), inputs)
    out = jax.jit(block.apply)(variables, inputs)

route() and load_balance_loss() are its router, in plain jax.numpy.
"""

from ._block import MoEBlock
from ._router import load_balance_loss, route

__all__ = ["MoEBlock", "load_balance_loss", "route"]
