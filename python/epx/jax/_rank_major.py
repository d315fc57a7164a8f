# SPDX-License-Identifier: Apache-2.0
"""The operations of the rank-major layout, and their gradients."""

import jax
import jax.numpy as jnp

from .._formats import on_wire, require_room_for_combine_bwd
from .._structs import CombinePrecision, RowSpacing
from .._values import boolean, count, refuse
from ._calls import call_group, holds_token_mask, require_cotangent_of_token, require_token, require_topk_idx, values_of
from ._groups import require_one_node, require_usable
from ._plans import RankMajorPlan, group_of, reference_to
from ._rows import Rows, attributes_of_format, instantiate, require_rows, struct, where_in_use


def _require_sums_of_ranks(operation, group):
    if group.combine_precision == CombinePrecision.EXACT:
        refuse(f"{operation} sums the rows of a token by rank, which combine_precision 'exact' of {group!r} rules out")


def dispatch_rank_major(
    group,
    tokens,
    topk_idx,
    topk_weights,
    token,
    *,
    max_rows=None,
    compact=False,
    sidecar=None,
    zero_unused=True,
    format=None,
    with_wide=False,
    grad_format=None,
) -> tuple:
    """Brings each token once to each rank that one of its experts lives on, by source rank and without a prepare. Collective.

    tokens: [T, H] float32, float16 or bfloat16.  topk_idx: [T, K] int32 or int64, as in prepare().  topk_weights: [T, K]
    float32, or None on all ranks.  max_rows: M, the same on all ranks; default: max_tokens_per_rank, which loses nothing.
    P * min(M, max_tokens_per_rank) * K must not exceed R.  compact: the same on all ranks; True: rows from all ranks follow each
    other without gaps, the first sum(plan.counts) of the P * M rows; the shapes are the same.  sidecar, with_wide,
    grad_format: as in dispatch(); format too, without scales in tiles.  zero_unused: as in prepare().
    Returns (RankMajorPlan, recv_tokens [P, M, H], recv_weights [P, M, K] float32 or None, token); before the token, with a
    sidecar recv_sidecar [P, M, S], and with with_wide what stands for the rows. Scales by rows are [P, M, S], and row_scales
    [P, M]. Rows that hold no token are zero, with their scales. Row i of source rank r is r's i-th token that has an expert on
    this rank; plan.topk_idx[r, i] has its experts here.
    """
    require_usable(group)
    require_token(token)
    require_one_node(group, "rank-major calls")
    num_tokens, top_k = require_topk_idx(group, topk_idx)
    group.require_layer(top_k)
    max_rows = group.max_tokens_per_rank if max_rows is None else count("max_rows", max_rows)
    staged = group.num_ranks * min(max_rows, group.max_tokens_per_rank) * top_k
    if staged > group.max_recv_tokens_per_rank:
        refuse(
            f"max_rows is {max_rows}: P * min(max_rows, max_tokens_per_rank) * K is {staged}; it must be "
            f"at most the group's max_recv_tokens_per_rank, {group.max_recv_tokens_per_rank}"
        )
    options = dict(sidecar=sidecar, row_format=format, with_wide=with_wide, grad_format=grad_format)
    rows = Rows(group, tokens, num_tokens, top_k, topk_weights, (group.num_ranks, max_rows), **options)
    spacing = RowSpacing.COMPACT if boolean("compact", compact) else RowSpacing.STRIDED
    attributes = rows.attributes | dict(row_spacing=int(spacing))
    layer = top_k, 1
    planned = [
        struct((group.handle_mem_size(top_k),), jnp.uint8),
        struct((group.num_ranks,), jnp.int32),
        struct((group.num_ranks, max_rows, top_k), jnp.int32),
    ]

    @jax.custom_vjp
    def run(token, *operands):
        token, handle_mem, counts, local_idx, *results = call_group(
            "dispatch_rank_major", group, layer, [token, *operands], planned + rows.results, **attributes
        )
        holds_token = holds_token_mask(max_rows, counts, compact)
        outputs = rows.outputs(results, holds_token if zero_unused else None)
        return token, handle_mem, counts, where_in_use(holds_token, local_idx, -1), *outputs

    def forward(token, topk_idx, tokens, *optional):
        rows.require_gradient(tokens)
        results = run(*values_of([token, topk_idx, tokens, *optional]))
        return results, (token.value, results[1])

    def backward(residuals, cotangents):
        _require_sums_of_ranks("dispatch_rank_major_bwd", group)
        token, handle_mem = residuals
        require_cotangent_of_token("dispatch_rank_major", cotangents[0])
        operands = [instantiate(cotangents[0]), token, handle_mem, *rows.cotangents(cotangents[4:])]
        next_token, *grads = call_group("dispatch_rank_major_bwd", group, layer, operands, rows.returned, **rows.in_backward)
        return next_token, None, *rows.gradients(grads)

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, handle_mem, counts, local_idx, *outputs = run(token, topk_idx, *rows.operands)
    plan = RankMajorPlan(handle_mem, counts, local_idx, reference_to(group), top_k, num_tokens, max_rows, compact, zero_unused)
    return plan, *rows.received(outputs), token


def combine_rank_major(plan, expert_out, token, *, format=None, grad_format=None) -> tuple[jax.Array, jax.Array]:
    """Brings back the sums of the experts' outputs. Collective; not in a group of combine_precision "exact".

    expert_out: [P, M, H], for each row the sum over its routes of weight * the expert's output.  format, grad_format: as in
    combine().
    Returns (out [T, H], token): out is the sum of a token's rows over the ranks; zero for a token without routes.
    """
    group = group_of(plan, RankMajorPlan)
    require_token(token)
    _require_sums_of_ranks("combine_rank_major", group)
    rows = group.num_ranks, plan.max_rows
    require_rows(group, "expert_out", expert_out, *rows)
    layer = plan.top_k, 1
    in_forward = attributes_of_format(*on_wire("format", format, group, sums=True))
    in_backward = attributes_of_format(*on_wire("grad_format", grad_format, group, expert_out.shape, sums=False))
    combined = [struct((plan.num_tokens, expert_out.shape[2]), expert_out.dtype)]
    returned = [struct(expert_out.shape, expert_out.dtype)]

    @jax.custom_vjp
    def run(token, handle_mem, counts, expert_out):
        return tuple(call_group("combine_rank_major", group, layer, [token, handle_mem, expert_out], combined, **in_forward))

    def forward(*arguments):
        require_room_for_combine_bwd(format, grad_format, group, expert_out.dtype)
        values = values_of(arguments)
        return run(*values), tuple(values[:3])

    def backward(residuals, cotangents):
        token, handle_mem, counts = residuals
        require_cotangent_of_token("combine_rank_major", cotangents[0])
        next_token, grad_out = map(instantiate, cotangents)
        operands = [next_token, token, handle_mem, grad_out]
        next_token, grad = call_group("combine_rank_major_bwd", group, layer, operands, returned, **in_backward)
        if plan.zero_unused:
            grad = where_in_use(holds_token_mask(plan.max_rows, counts, plan.compact), grad)
        return next_token, None, None, grad

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, out = run(token, plan.handle_mem, plan.counts, expert_out)
    return out, token


__all__ = ["RankMajorPlan", "combine_rank_major", "dispatch_rank_major"]
