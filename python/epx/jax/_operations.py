# SPDX-License-Identifier: Apache-2.0
"""The operations by expert, and their gradients."""

import jax
import jax.numpy as jnp

from .._formats import on_wire, require_room_for_combine_bwd
from .._values import count
from ._calls import call_group, require_cotangent_of_token, require_token, require_topk_idx, rows_in_use, saturated, values_of
from ._groups import require_usable
from ._plans import Plan, group_of, reference_to
from ._rows import SLOT, Rows, attributes_of_format, instantiate, require_array, require_rows, struct, where_in_use


def _planned(group, top_k, alignment):
    """What a call makes of top-k indices: handle_mem, counts, offsets, global_counts and the words of info."""
    group.require_layer(top_k, alignment)
    local = group.num_local_experts
    return [
        struct((group.handle_mem_size(top_k, alignment),), jnp.uint8),
        struct((local,), jnp.int32),
        struct((local + 1,), jnp.int32),
        struct((group.num_ranks, group.num_experts), jnp.int32),
        struct((5, 2), jnp.uint32),
    ]


def prepare(
    group, topk_idx, token, *, alignment=1, with_slot=False, zero_unused=True, zone_stride=0
) -> tuple[Plan, jax.Array]:
    """Turns top-k indices into a plan. Collective.

    topk_idx: [T, K] int32 or int64, the global expert of each route; -1 masks it.  alignment: rows that zones are padded to.
    with_slot: whether the plan has slot.  zero_unused: whether rows behind those in use, of dispatch and of combine's gradient,
    are zero. Making them zero takes XLA a pass over the rows; with False they are whatever memory held, NaN for instance, which
    experts may compute with but must not sum into other rows or into the gradients of weights, as jax.lax.ragged_dot does not.
    zone_stride: rows from one zone to the next, a multiple of alignment, the same on all ranks. Routes to an expert beyond it
    are dropped, and rows of a zone behind its pads are unused. 0: a zone begins where the one before it ends.
    Returns (Plan, token). Indices have no gradient, and its backward makes no call.
    """
    require_usable(group)
    require_token(token)
    num_tokens, top_k = require_topk_idx(group, topk_idx)
    zone_stride = count("zone_stride", zone_stride)
    results = _planned(group, top_k, alignment) + [struct((num_tokens, top_k), jnp.int32)] * with_slot

    @jax.custom_vjp
    def run(token, topk_idx):
        layer = top_k, alignment
        return tuple(call_group("prepare", group, layer, [token, topk_idx], results, zone_stride=zone_stride))

    def forward(token, topk_idx):
        return run(token.value, topk_idx.value), None

    def backward(_, cotangents):
        require_cotangent_of_token("prepare", cotangents[0])
        return cotangents[0], None

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, handle_mem, counts, offsets, global_counts, info, *slot = run(token, topk_idx)
    plan = Plan(
        handle_mem,
        counts,
        offsets,
        global_counts,
        saturated(info),
        slot[0] if with_slot else None,
        reference_to(group),
        top_k,
        alignment,
        zone_stride,
        num_tokens,
        zero_unused,
    )
    return plan, token


def dispatch(
    plan, tokens, topk_weights, token, *, num_rows=None, sidecar=None, format=None, with_wide=False, grad_format=None
) -> tuple:
    """Brings tokens to the ranks of their experts. Collective.

    tokens: [T, H] float32, float16 or bfloat16.  topk_weights: [T, K] float32, or None on all ranks.
    num_rows: N; default: R, the most that a rank may receive. Routes to rows beyond it are dropped, which group.check() tells.
    sidecar: [T, S] of any dtype of whole bytes, block scales for instance, at most max_sidecar_bytes in a row; or None on all
    ranks. It has no gradient.
    format: an epx.RowFormat, or None on all ranks. With one the rows travel in 8 or 4 bits; tokens, recv_tokens or both are
    tuples (rows, scales), with NV (rows, scales, row_scales), as it says. Rows are float8_e4m3fn, float8_e5m2 or float4_e2m1fn
    [..., H]. Rows that come quantised have no gradient, and that of wide rows is the one that dispatch has without a format.
    with_wide: the same on all ranks; where wide rows arrive quantised, also returns an array [N, H] of tokens' dtype that stands
    for the rows: give it to the function with a custom_vjp that computes with them, which returns their gradient for it. Its
    elements are 0, and nothing else of rows and scales has a gradient. Without it tokens that are differentiated are refused.
    grad_format: an epx.RowFormat of "block128" or "mx" with wire_only, or None on all ranks: the format in which the ranks' partial
    sums of the rows' gradients travel home in the backward. It needs combine_precision "wire". With the default amax_floor of
    "block128" small gradients vanish: give it amax_floor=0.
    Returns (recv_tokens [N, H], recv_weights [N] float32 or None, token); before the token, with a sidecar recv_sidecar [N, S],
    and with with_wide what stands for the rows. Rows that hold no token are zero, with their scales, but see zero_unused of
    prepare().
    """
    group = group_of(plan, Plan)
    require_token(token)
    num_rows = group.max_recv_tokens_per_rank if num_rows is None else count("num_rows", num_rows)
    options = dict(sidecar=sidecar, row_format=format, with_wide=with_wide, grad_format=grad_format)
    rows = Rows(group, tokens, plan.num_tokens, plan.top_k, topk_weights, (num_rows,), **options)
    layer = plan.top_k, plan.alignment

    @jax.custom_vjp
    def run(token, handle_mem, zones, *operands):
        token, *results = call_group("dispatch", group, layer, [token, handle_mem, *operands], rows.results, **rows.attributes)
        return token, *rows.outputs(results, rows_in_use(plan.zero_unused, num_rows, zones, plan.zone_stride))

    def forward(token, handle_mem, zones, tokens, *optional):
        rows.require_gradient(tokens)
        values = values_of([token, handle_mem, zones, tokens, *optional])
        return run(*values), tuple(values[:2])

    def backward(residuals, cotangents):
        token, handle_mem = residuals
        require_cotangent_of_token("dispatch", cotangents[0])
        operands = [instantiate(cotangents[0]), token, handle_mem, *rows.cotangents(cotangents[1:])]
        next_token, *grads = call_group("dispatch_bwd", group, layer, operands, rows.returned, **rows.in_backward)
        return next_token, None, None, *rows.gradients(grads)

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, *outputs = run(token, plan.handle_mem, plan._zones, *rows.operands)
    return *rows.received(outputs), token


def prepare_dispatch(
    group,
    tokens,
    topk_idx,
    topk_weights,
    token,
    *,
    alignment=1,
    with_slot=False,
    zero_unused=True,
    zone_stride=0,
    num_rows=None,
    sidecar=None,
    format=None,
    with_wide=False,
    grad_format=None,
) -> tuple:
    """prepare() and dispatch() in one call, which all ranks make instead of the two. Collective.

    Arguments are those of the two.
    Returns (Plan, recv_tokens [N, H], recv_weights [N] float32 or None, token); before the token, with a sidecar recv_sidecar
    [N, S], and with with_wide what stands for the rows.
    """
    require_usable(group)
    require_token(token)
    num_tokens, top_k = require_topk_idx(group, topk_idx)
    num_rows = group.max_recv_tokens_per_rank if num_rows is None else count("num_rows", num_rows)
    options = dict(sidecar=sidecar, row_format=format, with_wide=with_wide, grad_format=grad_format)
    rows = Rows(group, tokens, num_tokens, top_k, topk_weights, (num_rows,), **options)
    layer = top_k, alignment
    planned = _planned(group, top_k, alignment)
    slots = [struct((num_tokens, top_k), jnp.int32)] * with_slot
    zone_stride = count("zone_stride", zone_stride)
    attributes = rows.attributes | dict(zone_stride=zone_stride)
    if with_slot:
        attributes["optional_results"] |= SLOT

    @jax.custom_vjp
    def run(token, *operands):
        token, *results = call_group(
            "prepare_dispatch", group, layer, [token, *operands], planned + rows.results + slots, **attributes
        )
        parts, results = results[: len(planned)], results[len(planned) :]
        slot = [results.pop()] if with_slot else []
        zones = parts[1 if zone_stride else 2]  # counts or offsets
        return token, *parts, *slot, *rows.outputs(results, rows_in_use(zero_unused, num_rows, zones, zone_stride))

    def forward(token, topk_idx, tokens, *optional):
        rows.require_gradient(tokens)
        results = run(*values_of([token, topk_idx, tokens, *optional]))
        return results, (token.value, results[1])

    def backward(residuals, cotangents):
        token, handle_mem = residuals
        require_cotangent_of_token("prepare_dispatch", cotangents[0])
        of_rows = rows.cotangents(cotangents[1 + len(planned) + len(slots) :])
        operands = [instantiate(cotangents[0]), token, handle_mem, *of_rows]
        next_token, *grads = call_group("dispatch_bwd", group, layer, operands, rows.returned, **rows.in_backward)
        return next_token, None, *rows.gradients(grads)

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, handle_mem, counts, offsets, global_counts, info, *outputs = run(token, topk_idx, *rows.operands)
    slot = outputs.pop(0) if with_slot else None
    layer_of_plan = reference_to(group), top_k, alignment, zone_stride, num_tokens, zero_unused
    plan = Plan(handle_mem, counts, offsets, global_counts, saturated(info), slot, *layer_of_plan)
    return plan, *rows.received(outputs), token


def combine(plan, expert_out, recv_weights, token, *, format=None, grad_format=None) -> tuple[jax.Array, jax.Array]:
    """Brings the experts' outputs back. Collective.

    expert_out: [N, H] float32, float16 or bfloat16.  recv_weights: [N] float32 as dispatch returned them, or None on all
    ranks: all 1.  format: an epx.RowFormat of "block128" or "mx" with wire_only, or None on all ranks: the format in which the
    ranks' partial sums travel home. It needs combine_precision "wire". Gradients are those of a combine without it.
    grad_format: an epx.RowFormat with wire_only, or None on all ranks: the format in which the gradient of out travels in the
    backward. The gradients of expert_out and of recv_weights are then those of a gradient that has been quantised. With the
    default amax_floor of "block128" small sums and gradients vanish: give both formats amax_floor=0.
    Returns (out [T, H], token): out is the sum over a token's routes of weight * row; zero for a token without routes.
    """
    group = group_of(plan, Plan)
    require_token(token)
    require_rows(group, "expert_out", expert_out, None)
    num_rows, hidden = expert_out.shape
    weights = []
    if recv_weights is not None:
        require_array("recv_weights", recv_weights, (num_rows,), (jnp.float32,))
        weights = [recv_weights]
    layer = plan.top_k, plan.alignment
    in_forward = attributes_of_format(*on_wire("format", format, group, sums=True))
    in_backward = attributes_of_format(*on_wire("grad_format", grad_format, group, expert_out.shape, sums=False))
    combined = [struct((plan.num_tokens, hidden), expert_out.dtype)]
    returned = [struct((num_rows, hidden), expert_out.dtype)] + [struct((num_rows,), jnp.float32)] * len(weights)

    @jax.custom_vjp
    def run(token, handle_mem, zones, expert_out, *weights):
        return tuple(call_group("combine", group, layer, [token, handle_mem, expert_out, *weights], combined, **in_forward))

    def forward(token, handle_mem, zones, expert_out, *weights):
        require_room_for_combine_bwd(format, grad_format, group, expert_out.value.dtype)
        values = values_of([token, handle_mem, zones, expert_out, *weights])
        # The gradient of the weights is all that needs the rows.
        return run(*values), (*values[:3], *(reversed(values[3:]) if weights else ()))

    def backward(residuals, cotangents):
        token, handle_mem, zones, *weights_and_rows = residuals
        require_cotangent_of_token("combine", cotangents[0])
        next_token, grad_out = map(instantiate, cotangents)
        operands = [next_token, token, handle_mem, grad_out, *weights_and_rows]
        next_token, *grads = call_group("combine_bwd", group, layer, operands, returned, **in_backward)
        in_use = rows_in_use(plan.zero_unused, num_rows, zones, plan.zone_stride)
        return next_token, None, None, *[grad if in_use is None else where_in_use(in_use, grad) for grad in grads]

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, out = run(token, plan.handle_mem, plan._zones, expert_out, *weights)
    return out, token


__all__ = ["Plan", "combine", "dispatch", "prepare", "prepare_dispatch"]
