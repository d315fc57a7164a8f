# SPDX-License-Identifier: Apache-2.0
"""The operations, and their gradients."""

import collections.abc
import dataclasses
import functools
import operator
import weakref

import jax
import jax.extend.core
import jax.numpy as jnp

from .._formats import on_wire
from .._structs import CombinePrecision
from .._values import count, refuse, refuse_destroyed, require_kind
from ._ffi import call, number_of
from ._groups import require_usable
from ._rows import SLOT, Rows, attributes_of_format, instantiate, is_symbolic_zero, require_array, require_rows, struct, where_in_use

_INDEX_DTYPES = (jnp.int32, jnp.int64)


def _reference(group):
    """What a plan has its group by, as a static field. JAX keeps static fields of what compiled functions took and returned, and
    would keep the group alive."""
    reference = weakref.ref(group)
    hash(reference)  # which it then has for good
    return reference


def _group_of(plan, kind):
    """The group that calls with this plan are made in."""
    require_kind("plan", plan, kind)
    group = plan.group
    require_usable(group)
    return group


class _HasGroup:
    @property
    def group(self):
        """The epx.Group that made the plan. A plan does not keep it alive."""
        group = self.group_reference()
        if group is None:
            refuse_destroyed("group")
        return group


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["handle_mem", "counts", "offsets", "global_counts", "info", "slot"],
    meta_fields=["group_reference", "top_k", "alignment", "num_tokens", "zero_unused"],
)
@dataclasses.dataclass(frozen=True)
class Plan(_HasGroup):
    """What prepare() makes of top-k indices, as a pytree. handle_mem: [bytes] uint8.  counts: [E_l] int32, rows of each local
    expert. offsets: [E_l + 1] int32, first row of each zone; the last entry is the number of rows in use.  global_counts: [P,
    E] int32, routes from each rank to each expert, before drops.  info: [5] int32: demand, kept, dropped (routes to this rank),
    dropped (routes of this rank), rows_needed; 2^31 - 1 stands for more.  slot: [T, K] int32, the row of each route on its
    expert's rank, -1 where it is masked or dropped; or None. group, top_k, alignment, num_tokens and
    zero_unused are static."""

    handle_mem: jax.Array
    counts: jax.Array
    offsets: jax.Array
    global_counts: jax.Array
    info: jax.Array
    slot: jax.Array | None
    group_reference: weakref.ref
    top_k: int
    alignment: int
    num_tokens: int
    zero_unused: bool


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["handle_mem", "counts", "topk_idx"],
    meta_fields=["group_reference", "top_k", "num_tokens", "max_rows", "zero_unused"],
)
@dataclasses.dataclass(frozen=True)
class RankMajorPlan(_HasGroup):
    """What dispatch_rank_major() has received from whom, as a pytree. handle_mem: [bytes] uint8.  counts: [P] int32, kept rows
    from each rank.  topk_idx: [P, M, K] int32, the local expert, 0 to E_l - 1, of each route to this rank; -1 where the route
    is masked or goes to another rank, and in rows that hold no token. group, top_k, num_tokens, max_rows (M) and
    zero_unused are static."""

    handle_mem: jax.Array
    counts: jax.Array
    topk_idx: jax.Array
    group_reference: weakref.ref
    top_k: int
    num_tokens: int
    max_rows: int
    zero_unused: bool


def first_token() -> jax.Array:
    """The token of the first call."""
    return jnp.zeros((), jnp.float32)


def _call(operation, group, layer, operands, results, **attributes):
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


def _require_cotangent_of_token(operation, cotangent):
    """The token of the last call has no gradient unless the loss has one through it; then nothing orders the backward calls."""
    if is_symbolic_zero(cotangent):
        refuse(
            f"the gradient of {operation} does not come through its token: end the loss with epx.jax.finish(loss, token), "
            "where token is that of the last call"
        )


def _values(arguments):
    return [argument.value for argument in arguments]


def _in_use(zero_unused, num_rows, offsets):
    """Which rows [N] are in use; None where that does not matter."""
    return jnp.arange(num_rows, dtype=offsets.dtype) < offsets[-1] if zero_unused else None


def _holds_token(max_rows, counts):
    """Which rows [P, M] of the rank-major layout hold a token."""
    return jnp.arange(max_rows, dtype=counts.dtype) < counts[:, None]


def _require_token(token):
    require_array("token", token, (), (jnp.float32,))


def _require_topk_idx(group, topk_idx):
    require_array("topk_idx", topk_idx, (None, None), _INDEX_DTYPES)
    if topk_idx.shape[0] > group.max_tokens_per_rank:
        refuse(f"topk_idx has {topk_idx.shape[0]} tokens; the group's max_tokens_per_rank is {group.max_tokens_per_rank}")
    return topk_idx.shape


def _saturated(words):
    """Numbers that are not negative as int32, from the words of int64."""
    largest = jnp.uint32(2**31 - 1)
    return jnp.where(words[:, 1] == 0, jnp.minimum(words[:, 0], largest), largest).astype(jnp.int32)


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


def prepare(group, topk_idx, token, *, alignment=1, with_slot=False, zero_unused=True) -> tuple[Plan, jax.Array]:
    """Turns top-k indices into a plan. Collective.

    topk_idx: [T, K] int32 or int64, the global expert of each route; -1 masks it.  alignment: rows that zones are padded to.
    with_slot: whether the plan has slot.  zero_unused: whether rows behind those in use, of dispatch and of combine's gradient,
    are zero. Making them zero takes XLA a pass over the rows; with False they are whatever memory held, NaN for instance, which
    experts may compute with but must not sum into other rows or into the gradients of weights, as jax.lax.ragged_dot does not.
    Returns (Plan, token). Indices have no gradient, and its backward makes no call.
    """
    require_usable(group)
    _require_token(token)
    num_tokens, top_k = _require_topk_idx(group, topk_idx)
    results = _planned(group, top_k, alignment) + [struct((num_tokens, top_k), jnp.int32)] * with_slot

    @jax.custom_vjp
    def run(token, topk_idx):
        return tuple(_call("prepare", group, (top_k, alignment), [token, topk_idx], results))

    def forward(token, topk_idx):
        return run(token.value, topk_idx.value), None

    def backward(_, cotangents):
        _require_cotangent_of_token("prepare", cotangents[0])
        return cotangents[0], None

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, handle_mem, counts, offsets, global_counts, info, *slot = run(token, topk_idx)
    plan = Plan(
        handle_mem,
        counts,
        offsets,
        global_counts,
        _saturated(info),
        slot[0] if with_slot else None,
        _reference(group),
        top_k,
        alignment,
        num_tokens,
        zero_unused,
    )
    return plan, token


def dispatch(
    plan, tokens, topk_weights, token, *, num_rows=None, sidecar=None, format=None, with_wide=False
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
    Returns (recv_tokens [N, H], recv_weights [N] float32 or None, token); before the token, with a sidecar recv_sidecar [N, S],
    and with with_wide what stands for the rows. Rows that hold no token are zero, with their scales, but see zero_unused of
    prepare().
    """
    group = _group_of(plan, Plan)
    _require_token(token)
    num_rows = group.max_recv_tokens_per_rank if num_rows is None else count("num_rows", num_rows)
    options = dict(sidecar=sidecar, row_format=format, with_wide=with_wide)
    rows = Rows(group, tokens, plan.num_tokens, plan.top_k, topk_weights, (num_rows,), **options)
    layer = plan.top_k, plan.alignment

    @jax.custom_vjp
    def run(token, handle_mem, offsets, *operands):
        token, *results = _call("dispatch", group, layer, [token, handle_mem, *operands], rows.results, **rows.attributes)
        return token, *rows.outputs(results, _in_use(plan.zero_unused, num_rows, offsets))

    def forward(token, handle_mem, offsets, tokens, *optional):
        rows.require_gradient(tokens)
        values = _values([token, handle_mem, offsets, tokens, *optional])
        return run(*values), tuple(values[:2])

    def backward(residuals, cotangents):
        token, handle_mem = residuals
        _require_cotangent_of_token("dispatch", cotangents[0])
        operands = [instantiate(cotangents[0]), token, handle_mem, *rows.cotangents(cotangents[1:])]
        next_token, *grads = _call("dispatch_bwd", group, layer, operands, rows.returned)
        return next_token, None, None, *rows.gradients(grads)

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, *outputs = run(token, plan.handle_mem, plan.offsets, *rows.operands)
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
    num_rows=None,
    sidecar=None,
    format=None,
    with_wide=False,
) -> tuple:
    """prepare() and dispatch() in one call, which all ranks make instead of the two. Collective.

    Arguments are those of the two.
    Returns (Plan, recv_tokens [N, H], recv_weights [N] float32 or None, token); before the token, with a sidecar recv_sidecar
    [N, S], and with with_wide what stands for the rows.
    """
    require_usable(group)
    _require_token(token)
    num_tokens, top_k = _require_topk_idx(group, topk_idx)
    num_rows = group.max_recv_tokens_per_rank if num_rows is None else count("num_rows", num_rows)
    options = dict(sidecar=sidecar, row_format=format, with_wide=with_wide)
    rows = Rows(group, tokens, num_tokens, top_k, topk_weights, (num_rows,), **options)
    layer = top_k, alignment
    planned = _planned(group, top_k, alignment)
    slots = [struct((num_tokens, top_k), jnp.int32)] * with_slot
    attributes = rows.attributes
    if with_slot:
        attributes["optional_results"] |= SLOT

    @jax.custom_vjp
    def run(token, *operands):
        token, *results = _call(
            "prepare_dispatch", group, layer, [token, *operands], planned + rows.results + slots, **attributes
        )
        parts, results = results[: len(planned)], results[len(planned) :]
        slot = [results.pop()] if with_slot else []
        return token, *parts, *slot, *rows.outputs(results, _in_use(zero_unused, num_rows, parts[2]))

    def forward(token, topk_idx, tokens, *optional):
        rows.require_gradient(tokens)
        results = run(*_values([token, topk_idx, tokens, *optional]))
        return results, (token.value, results[1])

    def backward(residuals, cotangents):
        token, handle_mem = residuals
        _require_cotangent_of_token("prepare_dispatch", cotangents[0])
        of_rows = rows.cotangents(cotangents[1 + len(planned) + len(slots) :])
        operands = [instantiate(cotangents[0]), token, handle_mem, *of_rows]
        next_token, *grads = _call("dispatch_bwd", group, layer, operands, rows.returned)
        return next_token, None, *rows.gradients(grads)

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, handle_mem, counts, offsets, global_counts, info, *outputs = run(token, topk_idx, *rows.operands)
    slot = outputs.pop(0) if with_slot else None
    layer_of_plan = _reference(group), top_k, alignment, num_tokens, zero_unused
    plan = Plan(handle_mem, counts, offsets, global_counts, _saturated(info), slot, *layer_of_plan)
    return plan, *rows.received(outputs), token


def combine(plan, expert_out, recv_weights, token, *, grad_format=None) -> tuple[jax.Array, jax.Array]:
    """Brings the experts' outputs back. Collective.

    expert_out: [N, H] float32, float16 or bfloat16.  recv_weights: [N] float32 as dispatch returned them, or None on all
    ranks: all 1.  grad_format: an epx.RowFormat with wire_only, or None on all ranks: the format in which the gradient of out
    travels in the backward. The gradients of expert_out and of recv_weights are then those of a gradient that has been quantised.
    Returns (out [T, H], token): out is the sum over a token's routes of weight * row; zero for a token without routes.
    """
    group = _group_of(plan, Plan)
    _require_token(token)
    require_rows(group, "expert_out", expert_out, None)
    num_rows, hidden = expert_out.shape
    weights = []
    if recv_weights is not None:
        require_array("recv_weights", recv_weights, (num_rows,), (jnp.float32,))
        weights = [recv_weights]
    layer = plan.top_k, plan.alignment
    attributes = attributes_of_format(*on_wire("grad_format", grad_format, group, sums=False))
    combined = [struct((plan.num_tokens, hidden), expert_out.dtype)]
    returned = [struct((num_rows, hidden), expert_out.dtype)] + [struct((num_rows,), jnp.float32)] * len(weights)

    @jax.custom_vjp
    def run(token, handle_mem, offsets, expert_out, *weights):
        return tuple(_call("combine", group, layer, [token, handle_mem, expert_out, *weights], combined))

    def forward(token, handle_mem, offsets, expert_out, *weights):
        values = _values([token, handle_mem, offsets, expert_out, *weights])
        # The gradient of the weights is all that needs the rows.
        return run(*values), (*values[:3], *(reversed(values[3:]) if weights else ()))

    def backward(residuals, cotangents):
        token, handle_mem, offsets, *weights_and_rows = residuals
        _require_cotangent_of_token("combine", cotangents[0])
        next_token, grad_out = map(instantiate, cotangents)
        operands = [next_token, token, handle_mem, grad_out, *weights_and_rows]
        next_token, *grads = _call("combine_bwd", group, layer, operands, returned, **attributes)
        in_use = _in_use(plan.zero_unused, num_rows, offsets)
        return next_token, None, None, *[grad if in_use is None else where_in_use(in_use, grad) for grad in grads]

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, out = run(token, plan.handle_mem, plan.offsets, expert_out, *weights)
    return out, token


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
    sidecar=None,
    zero_unused=True,
    format=None,
    with_wide=False,
) -> tuple:
    """Brings each token once to each rank that one of its experts lives on, by source rank and without a prepare. Collective.

    tokens: [T, H] float32, float16 or bfloat16.  topk_idx: [T, K] int32 or int64, as in prepare().  topk_weights: [T, K]
    float32, or None on all ranks.  max_rows: M, the same on all ranks; default: max_tokens_per_rank, which loses nothing.
    P * min(M, max_tokens_per_rank) * K must not exceed R.  sidecar, with_wide: as in dispatch(); format
    too, without scales in tiles.  zero_unused: as in prepare().
    Returns (RankMajorPlan, recv_tokens [P, M, H], recv_weights [P, M, K] float32 or None, token); before the token, with a
    sidecar recv_sidecar [P, M, S], and with with_wide what stands for the rows. Scales by rows are [P, M, S], and row_scales
    [P, M]. Rows that hold no token are zero, with their scales. Row i of source rank r is r's i-th token that has an expert on
    this rank; plan.topk_idx[r, i] has its experts here.
    """
    require_usable(group)
    _require_token(token)
    if group.ranks_per_node != group.num_ranks:
        refuse(f"{group!r} has {group.num_ranks // group.ranks_per_node} nodes; rank-major calls need a group of one node")
    num_tokens, top_k = _require_topk_idx(group, topk_idx)
    group.require_layer(top_k)
    max_rows = group.max_tokens_per_rank if max_rows is None else count("max_rows", max_rows)
    staged = group.num_ranks * min(max_rows, group.max_tokens_per_rank) * top_k
    if staged > group.max_recv_tokens_per_rank:
        refuse(
            f"max_rows is {max_rows}: P * min(max_rows, max_tokens_per_rank) * K is {staged}; it must be "
            f"at most the group's max_recv_tokens_per_rank, {group.max_recv_tokens_per_rank}"
        )
    options = dict(sidecar=sidecar, row_format=format, with_wide=with_wide)
    rows = Rows(group, tokens, num_tokens, top_k, topk_weights, (group.num_ranks, max_rows), **options)
    layer = top_k, 1
    planned = [
        struct((group.handle_mem_size(top_k),), jnp.uint8),
        struct((group.num_ranks,), jnp.int32),
        struct((group.num_ranks, max_rows, top_k), jnp.int32),
    ]

    @jax.custom_vjp
    def run(token, *operands):
        token, handle_mem, counts, local_idx, *results = _call(
            "dispatch_rank_major", group, layer, [token, *operands], planned + rows.results, **rows.attributes
        )
        holds_token = _holds_token(max_rows, counts)
        outputs = rows.outputs(results, holds_token if zero_unused else None)
        return token, handle_mem, counts, where_in_use(holds_token, local_idx, -1), *outputs

    def forward(token, topk_idx, tokens, *optional):
        rows.require_gradient(tokens)
        results = run(*_values([token, topk_idx, tokens, *optional]))
        return results, (token.value, results[1])

    def backward(residuals, cotangents):
        _require_sums_of_ranks("dispatch_rank_major_bwd", group)
        token, handle_mem = residuals
        _require_cotangent_of_token("dispatch_rank_major", cotangents[0])
        operands = [instantiate(cotangents[0]), token, handle_mem, *rows.cotangents(cotangents[4:])]
        next_token, *grads = _call("dispatch_rank_major_bwd", group, layer, operands, rows.returned)
        return next_token, None, *rows.gradients(grads)

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, handle_mem, counts, local_idx, *outputs = run(token, topk_idx, *rows.operands)
    plan = RankMajorPlan(handle_mem, counts, local_idx, _reference(group), top_k, num_tokens, max_rows, zero_unused)
    return plan, *rows.received(outputs), token


def combine_rank_major(plan, expert_out, token, *, grad_format=None) -> tuple[jax.Array, jax.Array]:
    """Brings back the sums of the experts' outputs. Collective; not in a group of combine_precision "exact".

    expert_out: [P, M, H], for each row the sum over its routes of weight * the expert's output.  grad_format: as in combine().
    Returns (out [T, H], token): out is the sum of a token's rows over the ranks; zero for a token without routes.
    """
    group = _group_of(plan, RankMajorPlan)
    _require_token(token)
    _require_sums_of_ranks("combine_rank_major", group)
    rows = group.num_ranks, plan.max_rows
    require_rows(group, "expert_out", expert_out, *rows)
    layer = plan.top_k, 1
    attributes = attributes_of_format(*on_wire("grad_format", grad_format, group, sums=False))
    combined = [struct((plan.num_tokens, expert_out.shape[2]), expert_out.dtype)]
    returned = [struct(expert_out.shape, expert_out.dtype)]

    @jax.custom_vjp
    def run(token, handle_mem, counts, expert_out):
        return tuple(_call("combine_rank_major", group, layer, [token, handle_mem, expert_out], combined))

    def forward(*arguments):
        values = _values(arguments)
        return run(*values), tuple(values[:3])

    def backward(residuals, cotangents):
        token, handle_mem, counts = residuals
        _require_cotangent_of_token("combine_rank_major", cotangents[0])
        next_token, grad_out = map(instantiate, cotangents)
        operands = [next_token, token, handle_mem, grad_out]
        next_token, grad = _call("combine_rank_major_bwd", group, layer, operands, returned, **attributes)
        if plan.zero_unused:
            grad = where_in_use(_holds_token(plan.max_rows, counts), grad)
        return next_token, None, None, grad

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, out = run(token, plan.handle_mem, plan.counts, expert_out)
    return out, token


@jax.custom_vjp
def _finish(results, token):
    return _finish_forward(results, token)[0]


def _finish_forward(results, token):
    (held,) = call("hold", [token], [], True)
    # The barrier has JAX keep the call; that it has a side effect has XLA keep it.
    return jax.lax.optimization_barrier((results, held))[0], token


def _finish_backward(token, cotangents):
    return cotangents, token


_finish.defvjp(_finish_forward, _finish_backward)


def finish(results, token):
    """Ends the calls of a function. Returns `results`, an array or a pytree of arrays: the loss, for instance.

    token is that of the last call. All calls up to it are made, whether or not somebody uses what they return: XLA drops the
    others, and it may do so on one rank alone, whose results have no elements. The first call of the backward pass takes the
    token, so that all calls of the backward come after all of the forward, also where the gradient of the loss does not depend
    on its value.
    """
    _require_token(token)
    return _finish(results, token)


def _hoist(function, *arguments):
    """Returns `converted` and arrays, so that converted(*arguments, *arrays) is function(*arguments) and closes over no tracer.
    jax.closure_convert leaves arrays of integers, a plan's for instance, where they are."""
    tree = jax.tree.structure(arguments)
    closed, shape = jax.make_jaxpr(lambda *leaves: function(*tree.unflatten(leaves)), return_shape=True)(
        *jax.tree.leaves(arguments)
    )

    def converted(*arguments_and_arrays):
        arguments, arrays = arguments_and_arrays[: len(tree.children())], arguments_and_arrays[len(tree.children()) :]
        run = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(closed.jaxpr, arrays))
        return jax.tree.structure(shape).unflatten(run(*jax.tree.leaves(arguments)))

    return converted, closed.consts


def checkpoint(function) -> collections.abc.Callable:
    """jax.checkpoint for functions that call epx: their backward computes them again instead of keeping what they computed.

    function(*arguments, token) -> (*results, token), with arrays or pytrees of arrays. The calls that are made again come after
    the backward calls of what follows, which they take the token of. jax.checkpoint orders them by an optimization barrier
    alone, which XLA drops on CPU devices: there two checkpointed layers in the body of one loop have calls that nothing orders.
    """

    @functools.wraps(function)
    def checkpointed(*arguments):
        _require_token(arguments[-1])
        converted, hoisted = _hoist(function, *arguments)

        def compute(token, hoisted, *arguments):
            return converted(*arguments, token, *hoisted)

        run = jax.custom_vjp(compute)

        def forward(*primals):
            values = jax.tree.map(operator.attrgetter("value"), primals)
            return run(*values), values[1:]

        def backward(residuals, cotangents):
            _require_cotangent_of_token("checkpoint", cotangents[-1])
            cotangents = jax.tree.map(instantiate, cotangents, is_leaf=is_symbolic_zero)
            # Without the barrier XLA might find that what is computed again is what the forward has computed already, and keep
            # it.
            hoisted, *arguments = jax.lax.optimization_barrier((residuals, cotangents[-1]))[0]
            _, pull_back = jax.vjp(compute, cotangents[-1], hoisted, *arguments)
            return pull_back(cotangents)

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run(arguments[-1], hoisted, *arguments[:-1])

    return checkpointed


__all__ = [
    "Plan",
    "RankMajorPlan",
    "checkpoint",
    "combine",
    "combine_rank_major",
    "dispatch",
    "dispatch_rank_major",
    "finish",
    "first_token",
    "prepare",
    "prepare_dispatch",
]
