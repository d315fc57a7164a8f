# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a call of C waits for other ranks.

Python's signal handlers run in the main thread, between instructions of Python. So the waits of that thread call back into the
interpreter now and then (epx_set_interrupt_check): a handler that is due runs there, and what it raises ends the call. The
exception is raised again where the call returns. A handler that raises nothing disturbs no call.
"""

import ctypes
import threading

from . import _structs

_raised = []  # by handlers, during the call in progress
_callbacks = []  # ctypes needs them to live


def _checks():
    """Tells the waiting call, at each step, whether a handler has raised. Handlers run where the generator resumes, which is
    inside the try: at the beginning of a function they would run before it."""
    has_raised = 0
    while True:
        try:
            yield has_raised
            has_raised = 0
        except GeneratorExit:
            return
        except BaseException as error:
            _raised.append(error)
            has_raised = 1


def listen():
    """Called when the package is imported, and before a wait. Does nothing outside of the main thread, and a second time."""
    if _callbacks or threading.current_thread() is not threading.main_thread():
        return
    checks = _checks()
    next(checks)
    _callbacks.append(_structs.INTERRUPT_CHECK(checks.__next__))
    _structs.epx_set_interrupt_check(_callbacks[0])


def stop_listening():
    """Called when the interpreter ends."""
    if _callbacks:
        _structs.epx_set_interrupt_check(ctypes.cast(None, _structs.INTERRUPT_CHECK))


def reraise():
    """Raises what a handler has raised while the last call waited, if one has."""
    if _raised:
        error = _raised[0]
        _raised.clear()
        raise error.with_traceback(None)


listen()
