# SPDX-License-Identifier: Apache-2.0
"""Sidecars: bytes that travel with each token, which the operators take and return as uint8. They have no gradient."""

import torch

from .._values import require_sidecar
from ._group import require_usable


def as_bytes(group, sidecar, tokens):
    """A sidecar [T, S] of any dtype as its bytes; None for none."""
    if sidecar is None:
        return None
    require_usable(group, "sidecar", sidecar)
    # PyTorch's dtypes all have whole bytes.
    require_sidecar(sidecar.shape, sidecar.dtype, 8 * sidecar.element_size(), tokens.shape[0], group.max_sidecar_bytes)
    return sidecar.detach().view(torch.uint8)
