# SPDX-License-Identifier: Apache-2.0
"""Groups along an axis of a mesh, and what an operation requires of the place where it is called."""

import weakref

import jax
import numpy

from .. import bootstrap
from .._values import refuse, require_kind
from ..group import Group
from ._cuda import current

_axes = weakref.WeakKeyDictionary()  # the mesh axis of groups that make_group made


def _require_one_device():
    if jax.local_device_count() != 1:
        refuse(f"this process has {jax.local_device_count()} devices of JAX; a rank of epx is a process with one device")


def _require_no_trace():
    # Without arithmetic, for which XLA would compile a program.
    if isinstance(jax.numpy.asarray(numpy.zeros((), numpy.float32)), jax.core.Tracer):
        refuse("a group is created outside of functions that JAX traces: creating it waits for the other ranks")


def make_group(mesh, axis, *, name=None, **config) -> Group:
    """Creates the groups whose ranks are the devices along `axis` of a mesh, one for each place on the other axes, and returns
    that of this process. All processes of jax.distributed call it, each with one device. Not while tracing.

    name: see epx.bootstrap.from_jax.  config: that of epx.Group, but for color and key.
    """
    _require_one_device()
    _require_no_trace()
    if axis not in mesh.axis_names:
        refuse(f"the mesh has axes {mesh.axis_names}, and no {axis!r}")
    processes = numpy.vectorize(lambda device: device.process_index)(mesh.devices)
    place = numpy.argwhere(processes == jax.process_index())
    if len(place) != 1 or processes.size != jax.process_count():
        refuse(f"the mesh has {processes.size} devices for {jax.process_count()} processes; it must have one of each process")
    coordinates = dict(zip(mesh.axis_names, place[0].tolist()))
    key = coordinates.pop(axis)
    others = [size for other, size in mesh.shape.items() if other != axis]
    color = int(numpy.ravel_multi_index(list(coordinates.values()), others)) if others else 0
    (device,) = jax.local_devices()
    with bootstrap.from_jax(name) as ranks, current(device):
        group = Group(ranks, color=color, key=key, **config)
    _axes[group] = axis
    return group


def axis_of(group):
    """The mesh axis that a group lies along, or None where make_group did not create it."""
    return _axes.get(group)


def require_one_node(group, calls):
    if group.ranks_per_node != group.num_ranks:
        refuse(f"{group!r} has {group.num_ranks // group.ranks_per_node} nodes; {calls} need a group of one node")


def require_usable(group, by_expert=True):
    """Refuses what is no epx.Group, and calls from the wrong place: a child of fork(), several devices, a mesh that does not
    have the group, and, for calls by expert, unequal shards of experts."""
    require_kind("group", group, Group)
    group.require_process()
    _require_one_device()
    mesh = jax.sharding.get_abstract_mesh()
    manual = [] if mesh.empty else list(mesh.manual_axes)
    if not manual:
        return
    axis = axis_of(group)
    sizes = dict(mesh.shape)
    if axis is None:
        refuse(f"{group!r} is called under shard_map, but has no mesh axis: create it by epx.jax.make_group")
    if axis not in manual:
        refuse(f"{group!r} lies along mesh axis {axis!r}, which is not among the axes of this shard_map: {manual}")
    if sizes[axis] != group.num_ranks:
        refuse(f"{group!r} lies along mesh axis {axis!r}, which has {sizes[axis]} devices in this shard_map")
    if by_expert and group.num_experts % group.num_ranks:
        refuse(f"shard_map has arrays of one shape, so {group.num_ranks} ranks must divide {group.num_experts} experts")
