# SPDX-License-Identifier: Apache-2.0
"""The experts of a rank, on rows that are ordered by expert."""

import functools

import jax
import jax.numpy as jnp


def _swiglu(pre_act):
    gate, up = jnp.split(pre_act, 2, axis=-1)
    return jax.nn.silu(gate) * up


# Each takes what the first product returns.
ACTIVATIONS = {
    "swiglu": _swiglu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu2": lambda up: jnp.square(jax.nn.relu(up)),
}


def _of_each_row(bias, offsets, num_rows):
    """[N, ...]: the bias of each row's expert. Rows behind the last zone have a row of zeros, whose gradient is nobody's:
    what they hold is not defined."""
    expert = jnp.searchsorted(offsets[1:], jnp.arange(num_rows, dtype=offsets.dtype), side="right")
    return jnp.concatenate([bias, jnp.zeros_like(bias[:1])])[expert]


def run_experts(params, activation, rows, offsets, row_weights=None):
    """wo_e act(wi_e x + wi_bias_e) + wo_bias_e of each row x of expert e, and times its weight where row_weights are given.

    params: wi [E_l, H, 2F] (gate, then up; [E_l, H, F] without a gate), wo [E_l, F, H], and wi_bias and wo_bias or neither.
    rows: [N, H]; those of expert e are offsets[e] to offsets[e + 1].  row_weights: [N] float32.
    """
    sizes = jnp.diff(offsets)
    pre_act = jax.lax.ragged_dot(rows, params["wi"], sizes)
    if "wi_bias" in params:
        pre_act = pre_act + _of_each_row(params["wi_bias"], offsets, len(rows))
    inner = ACTIVATIONS[activation](pre_act)
    weights = None if row_weights is None else row_weights.astype(inner.dtype)[:, None]
    if weights is not None:
        inner = inner * weights
    outs = jax.lax.ragged_dot(inner, params["wo"], sizes)
    if "wo_bias" in params:
        bias = _of_each_row(params["wo_bias"], offsets, len(rows))
        outs = outs + (bias if weights is None else bias * weights)
    return outs
