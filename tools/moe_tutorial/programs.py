# SPDX-License-Identifier: Apache-2.0
"""Starts the measured programs, each rank a process of its own, and reads what they report."""
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
NATIVE = ROOT / "examples" / "native"
PROGRAMS = ("ep_bench", "torch", "jax-usual", "jax-best")


class Failed(Exception):
    """A program that could not run, or did not finish; the sentence says why."""


@functools.cache  # an import takes seconds
def missing_package(module):
    """Returns why Python cannot import a package, or nothing."""
    found = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False, cwd="/")
    return f"{sys.executable} has no package {module}" if found.returncode else None


def run_ranks(name, commands, environments, directory, limit_s):
    """Runs one process for each command to its end; kills them all when one fails or the time is up."""
    logs = [directory / f"{name}.{rank}.log" for rank in range(len(commands))]
    processes = []
    try:
        for command, environment, log in zip(commands, environments, logs):
            with open(log, "w", encoding="utf-8") as output:
                processes.append(subprocess.Popen(list(map(str, command)), stdout=output, stderr=subprocess.STDOUT,
                                                  stdin=subprocess.DEVNULL, env={**os.environ, **environment},
                                                  start_new_session=True))
        deadline = time.monotonic() + limit_s
        while any(process.poll() is None for process in processes):
            failed = next((rank for rank, process in enumerate(processes) if process.poll()), None)
            if failed is not None:
                time.sleep(2)  # the others may have a better sentence
                break
            if time.monotonic() > deadline:
                raise Failed(f"{name} did not finish within {limit_s} s")
            time.sleep(0.05)
        for process, log in zip(processes, logs):
            if process.poll() not in (0, None):
                lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
                raise Failed(f"{name} ended with status {process.returncode}: {lines[-1]}")
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: only this process and its children
            process.wait()


class Runner:
    """Runs each program on a case. On CPUs the results are right and the times mean nothing."""

    def __init__(self, arguments, directory):
        self.ranks, self.ep_bench, self.cpu = arguments.ranks, arguments.ep_bench, arguments.cpu
        self.iters, self.pause_ms, self.limit_s = arguments.iters, 0 if arguments.cpu else arguments.pause_ms, arguments.limit_s
        self.directory = directory

    def missing(self, program):
        """Returns why a program cannot run, or nothing."""
        module = {"ep_bench": None, "torch": "torch"}.get(program, "jax")
        return module and missing_package(module)

    def run(self, program, case, name, dump=None, timed=True):
        """Returns the JSON that the program writes."""
        output = self.directory / f"{name}.json"
        output.unlink(missing_ok=True)
        start = self.ep_bench_start if program == "ep_bench" else self.torch_start if program == "torch" else self.jax_start
        commands, environments = start(program, case, output, dump, timed)
        run_ranks(name, commands, environments, self.directory, self.limit_s)
        return json.loads(output.read_text(encoding="utf-8"))

    def ep_bench_start(self, _program, case, output, dump, timed):
        rendezvous = self.directory / "rendezvous"
        rendezvous.mkdir(mode=0o700, exist_ok=True)
        command = [self.ep_bench, "--bootstrap", f"file:{rendezvous}", "--ranks", self.ranks, *case.options, "--block",
                   "--input-sets", 1, "--json", output, "--iters", self.iters if timed else 1]
        command += ["--transport", "host", "--dtype", "fp32"] if self.cpu else ["--transport", "nccl", "--dtype", "bf16"]
        if timed and not self.cpu:
            command += ["--floor", "--pause-ms", self.pause_ms] + (["--graph"] if case.tokens <= 256 else [])
        if dump:
            command += ["--dump", dump, "--verify"]
        return [[*command, "--rank", rank] for rank in range(self.ranks)], [{}] * self.ranks

    def native_options(self, case, output, dump, timed):
        options = [*case.options, "--json", output, "--iters", self.iters if timed else 0]
        return options + (["--pause-ms", self.pause_ms] if timed else []) + (["--dump", dump] if dump else [])

    def torch_start(self, _program, case, output, dump, timed):
        store = self.directory / "torch.store"
        store.unlink(missing_ok=True)
        command = [sys.executable, "-B", NATIVE / "moe_torch.py", "--store", store, "--device", "cpu" if self.cpu else "cuda",
                   *self.native_options(case, output, dump, timed)]
        return [command] * self.ranks, [{"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(self.ranks)}
                                        for rank in range(self.ranks)]

    def jax_start(self, program, case, output, dump, timed):
        command = [sys.executable, "-B", NATIVE / "moe_jax.py", "--ranks", self.ranks,
                   "--variant", program.removeprefix("jax-"), "--exchange", "gather" if self.cpu else "ragged", *self.native_options(case, output, dump, timed)]
        on_cpu = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={self.ranks}"}
        # XLA takes its memory at the start; the padded batch of a skewed routing needs nearly all of it.
        return [command], [on_cpu if self.cpu else {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}]


def machine(cpu):
    """Returns what the tables say about where they were measured."""
    if cpu:
        return {"device": "CPUs", "driver": None}
    query = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True,
                           text=True, check=True)
    name, _, driver = query.stdout.splitlines()[0].partition(", ")
    return {"device": name, "driver": driver}
