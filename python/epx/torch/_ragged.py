# SPDX-License-Identifier: Apache-2.0
"""The ragged all-to-all with gradients.

Symbols in shapes: those of epx.group. K is here the number of slices.
"""

import torch
from torch.autograd.graph import increment_version

from .._slices import OFFSETS, require_rows_alike
from .._values import boolean, refuse, require_kind
from ._derivatives import differentiable_once
from ._group import Group, call, require_usable
from ._library import new_tensor, ops
from ._ops import _records, _refuse_transforms, _require_writable

_move, _move_into = ops.ragged_all_to_all.default, ops.ragged_all_to_all_into.default


@torch.library.register_fake("epx::ragged_all_to_all")
def _(group, operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, transposed):
    return new_tensor(output, *output.shape)


@torch.library.register_fake("epx::ragged_all_to_all_into")
def _(group, operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, transposed):
    return None


def _run(number, operand, output, in_place, transposed, *slices):
    if not in_place:
        return call(number, _move, number, operand, output, *slices, transposed)
    call(number, _move_into, number, operand, output, *slices, transposed)
    return output


class _RaggedAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, number, operand, output, in_place, transposed, *slices):
        ctx.call = number, operand.shape, output.shape[0], transposed
        ctx.save_for_backward(*slices)
        if in_place:
            ctx.mark_dirty(output)
        return _run(number, operand, output, in_place, transposed, *slices)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        # All ranks make the same calls: they depend on what requires a gradient, not on who used what came of it.
        number, shape, num_received, transposed = ctx.call
        slices = ctx.saved_tensors
        _refuse_transforms(grad)
        grad_operand = grad_output = None
        in_place = not torch.compiler.is_compiling()
        if ctx.needs_input_grad[1]:
            grad_operand = _run(number, grad.contiguous(), grad.new_zeros(shape), in_place, not transposed, *slices)
        if ctx.needs_input_grad[2]:
            ones = grad.new_ones(shape[0], 1, dtype=torch.uint8)
            zeros = grad.new_zeros(num_received, 1, dtype=torch.uint8)
            landed = _run(number, ones, zeros, in_place, transposed, *slices)
            grad_output = grad.masked_fill(landed.view(-1, *[1] * (grad.dim() - 1)).bool(), 0)
        return None, grad_operand, grad_output, None, None, *4 * [None]


def ragged_all_to_all(
    group: Group,
    operand: torch.Tensor,
    output: torch.Tensor,
    input_offsets: torch.Tensor,
    send_sizes: torch.Tensor,
    output_offsets: torch.Tensor,
    recv_sizes: torch.Tensor,
    *,
    transposed: bool = False,
    in_place: bool = False,
) -> torch.Tensor:
    """Moves slices of rows between the ranks, as jax.lax.ragged_all_to_all does. Collective, and so is its backward; not in a
    group of several nodes. It needs no plan, and its rows may be longer than hidden_dim.

    operand: [N, ...] of any dtype.  output: [M, ...] of operand's dtype and other dimensions.  input_offsets, send_sizes,
    output_offsets, recv_sizes: [K], all int32 or all int64. K is a multiple of P up to 2048, the same on all ranks. Slice i
    goes to rank i // (K / P): it is the send_sizes[i] rows of operand from input_offsets[i] on, and begins at row
    output_offsets[i] of that rank's output. recv_sizes[r * (K / P) + j] has the rows of the j-th slice from rank r to this one.
    transposed: the same on all ranks; True: the rows go back, from where the four tensors would bring them, so operand is what
    that call's output is, and output what its operand is.
    in_place: whether rows are written into output itself, which lies in memory from group.empty() for instance; it requires no
    gradient, which the tensor that is returned has in its stead. Not under torch.compile.
    Returns output, or a copy of it, with the rows that landed. Where slices overlap in it, either may be what is left. A slice
    that the ranks disagree on, or that leaves operand or output, does not move, which group.check() tells on both.

    Gradients: operand has that of the rows where its slices have landed, and zeros elsewhere. Of a row that more than one slice
    has read, one gradient arrives: they are not summed. output has that of the result, with zeros where rows have landed. The
    backward makes a call for each of the two that requires a gradient, so the same ones do on all ranks. That for output moves
    a byte for each row of operand.
    """
    require_kind("group", group, Group)
    slices = input_offsets, send_sizes, output_offsets, recv_sizes
    for name, tensor in zip(("operand", "output", *OFFSETS), (operand, output, *slices)):
        require_usable(group, name, tensor)
    require_rows_alike(operand, output)
    boolean("transposed", transposed)
    if boolean("in_place", in_place):
        if torch.compiler.is_compiling():
            refuse("in_place is not supported under torch.compile, which cannot order operators that write")
        _require_writable(group, "output", output)
    if _records(operand, output):
        written = output.detach() if in_place else output  # so the caller's own tensor gets no history
        return _RaggedAllToAll.apply(group.number, operand, written, in_place, transposed, *slices)
    moved = _run(group.number, operand, output, in_place, transposed, *slices)
    if in_place:
        increment_version(output)  # a tensor that was saved for a backward may have shared its memory
    return moved


__all__ = ["ragged_all_to_all"]
