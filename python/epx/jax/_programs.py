# SPDX-License-Identifier: Apache-2.0
"""How a program of calls begins and ends, and parts of it that are computed again in the backward."""

import collections.abc
import functools
import operator

import jax
import jax.extend.core
import jax.numpy as jnp

from ._calls import require_cotangent_of_token, require_token
from ._ffi import call
from ._rows import instantiate, is_symbolic_zero


def first_token() -> jax.Array:
    """The token of the first call."""
    return jnp.zeros((), jnp.float32)


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
    require_token(token)
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
        require_token(arguments[-1])
        converted, hoisted = _hoist(function, *arguments)

        def compute(token, hoisted, *arguments):
            return converted(*arguments, token, *hoisted)

        run = jax.custom_vjp(compute)

        def forward(*primals):
            values = jax.tree.map(operator.attrgetter("value"), primals)
            return run(*values), values[1:]

        def backward(residuals, cotangents):
            require_cotangent_of_token("checkpoint", cotangents[-1])
            cotangents = jax.tree.map(instantiate, cotangents, is_leaf=is_symbolic_zero)
            # Without the barrier XLA might find that what is computed again is what the forward has computed already, and keep
            # it.
            hoisted, *arguments = jax.lax.optimization_barrier((residuals, cotangents[-1]))[0]
            _, pull_back = jax.vjp(compute, cotangents[-1], hoisted, *arguments)
            return pull_back(cotangents)

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run(arguments[-1], hoisted, *arguments[:-1])

    return checkpointed


__all__ = ["checkpoint", "finish", "first_token"]
