# SPDX-License-Identifier: Apache-2.0
"""How ranks find each other while a group is created. A bootstrap is needed only for that: close it afterwards. The end of the
interpreter closes those of directories, whose files would stay.

with epx.bootstrap.from_directory("/tmp/job", "run-1", rank, num_ranks) as bootstrap:
    group = epx.Group(bootstrap, num_experts=8, ...)
"""

import atexit
import contextlib
import ctypes
import itertools
import os
import time

from . import _interrupt, _structs
from ._lifetime import Unique
from ._structs import Status
from ._values import integer, milliseconds
from .errors import Error, raise_if_failed

DEFAULT_TIMEOUT = 300.0
_POLL_SECONDS = 0.0002
_STORE_SECONDS, _STORE_SECONDS_PER_RANK = 0.05, 0.0002  # of one look into a store: Ctrl-C is heard after it


class _PeerFailed(RuntimeError):
    """Another rank has told that it failed."""


def _raise_pending():
    """Called by waits when they have sent what this rank has to say: Ctrl-C may have ended a wait of C in this creation."""
    error = _interrupt.pending()
    if error is not None:
        raise error


class Bootstrap(Unique):
    """The ranks that create groups together. The functions of this module make one; all ranks make the same one."""

    def __init__(self, struct, release):
        self._struct = struct
        self._release = release
        self._num_users = 0  # groups that are being created
        self.error = None  # what the all-gather of the last group raised

    @property
    def rank(self) -> int:
        """This process's rank, 0 <= rank < num_ranks."""
        return self._struct.rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self._struct.num_ranks

    @property
    def struct(self) -> _structs.Bootstrap:
        """The epx_bootstrap, for calls of the C API."""
        if self._struct is None:
            raise ValueError("the bootstrap has been closed")
        return self._struct

    @contextlib.contextmanager
    def in_use(self):
        """Has the end of the interpreter leave the bootstrap open meanwhile: a thread may be in a call with it."""
        self._num_users += 1
        try:
            yield self.struct
        finally:
            self._num_users -= 1

    def close(self) -> None:
        """Releases what the bootstrap holds. Groups that were created with it live on."""
        if self._struct is not None:
            self._struct = None
            _open_directories.discard(self)
            self._release()

    def __enter__(self) -> "Bootstrap":
        return self

    def __exit__(self, *_):
        self.close()


_open_directories = set()  # also those that nobody refers to any more


@atexit.register
def _close_directories():
    for bootstrap in list(_open_directories):
        if bootstrap._num_users == 0:
            bootstrap.close()


def from_directory(directory, job_id, rank, num_ranks, timeout=DEFAULT_TIMEOUT) -> Bootstrap:
    """Ranks find each other through files below `directory`, which exists and which all of them can write to; see
    epx_bootstrap_file. Waits for all ranks, for `timeout` seconds."""
    struct = _structs.Bootstrap()
    _interrupt.listen()
    raise_if_failed(
        _structs.epx_bootstrap_file(
            os.fsencode(directory),
            job_id.encode(),
            integer("rank", rank),
            integer("num_ranks", num_ranks),
            milliseconds("timeout", timeout),
            struct,
        )
    )
    bootstrap = Bootstrap(struct, lambda: _structs.epx_bootstrap_free(struct))
    _open_directories.add(bootstrap)
    try:
        _interrupt.reraise()
    except BaseException:
        bootstrap.close()
        raise
    return bootstrap


def from_all_gather(rank, num_ranks, all_gather, release=None) -> Bootstrap:
    """Ranks find each other by a function of the caller's.

    all_gather(data: bytes, timeout: float) -> sequence of num_ranks bytes objects of the same length, in rank order. It is
    called in Group(), on all ranks, blocks for no longer than `timeout` seconds, and raises when it fails: TimeoutError when
    ranks are missing. release() is called by close().
    """
    bootstrap = None

    def callback(_context, send, recv, bytes_per_rank, timeout_ms, message, message_bytes):
        try:
            parts = list(all_gather(ctypes.string_at(send, bytes_per_rank), timeout_ms / 1000))
            if len(parts) != num_ranks or any(len(part) != bytes_per_rank for part in parts):
                raise ValueError(
                    f"the all-gather returned parts of {[len(part) for part in parts]} bytes instead of "
                    f"{num_ranks} parts of {bytes_per_rank}"
                )
            ctypes.memmove(recv, b"".join(parts), num_ranks * bytes_per_rank)
            return Status.SUCCESS
        except BaseException as error:  # must not pass through C: Group() raises it again
            bootstrap.error = error
            sentence = f"the all-gather of the bootstrap: {error}".encode()[: message_bytes - 1] + b"\0"
            ctypes.memmove(message, sentence, len(sentence))
            return Status.TIMEOUT if isinstance(error, TimeoutError) else Status.SYSTEM

    struct = _structs.Bootstrap(
        struct_size=ctypes.sizeof(_structs.Bootstrap),
        rank=integer("rank", rank),
        num_ranks=integer("num_ranks", num_ranks),
        all_gather=_structs.ALL_GATHER(callback),
    )
    bootstrap = Bootstrap(struct, release or (lambda: None))
    return bootstrap


def local() -> Bootstrap:
    """A bootstrap of one rank."""
    return from_all_gather(0, 1, lambda data, timeout: [data])


_DATA_TAG, _FAILURE_TAG = 0, 1


def from_mpi(communicator) -> Bootstrap:
    """Ranks are those of an mpi4py communicator, an intracommunicator. Collective, and so is close(): messages travel in a
    duplicate of it. MPI must not have been finalised before close()."""
    duplicate = communicator.Dup()
    rank, num_ranks = duplicate.Get_rank(), duplicate.Get_size()
    others = [peer for peer in range(num_ranks) if peer != rank]
    farewells = []  # MPI needs what has not been sent yet

    def gather(data, timeout):
        received = {peer: bytearray(len(data)) for peer in others}
        receives = {peer: duplicate.Irecv([received[peer], len(data)], source=peer, tag=_DATA_TAG) for peer in others}
        sends = [duplicate.Isend([data, len(data)], dest=peer, tag=_DATA_TAG) for peer in others]
        deadline = time.monotonic() + timeout
        while True:
            missing = [peer for peer in others if not receives[peer].Test()]
            if not missing and all([send.Test() for send in sends]):
                break
            if duplicate.Iprobe(tag=_FAILURE_TAG):
                raise _PeerFailed(duplicate.recv(tag=_FAILURE_TAG))
            _raise_pending()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no message from ranks {missing} within {timeout:g} s"
                    if missing
                    else f"ranks have not received within {timeout:g} s"
                )
            time.sleep(_POLL_SECONDS)
        return [data if peer == rank else bytes(received[peer]) for peer in range(num_ranks)]

    def all_gather(data, timeout):
        try:
            return gather(data, timeout)
        except (TimeoutError, _PeerFailed):
            raise
        except BaseException as error:  # Ctrl-C too: the others need not wait for this rank
            farewells[:] = [duplicate.isend(f"rank {rank} has failed: {error!r}", peer, _FAILURE_TAG) for peer in others]
            raise

    return from_all_gather(rank, num_ranks, all_gather, duplicate.Free)


_jax_names = itertools.count()
_jax_stale_keys = []


def from_jax(name=None) -> Bootstrap:
    """Ranks are the processes of jax.distributed, which must have been initialised; with one process that is not needed.

    Records travel through the key-value store of its coordinator. `name` is the same on all processes and has not been used
    before; without it the bootstraps of a process are numbered, so all processes make them in the same order.
    """
    from jax._src import distributed  # jax has no public name for its key-value store

    client = distributed.global_state.client
    if client is None:
        return local()

    def get(key, seconds):
        try:
            return client.blocking_key_value_get_bytes(key, max(int(seconds * 1000), 1))
        except Exception as error:  # jaxlib's, whose class has changed its name
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    return from_store(
        distributed.global_state.process_id,
        distributed.global_state.num_processes,
        f"epx/bootstrap/{next(_jax_names) if name is None else name}",
        _jax_stale_keys,
        put=client.key_value_set_bytes,
        get=get,
        delete=client.key_value_delete,
    )


def from_store(rank, num_ranks, prefix, stale, *, put, get, delete) -> Bootstrap:
    """Ranks find each other by a store that all of them reach. put(key, data: bytes), delete(key), and get(key, seconds), which
    returns the data, or None where it has not come within that time. All keys begin with `prefix`, which no other bootstrap of
    the store has. stale: a list of this rank's keys that bootstraps of the same ranks share, so that later ones delete them."""
    rounds = itertools.count()
    failure = f"{prefix}/failure"

    look_seconds = max(_STORE_SECONDS, num_ranks * _STORE_SECONDS_PER_RANK)

    def wait_for(key, deadline):
        """None at the deadline."""
        while (data := get(key, min(max(deadline - time.monotonic(), 0), look_seconds))) is None:
            if (sentence := get(failure, 0)) is not None:
                raise _PeerFailed(sentence.decode())
            _raise_pending()
            if time.monotonic() > deadline:
                break
        return data

    def all_gather(data, timeout):
        number = next(rounds)
        own = f"{prefix}/{number}/{rank}"
        deadline = time.monotonic() + timeout
        try:
            put(own, data)
            parts = [wait_for(f"{prefix}/{number}/{peer}", deadline) for peer in range(num_ranks)]
        except _PeerFailed:
            raise
        except BaseException as error:  # Ctrl-C too: the others need not wait for this rank
            with contextlib.suppress(Exception):  # a store may refuse a second one
                put(failure, f"rank {rank} has failed: {error!r}".encode())
            raise
        if missing := [peer for peer, part in enumerate(parts) if part is None]:
            raise TimeoutError(f"ranks {missing} have not come within {timeout:g} s")
        # Who has come to this round has read what all wrote in the ones before.
        for key in stale:
            delete(key)
        stale[:] = [own]
        return parts

    return from_all_gather(rank, num_ranks, all_gather)


def reraise(bootstrap, error):
    """Raises what an all-gather in Python raised, or `error` with it as its cause."""
    cause, bootstrap.error = bootstrap.error, None
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    raise error from cause


__all__ = ["Bootstrap", "Error", "from_all_gather", "from_directory", "from_jax", "from_mpi", "local"]
