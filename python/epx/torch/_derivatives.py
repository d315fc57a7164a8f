# SPDX-License-Identifier: Apache-2.0
"""Backwards of autograd.Function that have no derivatives of their own."""

import functools

import torch

from .._structs import Status
from ..errors import UnsupportedError


class _Final(torch.autograd.Function):
    """Gradients that are used, and not differentiated again."""

    @staticmethod
    def forward(ctx, *grads):
        return tuple([None if grad is None else grad.detach() for grad in grads])

    @staticmethod
    def backward(ctx, *_):
        raise UnsupportedError(
            "second derivatives of epx's operations are not supported: a gradient that was computed with create_graph=True is "
            "differentiated again",
            Status.UNSUPPORTED,
        )


def differentiable_once(backward):
    """A backward whose gradients raise when they are differentiated. PyTorch's once_differentiable has a sentence of its own,
    and says nothing where the gradient that arrives requires none, as that of a sum: the second derivative would then lack what
    flows through saved tensors."""

    @functools.wraps(backward)
    def once(ctx, *grads):
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grads)  # of compiled graphs PyTorch itself refuses second derivatives
        with torch.no_grad():
            found = backward(ctx, *grads)
        is_tuple = isinstance(found, tuple)
        # They require a gradient, so that autograd records the function that raises.
        leaves = [None if grad is None else grad.detach().requires_grad_() for grad in (found if is_tuple else (found,))]
        final = _Final.apply(*leaves)
        return final if is_tuple else final[0]

    return once
