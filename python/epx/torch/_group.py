# SPDX-License-Identifier: Apache-2.0
"""Groups whose operations take tensors of PyTorch."""

import collections
import contextlib
import datetime
import itertools
import math

import torch

from .. import _interrupt, _structs, bootstrap
from .._group_base import GroupBase
from .._structs import Status, Transport
from .._values import member, refuse, refuse_strides, require_kind
from ..bootstrap import Bootstrap
from ..errors import Error, GroupError, last_sentence, raise_call_failed, raise_if_failed
from ..group import Group as _Group, Load
from ._library import groups, lib, ops

_names = collections.defaultdict(itertools.count)  # by process group, which has one name on all of its ranks
_stale_keys = collections.defaultdict(list)  # likewise


def from_process_group(process_group: "torch.distributed.ProcessGroup | None" = None, name: str | None = None) -> Bootstrap:
    """An epx.bootstrap.Bootstrap of the ranks of a torch.distributed process group, by default the default one.

    Records travel through the group's store; no collective of its backend is called. `name` is the same on all ranks and has
    not been used before; without it the bootstraps of a process group are numbered, so all its ranks make them in the same
    order.
    """
    from torch.distributed import distributed_c10d

    process_group = distributed_c10d._get_default_group() if process_group is None else process_group
    rank, num_ranks = torch.distributed.get_rank(process_group), torch.distributed.get_world_size(process_group)
    if rank < 0:
        refuse("this process is no rank of the process group")
    # PyTorch has no public name for the store of a group, which gives each group a prefix of its own.
    store = distributed_c10d._get_process_group_store(process_group)
    prefix = f"epx/{next(_names[process_group.group_name]) if name is None else name}"

    def get(key, seconds):
        if seconds > 0:
            with contextlib.suppress(Exception):  # DistStoreError, or a RuntimeError that tells of a timeout
                store.wait([key], datetime.timedelta(seconds=seconds))
        return store.get(key) if store.check([key]) else None  # which raises where the store cannot be reached

    stale = _stale_keys[process_group.group_name]
    return bootstrap.from_store(rank, num_ranks, prefix, stale, put=store.set, get=get, delete=store.delete_key)


class OutOfMemoryError(Error, torch.OutOfMemoryError):
    """There is not enough memory for what a call needs. Where PyTorch could not allocate what the call returns, the call has
    not taken part."""


def _find_device(device, transport):
    """The transport of a group, and the index of its GPU: -1 on the host."""
    on_gpu = torch.cuda.is_available() and transport != Transport.HOST
    if device is None:
        return transport, torch.cuda.current_device() if on_gpu else -1
    device = torch.device(device)
    if device.type == "cpu" and transport != Transport.NCCL:
        return Transport.HOST, -1
    if device.type == "cuda" and on_gpu:
        return transport, torch.cuda.current_device() if device.index is None else device.index
    if device.type == "cuda" and not torch.cuda.is_available():
        refuse(f"device is {device}, and PyTorch finds no GPU of CUDA")
    refuse(f"device is {device} and transport {transport.name.lower()!r}: cpu has transport 'host', and cuda has 'nccl'")


class Group(GroupBase):
    """A group whose calls take tensors of PyTorch: on the CPU with the host transport, on this rank's GPU with NCCL's.

    where: a process group of torch.distributed (None: the default one), or an epx.bootstrap.Bootstrap. device: the GPU, by
    default the current one, or "cpu" for the host transport. config: that of epx.Group, which this group has one of.
    """

    def __init__(self, where=None, *, device=None, **config):
        config["transport"], index = _find_device(device, member(Transport, config.get("transport", "auto"), "transport"))
        on_gpu = index >= 0
        with torch.cuda.device(index) if on_gpu else contextlib.nullcontext():
            if isinstance(where, Bootstrap):
                self._group = _Group(where, **config)
            else:
                with from_process_group(where) as made:
                    self._group = _Group(made, **config)
        self._info, self._max_sidecar_bytes = self._group._info, self._group.max_sidecar_bytes
        is_cuda = self.transport == Transport.NCCL
        self.device = torch.device("cuda", index) if is_cuda else torch.device("cpu")
        number = lib.epx_torch_register_group(self.handle, index if is_cuda else -1)
        if number == 0:
            refuse(last_sentence())
        self.number = number  # in torch.ops.epx
        self._group.add_user(lambda: lib.epx_torch_retire_group(number) == 1)
        groups[number] = self
        self._windows = set()  # addresses of empty()
        self.max_call_tokens = config.get("fixed_rail_tokens", 0) or self.max_tokens_per_rank  # that any node takes
        self.mean_routes = None  # of _means, when a layer needs them

    @property
    def handle(self) -> int:
        """The epx_group, as an integer."""
        return self._group.handle

    @property
    def is_destroyed(self) -> bool:
        """Whether destroy() has been called."""
        return self._group.is_destroyed

    def destroy(self) -> None:
        """Frees the group, as epx.Group.destroy() does."""
        self._group.destroy()

    def abort(self) -> None:
        """Ends the group, as epx.Group.abort() does."""
        self._group.abort()

    def check(self) -> None:
        """Raises GroupError or EventError, as epx.Group.check() does."""
        self._group.check()

    def handle_mem_size(self, top_k: int, alignment: int = 1) -> int:
        """Bytes of the handle memory of such a layer."""
        return self._group.handle_mem_size(top_k, alignment)

    def load_of_counts(self, global_counts: torch.Tensor, top_k: int, *, alignment: int = 1, zone_stride: int = 0) -> Load:
        """What a prepare drops, as epx.Group.load_of_counts() tells it. The host waits for the counts where they are on a GPU."""
        counts = global_counts.cpu().numpy()
        return self._group.load_of_counts(counts, top_k, alignment=alignment, zone_stride=zone_stride)

    def empty(self, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor in memory that peers reach, in which dispatch writes rows in place. Collective: all ranks
        call with sizes of the same bytes. free() frees it, or the end of the group, which waits until no tensor of it lives."""
        sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        is_valid = all(hasattr(size, "__index__") and size >= 0 for size in sizes)
        count = math.prod(sizes) * dtype.itemsize
        if not is_valid or count > _MAX_BYTES:
            refuse(f"sizes are {sizes} of {dtype}: they must be integers, at least 0, of at most {_MAX_BYTES} bytes together")
        address = _structs.c_void_p()
        status = _mem_alloc(self.handle, max(count, 1), address)
        if status:
            raise _failure_of(self, status, "")
        tensor = call(self.number, ops.wrap.default, self.number, address.value, list(sizes), dtype)
        self._windows.add(address.value)
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Frees the memory of a tensor of empty(), which nobody uses any more. Collective, in the same order on all ranks."""
        handle, address = self.handle, tensor.data_ptr()
        if address not in self._windows:
            refuse("the tensor does not begin memory from empty() of this group")
        # The tensor holds its storage, and so does the object that is asked for it here.
        if torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2:
            refuse("the tensor has views, or copies that share its memory: delete them first")
        self._windows.remove(address)
        tensor.set_(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
        status = _mem_free(handle, address)
        if status:
            raise_call_failed(handle, status)


_MAX_BYTES = 2**63 - 1
_mem_alloc = _structs._declare(
    _structs.libepx, "epx_mem_alloc", _structs.c_int32, _structs.GROUP, _structs.c_size_t, _structs.POINTER(_structs.c_void_p)
)
_mem_free = _structs._declare(_structs.libepx, "epx_mem_free", _structs.c_int32, _structs.GROUP, _structs.c_void_p)


def _failure_of(group, status, sentence):
    """The package's exception for this status. `sentence` is that of a group which is there no more."""
    try:
        if group is None or group.is_destroyed:
            raise_if_failed(status, lambda: sentence)
        raise_call_failed(group.handle, status)
    except GroupError as failure:
        return failure
    except Error as failure:
        return OutOfMemoryError(str(failure), failure.status) if status == Status.OUT_OF_MEMORY else failure


def _as_failure(number, error):
    """The package's exception for a RuntimeError of an operator of this group, or the error itself where it is not epx's: then
    the last failure may be that of an operator in a compiled graph, which nobody has asked for."""
    status = lib.epx_torch_take_failure()
    if status == Status.SUCCESS or last_sentence() not in str(error):
        return error
    return _failure_of(groups.get(number), status, str(error))


def call(number, op, *args):
    """Calls an operator, with the package's exceptions for its failures."""
    try:
        result = op(*args)
    except RuntimeError as error:
        raise _as_failure(number, error) from None
    _interrupt.reraise()
    return result


def require_usable(group, name, tensor):
    """Refuses a tensor of other strides, which the operators copy since torch.compile needs that, and one without memory, for
    which PyTorch would call the fake kernels."""
    require_kind(name, tensor, torch.Tensor)
    if not tensor.is_contiguous():
        refuse_strides(name, tensor.stride(), tensor.shape)
    if tensor.is_meta:
        refuse(f"{name} is on meta; the tensors of this group are on {group.device}")


__all__ = ["Group", "OutOfMemoryError", "from_process_group"]
