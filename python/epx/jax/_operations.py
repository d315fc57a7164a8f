# SPDX-License-Identifier: Apache-2.0
"""The operations, and their gradients."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy

from .._tensors import refuse
from ._ffi import call, number_of
from ._groups import require_usable

_INDEX_DTYPES = (jnp.int32, jnp.int64)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["handle_mem", "counts", "offsets", "global_counts"],
    meta_fields=["top_k", "alignment", "num_tokens"],
)
@dataclasses.dataclass(frozen=True)
class Plan:
    """What prepare() makes of top-k indices, as a pytree. handle_mem: [bytes] uint8.  counts: [E_l] int32, rows of each local
    expert. offsets: [E_l + 1] int32, first row of each zone; the last entry is the number of rows in use.  global_counts: [P,
    E] int32, routes from each rank to each expert, before drops. top_k, alignment and num_tokens are static."""

    handle_mem: jax.Array
    counts: jax.Array
    offsets: jax.Array
    global_counts: jax.Array
    top_k: int
    alignment: int
    num_tokens: int


def first_token():
    """The token of the first call."""
    return jnp.zeros((), jnp.float32)


def _call(operation, group, layer, operands, results):
    """Forward calls live as long as the token is used, up to finish(); backward calls are always kept, because nobody uses the
    gradient of the first token. Else XLA would drop the last call on ranks whose results have no elements, and only there."""
    top_k, alignment = layer
    return call(
        operation, operands, results, operation.endswith("_bwd"), group=number_of(group), top_k=top_k, alignment=alignment
    )


def _struct(shape, dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _is_symbolic_zero(cotangent):
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def _instantiate(cotangent):
    if not _is_symbolic_zero(cotangent):
        return cotangent
    if cotangent.dtype == jax.dtypes.float0:
        return numpy.zeros(cotangent.shape, cotangent.dtype)
    return jnp.zeros(cotangent.shape, cotangent.dtype)


def _require_cotangent_of_token(operation, cotangent):
    """The token of the last call has no gradient unless the loss has one through it; then nothing orders the backward calls."""
    if _is_symbolic_zero(cotangent):
        refuse(
            f"the gradient of {operation} does not come through its token: end the loss with epx.jax.finish(loss, token), "
            "where token is that of the last call"
        )


def _values(arguments):
    return [argument.value for argument in arguments]


def _zero_rows_behind(rows, offsets):
    """Rows that are not in use are not written by epx."""
    in_use = jnp.arange(rows.shape[0], dtype=offsets.dtype) < offsets[-1]
    return jnp.where(in_use.reshape((-1,) + (1,) * (rows.ndim - 1)), rows, jnp.zeros((), rows.dtype))


def _require_array(name, array, shape, dtypes):
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        refuse(f"{name} is {type(array).__name__}, not an array")
    if len(array.shape) != len(shape) or any(want is not None and want != size for want, size in zip(shape, array.shape)):
        refuse(
            f"{name} has shape {tuple(array.shape)}; it must be "
            f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
        )
    if jnp.dtype(array.dtype) not in [jnp.dtype(dtype) for dtype in dtypes]:
        refuse(f"{name} is {array.dtype}; it must be {' or '.join(str(jnp.dtype(dtype)) for dtype in dtypes)}")


def _require_token(token):
    _require_array("token", token, (), (jnp.float32,))


def _require_rows(group, name, rows, num_rows=None):
    _require_array(name, rows, (num_rows, None), (jnp.float32, jnp.float16, jnp.bfloat16))
    if rows.shape[1] > group.hidden_dim:
        refuse(f"{name} has {rows.shape[1]} columns; the group's hidden_dim is {group.hidden_dim}")


def prepare(group, topk_idx, token, *, alignment=1):
    """Turns top-k indices into a plan. Collective.

    topk_idx: [T, K] int32 or int64, the global expert of each route; -1 masks it.  alignment: rows that zones are padded to.
    Returns (Plan, token). Indices have no gradient, and its backward makes no call.
    """
    require_usable(group)
    _require_token(token)
    _require_array("topk_idx", topk_idx, (None, None), _INDEX_DTYPES)
    num_tokens, top_k = topk_idx.shape
    if num_tokens > group.max_tokens_per_rank:
        refuse(f"topk_idx has {num_tokens} tokens; the group's max_tokens_per_rank is {group.max_tokens_per_rank}")
    local = group.num_local_experts
    results = [
        _struct((group.handle_mem_size(top_k, alignment),), jnp.uint8),
        _struct((local,), jnp.int32),
        _struct((local + 1,), jnp.int32),
        _struct((group.num_ranks, group.num_experts), jnp.int32),
    ]

    @jax.custom_vjp
    def run(token, topk_idx):
        token, *parts = _call("prepare", group, (top_k, alignment), [token, topk_idx], results)
        return token, *parts

    def forward(token, topk_idx):
        return run(token.value, topk_idx.value), None

    def backward(_, cotangents):
        _require_cotangent_of_token("prepare", cotangents[0])
        return cotangents[0], None

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, handle_mem, counts, offsets, global_counts = run(token, topk_idx)
    return Plan(handle_mem, counts, offsets, global_counts, top_k, alignment, num_tokens), token


def dispatch(group, plan, tokens, topk_weights, token, *, num_rows=None):
    """Brings tokens to the ranks of their experts. Collective.

    tokens: [T, H] float32, float16 or bfloat16.  topk_weights: [T, K] float32, or None on all ranks.
    num_rows: N; default: R, the most that a rank may receive. Routes to rows beyond it are dropped, which group.check() tells.
    Returns (recv_tokens [N, H], recv_weights [N] float32 or None, token). Rows that hold no token are zero.
    """
    require_usable(group)
    _require_token(token)
    _require_rows(group, "tokens", tokens, plan.num_tokens)
    num_rows = group.max_recv_tokens_per_rank if num_rows is None else num_rows
    weights = []
    if topk_weights is not None:
        _require_array("topk_weights", topk_weights, (plan.num_tokens, plan.top_k), (jnp.float32,))
        weights = [topk_weights]
    layer = plan.top_k, plan.alignment
    hidden, dtype = tokens.shape[1], tokens.dtype
    received = [_struct((num_rows, hidden), dtype)] + [_struct((num_rows,), jnp.float32)] * len(weights)
    returned = [_struct((plan.num_tokens, hidden), dtype)] + [_struct((plan.num_tokens, plan.top_k), jnp.float32)] * len(
        weights
    )

    @jax.custom_vjp
    def run(token, handle_mem, offsets, tokens, *weights):
        token, *rows = _call("dispatch", group, layer, [token, handle_mem, tokens, *weights], received)
        return token, *[_zero_rows_behind(each, offsets) for each in rows]

    def forward(token, handle_mem, offsets, *rest):
        values = _values([token, handle_mem, offsets, *rest])
        return run(*values), tuple(values[:2])

    def backward(residuals, cotangents):
        token, handle_mem = residuals
        _require_cotangent_of_token("dispatch", cotangents[0])
        next_token, *rows = map(_instantiate, cotangents)
        next_token, *grads = _call("dispatch_bwd", group, layer, [next_token, token, handle_mem, *rows], returned)
        return next_token, None, None, *grads

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, recv_tokens, *recv_weights = run(token, plan.handle_mem, plan.offsets, tokens, *weights)
    return recv_tokens, (recv_weights[0] if recv_weights else None), token


def combine(group, plan, expert_out, recv_weights, token):
    """Brings the experts' outputs back. Collective.

    expert_out: [N, H].  recv_weights: [N] float32 as dispatch returned them, or None on all ranks: all 1.
    Returns (out [T, H], token): out is the sum over a token's routes of weight * row; zero for a token without routes.
    """
    require_usable(group)
    _require_token(token)
    _require_rows(group, "expert_out", expert_out)
    num_rows, hidden = expert_out.shape
    weights = []
    if recv_weights is not None:
        _require_array("recv_weights", recv_weights, (num_rows,), (jnp.float32,))
        weights = [recv_weights]
    layer = plan.top_k, plan.alignment
    combined = [_struct((plan.num_tokens, hidden), expert_out.dtype)]
    returned = [_struct((num_rows, hidden), expert_out.dtype)] + [_struct((num_rows,), jnp.float32)] * len(weights)

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
        next_token, grad_out = map(_instantiate, cotangents)
        next_token, *grads = _call(
            "combine_bwd", group, layer, [next_token, token, handle_mem, grad_out, *weights_and_rows], returned
        )
        return next_token, None, None, *[_zero_rows_behind(grad, offsets) for grad in grads]

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, out = run(token, plan.handle_mem, plan.offsets, expert_out, *weights)
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


def checkpoint(function):
    """jax.checkpoint for functions that call epx: their backward computes them again instead of keeping what they computed.

    function(*arguments, token) -> (*results, token), with arrays or pytrees of arrays. The calls that are made again come after
    the backward calls of what follows, which they take the token of. jax.checkpoint orders them by an optimization barrier
    alone, which XLA drops on CPU devices: there two checkpointed layers in the body of one loop have calls that nothing orders.
    """

    @functools.wraps(function)
    def checkpointed(*arguments):
        _require_token(arguments[-1])
        converted, hoisted = jax.closure_convert(function, *arguments)

        def compute(token, hoisted, *arguments):
            return converted(*arguments, token, *hoisted)

        run = jax.custom_vjp(compute)

        def forward(*primals):
            values = jax.tree.map(operator.attrgetter("value"), primals)
            return run(*values), values[1:]

        def backward(residuals, cotangents):
            _require_cotangent_of_token("checkpoint", cotangents[-1])
            cotangents = jax.tree.map(_instantiate, cotangents, is_leaf=_is_symbolic_zero)
            # Without the barrier XLA might find that what is computed again is what the forward has computed already, and keep
            # it.
            hoisted, *arguments = jax.lax.optimization_barrier((residuals, cotangents[-1]))[0]
            _, pull_back = jax.vjp(compute, cotangents[-1], hoisted, *arguments)
            return pull_back(cotangents)

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run(arguments[-1], hoisted, *arguments[:-1])

    return checkpointed
