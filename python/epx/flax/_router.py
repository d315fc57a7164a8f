# SPDX-License-Identifier: Apache-2.0
"""The router of epx_moe.h in jax.numpy, which differentiates it. A router is an epx.moe.Router."""

import jax
import jax.numpy as jnp

from .._values import count, number, refuse, refuse_choice
from ..moe import Router

_SCORES = "topk_then_softmax", "softmax_then_topk", "sigmoid"


def require_router(router, num_experts):
    """Refuses a router that cannot select from so many experts."""
    if router.score not in _SCORES:
        refuse_choice("score", router.score, _SCORES)
    top_k, groups, chosen = (count(name, getattr(router, name)) for name in ("top_k", "num_groups", "topk_groups"))
    if not 1 <= top_k <= num_experts:
        refuse(f"top_k is {top_k}; it must be 1 to {num_experts}, the experts")
    if groups < 1 or num_experts % groups:
        refuse(f"num_groups is {groups}; it must divide {num_experts} experts")
    if not 1 <= chosen <= groups:
        refuse(f"topk_groups is {chosen}; it must be 1 to {groups}, num_groups")
    members = num_experts // groups
    if top_k > chosen * members:
        refuse(f"top_k is {top_k}; {chosen} groups (topk_groups) of {members} experts have {chosen * members}")
    per_group = count("group_score_top_k", router.group_score_top_k)
    if per_group > members:
        refuse(f"group_score_top_k is {per_group}; it must be 0 to {members}, the experts of a group")
    if groups > 1 and per_group == 0 and top_k % chosen:
        refuse(f"group_score_top_k is 0, which stands for top_k / topk_groups; {chosen} does not divide {top_k}")
    number("scaling_factor", router.scaling_factor), number("aux_loss_coeff", router.aux_loss_coeff)


def _in_best_groups(router, keys):
    """The keys, -infinity where an expert is not in one of the best groups of its token."""
    per_group = router.group_score_top_k or router.top_k // router.topk_groups
    grouped = keys.reshape(len(keys), router.num_groups, -1)
    group_scores = jax.lax.top_k(grouped, per_group)[0].sum(-1)
    best = jax.lax.top_k(group_scores, router.topk_groups)[1]
    is_best = jax.nn.one_hot(best, router.num_groups, dtype=bool).any(1)
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(keys.shape)


def route(router: Router, logits, expert_bias=None) -> tuple[jax.Array, jax.Array]:
    """Selects top_k experts for each token and weighs them, as epx_moe_router() does.

    logits: [T, E] float32.  expert_bias: [E] float32, added to the scores for selection only; or None.
    Returns (topk_idx [T, K] int32, best first, topk_weights [T, K] float32). Selection has no gradient.
    """
    require_router(router, logits.shape[1])
    keys = {"softmax_then_topk": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}.get(router.score, lambda same: same)(logits)
    keys = jax.lax.stop_gradient(keys if expert_bias is None else keys + expert_bias)
    if router.num_groups > 1:
        keys = _in_best_groups(router, keys)
    topk_idx = jax.lax.top_k(keys, router.top_k)[1].astype(jnp.int32)
    selected = jnp.take_along_axis(logits, topk_idx, axis=1)
    if router.score == "sigmoid":  # shares of sigmoids are those of a softmax of their logarithms, which do not underflow
        weights = jax.nn.softmax(jax.nn.log_sigmoid(selected)) if router.renormalize else jax.nn.sigmoid(selected)
    elif router.score == "topk_then_softmax" or router.renormalize:
        weights = jax.nn.softmax(selected)
    else:
        weights = jnp.take_along_axis(jax.nn.softmax(logits), topk_idx, axis=1)
    return topk_idx, weights * router.scaling_factor


def load_balance_loss(router: Router, logits, expert_counts) -> jax.Array:
    """These tokens' share of the load-balance loss of epx_moe_aux_loss(); the loss is the sum over all tokens' shares.

    logits: [T, E] float32.  expert_counts: [E], the routes of all tokens to each expert. They count as constants.
    """
    num_experts = logits.shape[1]
    probabilities = jax.nn.softmax(jax.nn.log_sigmoid(logits) if router.score == "sigmoid" else logits)
    routes = jax.lax.stop_gradient(expert_counts).astype(jnp.float32)
    num_tokens = jnp.maximum(routes.sum() / router.top_k, 1)
    scale = num_experts * router.aux_loss_coeff / (router.top_k * num_tokens**2)
    return scale * jnp.dot(probabilities.sum(0), routes, precision="highest")
