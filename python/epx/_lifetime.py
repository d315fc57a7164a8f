# SPDX-License-Identifier: Apache-2.0
"""When groups, and the memory of blocks and arenas, are freed.

destroy() and the end of the interpreter destroy a group at once; that may wait for what is under way on a GPU, for up to
timeout_ms, and ends a call that another thread is in. Calls of JAX and PyTorch may end first, unless the interpreter ends. A
finalizer runs at any time and on any thread, so it never waits: it leaves the group to the next creation, destroy() or the end
of the interpreter. So it is with a block or an arena, of which it frees what is this rank's own: what
peers reach is the group's, and is freed with it. A healthy group is aborted only when an exception ends the interpreter, so
that its peers learn of it at once instead of waiting for a rank that is gone.
"""

import atexit
import contextlib
import os
import sys
import threading
import weakref

from . import _interrupt, _structs

_lock = threading.Lock()
_abandoned = []  # handles of objects that nobody refers to any more
_living = weakref.WeakSet()


class Handle:
    """An epx_group. `users` are functions that end a use of it, as by compiled programs: each returns whether it has ended."""

    def __init__(self, value):
        self.value = value
        self.users = []

    def destroy(self):
        """Ends the calls that other threads are in."""
        value, self.value = self.value, None
        if value is not None:
            _structs.epx_group_destroy(value)
            self.is_idle()  # by now; the users forget the group
            _interrupt.reraise()

    def is_idle(self):
        return all([end() for end in self.users])


class LocalMemory:
    """An epx_moe_block or epx_moe_arena, whose own memory `free` frees without its peers. is_idle() tells whether no
    computation uses it any more; what it `needs` lives as long."""

    def __init__(self, value, free, is_idle=lambda: True, needs=None):
        self.value, self._free, self.is_idle, self.needs = value, free, is_idle, needs

    def take(self):
        """Returns the object, which the caller frees; a second time, None."""
        value, self.value = self.value, None
        return value

    def destroy(self):
        value = self.take()
        if value is not None:
            self._free(value)
        self.needs = None


class Unique:
    """What all ranks create together, or what holds an object of C, so that there is no copy of it."""

    def __reduce_ex__(self, _protocol):
        kind = type(self).__name__
        raise TypeError(f"{kind} cannot be copied or pickled, since it holds an object of C, or all ranks create it together")


def finalize(owner, memory):
    """Has the memory abandoned when nobody refers to its owner any more. Returns the finalizer."""
    finalizer = weakref.finalize(owner, abandon, memory)
    finalizer.atexit = False
    return finalizer


def abandon(handle):
    """Called by finalizers. Appending to a list needs no lock, which the thread that is interrupted may hold."""
    _abandoned.append(handle)


def destroy_abandoned():
    """Destroys what finalizers have left, but for what a computation still uses."""
    _destroy_abandoned_if(lambda handle: handle.is_idle())


def keep(group):
    """Has the end of the interpreter destroy the group, if nothing did so before."""
    _living.add(group)


def _exception_ends_interpreter():
    # The interpreter sets it when it prints an exception that nobody caught; interactively it lives on after that.
    interactive = hasattr(sys, "ps1") or sys.flags.interactive
    return getattr(sys, "last_value", None) is not None and not interactive


def _destroy_abandoned_if(may_destroy):
    with _lock:
        handles = [_abandoned.pop() for _ in range(len(_abandoned))]
    with contextlib.ExitStack() as stack:  # Ctrl-C ends the wait of one of them, and the others are destroyed all the same
        for handle in handles:
            stack.callback(handle.destroy if may_destroy(handle) else lambda handle=handle: abandon(handle))


@atexit.register
def _at_exit():
    failed = _exception_ends_interpreter()
    # The process's own memory ends with it; freeing that of a GPU would wait for whatever runs there.
    _abandoned[:] = [handle for handle in _abandoned if isinstance(handle, Handle)]
    with contextlib.ExitStack() as stack:
        stack.callback(_interrupt.stop_listening)
        stack.callback(_destroy_abandoned_if, lambda _: True)  # a computation that uses one would outlive the interpreter
        for group in list(_living):
            if group.process != os.getpid():
                continue  # that of the parent, whose child of fork() this is
            if failed and not group.is_destroyed:
                group.abort()
            stack.callback(group.destroy)
