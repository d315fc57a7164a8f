# SPDX-License-Identifier: Apache-2.0
"""epx for PyTorch: prepare, dispatch and combine with gradients, an MoE layer, and groups of torch.distributed.

group = epx.torch.Group(num_experts=8, ...)        # the ranks of torch.distributed's default group
layer = epx.torch.MoELayer(group, router=epx.moe.Router(top_k=2), ffn=epx.moe.Ffn(hidden_dim=512, ffn_dim=1024))
out = layer(tokens)                                 # on the current stream; out.backward() exchanges the gradients

Calls are collective: all ranks of a group make the same ones in the same order, backward too. Under torch.compile they have an
effect, so that they stay in the order of the program on every rank.
"""

from . import _group, _layer, _means, _ops, _ragged, _rank_major
from ._group import *
from ._layer import *
from ._means import *
from ._ops import *
from ._ragged import *
from ._rank_major import *

# What is public, each module says beside it.
__all__ = []
__all__ += _group.__all__
__all__ += _layer.__all__
__all__ += _means.__all__
__all__ += _ops.__all__
__all__ += _ragged.__all__
__all__ += _rank_major.__all__
