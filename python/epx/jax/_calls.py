# SPDX-License-Identifier: Apache-2.0
"""What the operations have in common: their calls, the token, and which rows hold one of a rank's tokens."""

import jax.numpy as jnp

from .._values import refuse
from ._ffi import call, number_of
from ._rows import is_symbolic_zero, require_array

INDEX_DTYPES = (jnp.int32, jnp.int64)


def call_group(operation, group, layer, operands, results, **attributes):
    """Forward calls live as long as the token is used, up to finish(); backward calls are always kept, because nobody uses the
    gradient of the first token. Else XLA would drop the last call on ranks whose results have no elements, and only there."""
    top_k, alignment = layer
    return call(
        operation,
        operands,
        results,
        operation.endswith("_bwd"),
        group=number_of(group),
        top_k=top_k,
        alignment=alignment,
        **attributes,
    )


def require_cotangent_of_token(operation, cotangent):
    """The token of the last call has no gradient unless the loss has one through it; then nothing orders the backward calls."""
    if is_symbolic_zero(cotangent):
        refuse(
            f"the gradient of {operation} does not come through its token: end the loss with epx.jax.finish(loss, token), "
            "where token is that of the last call"
        )


def values_of(arguments):
    return [argument.value for argument in arguments]


def rows_in_use(zero_unused, num_rows, zones, zone_stride):
    """Which rows [N] are in use; None where that does not matter. zones: counts of zones a stride apart, else offsets."""
    if not zero_unused:
        return None
    rows = jnp.arange(num_rows, dtype=zones.dtype)
    if zone_stride == 0:
        return rows < zones[-1]
    counts = jnp.append(zones, 0)  # behind the last zone there are no rows
    return rows % zone_stride < counts[jnp.minimum(rows // zone_stride, zones.size)]


def holds_token_mask(max_rows, counts, compact):
    """Which rows [P, M] of the rank-major layout hold a token."""
    if compact:
        rows = jnp.arange(counts.size * max_rows, dtype=counts.dtype) < counts.sum(dtype=counts.dtype)
        return rows.reshape(counts.size, max_rows)
    return jnp.arange(max_rows, dtype=counts.dtype) < counts[:, None]


def require_token(token):
    require_array("token", token, (), (jnp.float32,))


def require_topk_idx(group, topk_idx):
    require_array("topk_idx", topk_idx, (None, None), INDEX_DTYPES)
    if topk_idx.shape[0] > group.max_tokens_per_rank:
        refuse(f"topk_idx has {topk_idx.shape[0]} tokens; the group's max_tokens_per_rank is {group.max_tokens_per_rank}")
    return topk_idx.shape


def saturated(words):
    """Numbers that are not negative as int32, from the words of int64."""
    largest = jnp.uint32(2**31 - 1)
    return jnp.where(words[:, 1] == 0, jnp.minimum(words[:, 0], largest), largest).astype(jnp.int32)
