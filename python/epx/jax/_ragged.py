# SPDX-License-Identifier: Apache-2.0
"""The ragged all-to-all, and its gradients."""

import jax
import jax.numpy as jnp

from .._slices import OFFSETS, require_num_slices, require_rows_alike
from .._values import boolean, refuse
from ._calls import INDEX_DTYPES, require_cotangent_of_token, require_token, values_of
from ._ffi import call, number_of
from ._groups import require_one_node, require_usable
from ._rows import instantiate, require_array, require_is_array, struct, where_in_use


def _move(group, tokens, operand, output, slices, transposed):
    """The next token, and output with what landed in it. tokens: of a backward call also the one that entered the forward. Such
    a call is always kept: nobody uses the gradient of the first token."""
    is_backward = len(tokens) > 1
    return call(
        "ragged_all_to_all_bwd" if is_backward else "ragged_all_to_all",
        [*tokens, operand, output, *slices],
        [struct(output.shape, output.dtype)],
        is_backward,
        ((len(tokens) + 1, 1),),
        group=number_of(group),
        transposed=transposed,
    )


def ragged_all_to_all(
    group, operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, token, *, transposed=False
) -> tuple[jax.Array, jax.Array]:
    """Moves slices of rows between the ranks: jax.lax.ragged_all_to_all over the axis of the group. Collective; not in a group
    of several nodes. It needs no plan, and its rows may be longer than hidden_dim.

    operand: [N, ...] of any dtype of whole bytes.  output: [M, ...] of operand's dtype and other dimensions.  input_offsets,
    send_sizes, output_offsets, recv_sizes: [K], all int32 or all int64. K is here the number of slices, a multiple of P up to
    2048, the same on all ranks. Slice i goes to rank i // (K / P): it is the send_sizes[i] rows of operand from
    input_offsets[i] on, and begins at row output_offsets[i] of that rank's output. recv_sizes[r * (K / P) + j] has the rows of
    the j-th slice from rank r to this one.  transposed: the same on all ranks; True: the rows go back, from where the four
    arrays would bring them, so operand is what that call's output is, and output what its operand is.
    Returns (output [M, ...] with the rows that landed in it, token). XLA has them written into output itself where nothing else
    uses it, and else into a copy. Where slices overlap in it, either may be what is left. A slice that the ranks disagree on,
    or that leaves operand or output, does not move, which group.check() tells on both.

    Gradients: operand has that of the rows where its slices have landed, and zeros elsewhere. Of a row that more than one slice
    has read, one gradient arrives, as with jax.lax's: they are not summed. output has that of the result, with zeros where rows
    have landed. The backward makes a call for each of the two that is differentiated, so all ranks differentiate the same ones.
    That for output moves a byte for each row of operand, since a rank does not know what its peers' output_offsets are; an
    output that is constant, as jnp.zeros is, needs none.
    """
    require_usable(group, by_expert=False)
    require_token(token)
    require_one_node(group, "ragged calls")
    arrays = operand, output, input_offsets, send_sizes, output_offsets, recv_sizes
    for name, array in zip(("operand", "output", *OFFSETS), arrays):
        require_is_array(name, array)
    operand, output, *slices = map(jnp.asarray, arrays)
    require_rows_alike(operand, output)
    if jax.dtypes.itemsize_bits(operand.dtype) % 8:
        refuse(f"operand is {operand.dtype}; its elements must have whole bytes")
    require_array(OFFSETS[0], slices[0], (None,), INDEX_DTYPES)
    for name, array in zip(OFFSETS[1:], slices[1:]):
        require_array(name, array, slices[0].shape, (slices[0].dtype,))
    require_num_slices(len(slices[0]), group.num_ranks)
    boolean("transposed", transposed)
    sent, received = struct(operand.shape, operand.dtype), struct(output.shape, output.dtype)

    @jax.custom_vjp
    def run(token, operand, output, *slices):
        return tuple(_move(group, [token], operand, output, slices, transposed))

    def forward(token, operand, output, *slices):
        values = values_of([token, operand, output, *slices])
        # The keys of a dict are no arrays, as JAX would make of what else the backward is told.
        differentiated = {name: None for name, each in (("operand", operand), ("output", output)) if each.perturbed}
        return run(*values), (token.value, values[3:], differentiated)

    def backward(residuals, cotangents):
        token, slices, differentiated = residuals
        require_cotangent_of_token("ragged_all_to_all", cotangents[0])
        next_token, grad = map(instantiate, cotangents)
        grad_operand = grad_output = None
        if "operand" in differentiated:
            zeros = jnp.zeros(sent.shape, sent.dtype)
            next_token, grad_operand = _move(group, [next_token, token], grad, zeros, slices, not transposed)
        if "output" in differentiated:
            ones, zeros = jnp.ones((sent.shape[0], 1), jnp.uint8), jnp.zeros((received.shape[0], 1), jnp.uint8)
            next_token, landed = _move(group, [next_token, token], ones, zeros, slices, transposed)
            grad_output = where_in_use(landed[:, 0] == 0, grad)
        return next_token, grad_operand, grad_output, None, None, None, None

    run.defvjp(forward, backward, symbolic_zeros=True)
    token, output = run(token, operand, output, *slices)
    return output, token


__all__ = ["ragged_all_to_all"]
