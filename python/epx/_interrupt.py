# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a call of C waits for other ranks.

Python's signal handlers run in the main thread, between instructions of Python. So the waits of that thread call back into the
interpreter now and then (epx_set_interrupt_check): a handler that is due runs there, and what it raises ends the call. The
exception is raised again where the call returns. A handler that raises nothing disturbs no call.
"""

import ctypes
import itertools
import threading

from . import _structs

_raised = []  # by handlers, while a call of the main thread waited
_callbacks = []  # ctypes needs them to live


def _checks():
    """Tells the waiting call, at each step, whether a handler has raised. Handlers run where the generator resumes, which is
    inside the try: at the beginning of a function they would run before it."""
    while True:
        try:
            while True:
                yield 1 if _raised else 0
        except GeneratorExit:
            return
        except BaseException as error:
            _raised.append(error)


def listen():
    """Called when the package is imported, and before a wait. Does nothing outside of the main thread, and a second time."""
    if _callbacks or threading.current_thread() is not threading.main_thread():
        return
    # Where a second handler raises while the generator keeps what the first has raised, it ends, and another one follows.
    endless = itertools.chain.from_iterable(iter(_checks, None))
    next(endless)
    _callbacks.append(_structs.INTERRUPT_CHECK(endless.__next__))
    _structs.epx_set_interrupt_check(_callbacks[0])


def stop_listening():
    """Called when the interpreter ends."""
    if _callbacks:
        _structs.epx_set_interrupt_check(ctypes.cast(None, _structs.INTERRUPT_CHECK))


def pending():
    """What a handler has raised in the call of C that this thread is in, as a wait in Python that the call makes has to know."""
    return _raised[0] if _raised and threading.current_thread() is threading.main_thread() else None


def reraise():
    """Raises what a handler has raised while the last call waited, if one has. Called where a call has returned."""
    error = pending()
    if error is not None:
        _raised.clear()
        _structs.epx_interrupted()  # where the call has not ended by it, the next one would
        raise error.with_traceback(None)


listen()
