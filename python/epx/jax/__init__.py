# SPDX-License-Identifier: Apache-2.0
"""The operations of a group for JAX: under jit, grad, remat, scan and shard_map, with one process for each device.

On CPU devices a group has the host transport, on GPUs transport nccl. Symbols in shapes are those of epx.group.

Every operation takes a token and returns the next one. Thread it through all calls of a group, in the one order that is the
same on all ranks, and end a loss that is differentiated with finish(): so each call depends on the one before it, whatever XLA
moves.

    group = epx.jax.make_group(mesh, "ep", num_experts=8, max_tokens_per_rank=64, hidden_dim=32, max_top_k=2,
                               max_token_dtype="float32")

    def layer(tokens, topk_idx, weights, token):          # in shard_map over the mesh, or on arrays of this process
        plan, token = epx.jax.prepare(group, topk_idx, token)
        rows, row_weights, token = epx.jax.dispatch(plan, tokens, weights, token)
        return epx.jax.combine(plan, experts(rows, plan.offsets), row_weights, token)

    def loss(params, batch):
        out, token = layer(..., epx.jax.first_token())
        return epx.jax.finish(jnp.mean(out**2), token)
"""

from . import _operations, _programs, _ragged, _rank_major
from ._groups import make_group
from ._operations import *
from ._programs import *
from ._ragged import *
from ._rank_major import *

__all__ = ["make_group"]
__all__ += _operations.__all__ + _programs.__all__ + _ragged.__all__ + _rank_major.__all__
