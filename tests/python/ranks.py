# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package share: skipping, ranks under epx_test_launch, ranks as child processes, and workloads.

A rank's data follows from its number, so that each rank can compute what all of them should get. With EPX_TEST_DEVICE=cuda
ranks have a GPU each; ranks of several nodes (epx_test_launch --ranks-per-node) share GPUs where there are too few.
"""

import ctypes
import importlib
import os
import pkgutil
import subprocess
import sys
import threading
import unittest

SKIPPED = 77
TIMEOUT_SECONDS = 60


def require(*modules, installer="install_python_test_packages"):
    """Imports the modules, or ends this process as skipped and says so."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
            print(f"skipped: Python {sys.version.split()[0]} has no module {name} (tools/lib.sh, {installer})")
            sys.exit(SKIPPED)


def rank():
    return int(os.environ.get("EPX_TEST_RANK", "0"))


def num_ranks():
    return int(os.environ.get("EPX_TEST_RANKS", "1"))


def on_gpu():
    return os.environ.get("EPX_TEST_DEVICE") == "cuda"


def ranks_per_node():
    """Ranks of a node as epx_test_launch --ranks-per-node says, else all."""
    return min(int(os.environ.get("EPX_TEST_RANKS_PER_NODE", num_ranks())), num_ranks())


def num_nodes():
    """Nodes of a group of all ranks. The host transport's are on one."""
    return num_ranks() // ranks_per_node() if on_gpu() else 1


def skip_over_nodes(test):
    """Skips a test of rank-major calls, which groups of several nodes refuse."""
    return unittest.skipIf(num_nodes() > 1, "rank-major calls need a group of one node")(test)


def num_gpus():
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def shares_gpu():
    """Whether ranks of several nodes share GPUs."""
    return on_gpu() and num_gpus() < num_ranks()


def require_jax_on_gpus(count):
    """Ends this process as skipped where there are fewer GPUs, or JAX has no plugin for them. It does not import JAX."""
    if num_gpus() < count:
        print(f"skipped: {count} ranks need a GPU each; this machine has {num_gpus()}")
        sys.exit(SKIPPED)
    try:
        plugins = [module.name for module in pkgutil.iter_modules(importlib.import_module("jax_plugins").__path__)]
    except ModuleNotFoundError:
        plugins = []
    if not any(name.startswith("xla_cuda") for name in plugins):
        print("skipped: JAX has no plugin for CUDA")
        sys.exit(SKIPPED)


def gpu():
    """CUDA's number of this rank's GPU. Ends this process as skipped where the ranks of a node are more than the GPUs."""
    count, needed = num_gpus(), ranks_per_node()
    if count < needed:
        print(f"skipped: {needed} ranks need a GPU each; this machine has {count}")
        sys.exit(SKIPPED)
    return rank() % (needed if count < num_ranks() else num_ranks())


def peer_environment():
    """What a child needs that makes a group with the process that starts it: on GPUs it is of another node, and shares the
    GPU."""
    if not on_gpu():
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus())))
    device = visible.split(",")[gpu()]
    return {"NCCL_HOSTID": "peer", "CUDA_VISIBLE_DEVICES": device, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **ALONE}


ALONE = {"EPX_TEST_RANKS": "1", "EPX_TEST_RANK": "0"}


def directory_bootstrap(name):
    import epx

    if num_ranks() == 1:
        return epx.bootstrap.local()
    return epx.bootstrap.from_directory(os.environ["EPX_TEST_DIR"], name, rank(), num_ranks(), TIMEOUT_SECONDS)


def start(script, *arguments, environment=None):
    """Starts this interpreter on a script of the tests, with both outputs in one pipe."""
    return subprocess.Popen(
        [sys.executable, "-B", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def finish(process, timeout=60):
    """Waits for a child. Returns its exit status and what it printed."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += "\n[killed by the test after its time limit]"
    return process.returncode, output


def at_once(*functions):
    """Calls each in a thread of its own. Returns their results."""
    results = [None] * len(functions)

    def run(i):
        results[i] = functions[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def refused(test, words, call):
    """Checks that a call is refused with a sentence that has these words. Returns the exception."""
    import epx

    with test.assertRaises(epx.InvalidArgumentError, msg=words) as caught:
        call()
    test.assertIn(words, str(caught.exception))
    return caught.exception


def main():
    """Runs the tests of the calling module in the order of their names, which is the same on all ranks."""
    unittest.main(module="__main__", verbosity=2 if rank() == 0 else 0, failfast=True)
