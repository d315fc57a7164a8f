# SPDX-License-Identifier: Apache-2.0
"""Experts' weights that FSDP2 gathers in FP8: each rank quantises its shard, and codes and scales are gathered.

FSDP2 asks the local tensor of a sharded parameter for an fsdp_pre_all_gather and an fsdp_post_all_gather. Here they are
attributes of this one tensor, which needs no class of its own. So masters, optimizers and checkpoints have plain tensors.
"""

import weakref

import torch
import torch.distributed

from .._values import refuse
from ._group import call
from ._library import ops

_BLOCK = 128  # rows and columns that have one scale
_aten = torch.ops.aten


class GatheredWeights(torch.Tensor):
    """Weights [E_l, rows, columns] as forwards and backwards see them from a gathering on: `codes` of this shape, and
    `scales`. Its dtype is that of its gradient."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, codes, scales, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, scales, dtype):
        self.codes, self.scales = codes, scales

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        # FSDP2 and torch.nn.Parameter call these two, with the same sizes.
        if function in (_aten.detach.default, _aten.as_strided.default):
            return cls(args[0].codes, args[0].scales, args[0].dtype)
        refuse(f"{function} is called with an expert's weights gathered in FP8, of which there are codes and scales alone")

    def __repr__(self):
        return f"GatheredWeights({list(self.shape)}, dtype={self.dtype}, device={self.device})"


def transposes_of(parts):
    """Codes or scales of the transposes, which are the others transposed: a block of 128 x 128 has one scale either way."""
    return [part.transpose(1, 2).contiguous() for part in parts]


class _Extension:
    """The two functions of a shard, which has them as attributes. group: the number of the layer's.  dim: the sharded
    dimension, of the experts (0), the rows or the columns."""

    def __init__(self, shard, group, dim):
        self.shard = weakref.ref(shard)  # so that its memory is freed with it
        self.group, self.dim = group, dim

    def pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        codes, scales = call(self.group, ops.quantise_weights.default, self.shard(), False)
        codes = codes.view(torch.uint8)  # which each backend gathers
        if mesh.size() > 1 and self.dim == 0:
            return (codes, scales), (outer_size, None)
        # Along other dimensions FSDP2 concatenates what it has gathered by the parameter's sizes, and scales have others.
        # From a single rank it takes one tensor. So scales are gathered here.
        gathered = scales.new_empty((mesh.size(), *scales.shape))
        torch.distributed.all_gather_into_tensor(gathered.flatten(0, 1), scales, group=mesh.get_group())
        return (codes,), (outer_size, gathered)

    def post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        sizes, gathered = metadata
        codes = outputs[0].view(sizes).view(torch.float8_e4m3fn)
        if gathered is None:
            scales = outputs[1]
        else:
            scales = torch.cat(gathered.unbind(), self.dim)
            if gathered.is_cuda:
                # It was allocated on the stream where all-gathers are prepared, which may reuse its memory else.
                gathered.record_stream(torch.cuda.current_stream())
        if out is None:
            return GatheredWeights(codes, scales, param_dtype), ()
        out.codes, out.scales = codes, scales


def _sharded_dim(name, weights):
    """The dimension that FSDP2 has sharded. Refuses borders of shards that cut blocks."""
    sharded = [(size, each) for size, each in zip(weights.device_mesh.shape, weights.placements) if not each.is_replicate()]
    if len(sharded) != 1 or not sharded[0][1].is_shard():
        refuse(f"{name} has the placements {weights.placements}; those of fully_shard() alone have a gathering in FP8")
    num_shards, dim = sharded[0][0], sharded[0][1].dim
    sizes, size = list(weights.shape), weights.shape[dim]
    if dim == 0 and size % num_shards:
        refuse(
            f"{name} is {sizes}, sharded along dimension 0 over {num_shards} ranks: {size} experts are no multiple of "
            f"{num_shards}; shard another dimension (shard_placement_fn)"
        )
    if dim > 0 and size % (num_shards * _BLOCK):
        refuse(
            f"{name} is {sizes}, sharded along dimension {dim} over {num_shards} ranks: shards of {size // num_shards} cut "
            f"blocks of {_BLOCK}, which have one scale; shard another dimension (shard_placement_fn)"
        )
    return dim


def gather_in_fp8(group, **weights):
    """Has FSDP2 gather the weights, parameters by name, in FP8 from now on."""
    for name, each in weights.items():
        if not hasattr(each, "to_local"):
            refuse(f"{name} is not sharded: call gather_in_fp8() after fully_shard() and before the first forward")
    dims = {name: _sharded_dim(name, each) for name, each in weights.items()}
    for name, each in weights.items():
        with torch.no_grad():  # else it is another tensor
            shard = each.to_local()
        if shard.device != group.device:
            refuse(
                f"the shard of {name} is on {shard.device}; gathered in FP8 it must be on {group.device}, as the group is"
            )
        extension = _Extension(shard, group.number, dims[name])
        shard.fsdp_pre_all_gather = extension.pre_all_gather
        shard.fsdp_post_all_gather = extension.post_all_gather
