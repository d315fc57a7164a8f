# SPDX-License-Identifier: Apache-2.0
"""The measured programs: how each is started on a case, and what the run and the machine were."""
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

from sessions import Failed, Session, run_in_turns

ROOT = pathlib.Path(__file__).resolve().parents[2]
NATIVE = ROOT / "examples" / "native"
PROGRAMS = ("ep_bench", "torch", "jax-best", "jax-usual")
DUMPED_ROWS = 64  # of each tensor, where outputs at the timed shape are compared


def missing(program):
    """Returns why a program cannot run, or nothing. The package is not imported, which takes seconds."""
    module = {"ep_bench": None, "torch": "torch"}.get(program, "jax")
    return f"{sys.executable} has no package {module}" if module and importlib.util.find_spec(module) is None else None


class Runner:
    """Runs programs on a case. On CPUs the results are right and the times mean nothing."""

    def __init__(self, arguments, directory):
        self.ranks, self.ep_bench, self.cpu = arguments.ranks, arguments.ep_bench, arguments.cpu
        self.iters, self.rounds = arguments.iters, arguments.rounds
        self.pause_ms, self.limit_s = 0 if arguments.cpu else arguments.pause_ms, arguments.limit_s
        self.directory = directory

    def run(self, chosen, case, dump, timed=True):
        """Runs all programs on the case, in turns. Each dumps its outputs: all where nothing is timed, else rows of them.
        Returns {program: the JSON that it wrote, or {"failed": why}}."""
        results = {}
        for program in chosen:
            reason = missing(program)
            if reason:
                results[program] = {"failed": reason}
        results |= self.run_together([program for program in chosen if program not in results], case, dump, timed)
        for program, result in results.items():
            if result.get("ran_out_of_memory") and len(chosen) > 1:
                again = self.run_together([program], case, dump, timed)[program]
                results[program] = again | {"alone": True}
        return {program: results[program] for program in chosen}

    def run_together(self, chosen, case, dump, timed):
        sessions, results = {}, {}
        for program in chosen:
            name = f"{case.name}-{program}"
            start = {"ep_bench": self.ep_bench_start, "torch": self.torch_start}.get(program, self.jax_start)
            output = self.directory / f"{name}.json"
            output.unlink(missing_ok=True)
            commands, environments = start(program, case, self.common_options(case, output, dump, timed), timed)
            try:
                sessions[program] = Session(name, commands, environments, self.directory, self.limit_s)
            except OSError as error:
                results[program] = {"failed": f"{name} did not start: {error.strerror}"}
        failed = run_in_turns(sessions, phases=(self.rounds if timed else 1) + 2)  # the set-up, the rounds, the dump
        for program, session in sessions.items():
            if program in failed:
                results[program] = {"failed": str(failed[program]), "ran_out_of_memory": session.ran_out_of_memory()}
            else:
                result = json.loads((self.directory / f"{session.name}.json").read_text(encoding="utf-8"))
                results[program] = of_ep_bench(result) if program == "ep_bench" else result
                results[program]["phases_s"] = session.phases_s
                if program == "ep_bench" and case.without_fp8:
                    results[program]["left_out"] = {"block-fp8": case.without_fp8}
        return results

    def common_options(self, case, output, dump, timed):
        options = [*case.options, "--json", output, "--paced", "--dump", dump]
        if not timed:
            return options
        return options + ["--iters", self.iters, "--rounds", self.rounds, "--pause-ms", self.pause_ms,
                          "--dump-rows", DUMPED_ROWS]

    def ep_bench_start(self, _program, case, options, timed):
        rendezvous = self.directory / "rendezvous"
        rendezvous.mkdir(mode=0o700, exist_ok=True)
        command = [self.ep_bench, "--bootstrap", f"file:{rendezvous}", "--ranks", self.ranks, "--block", *options,
                   "--input-sets", 1]
        command += ["--transport", "host", "--dtype", "fp32"] if self.cpu else ["--transport", "nccl", "--dtype", "bf16"]
        if not case.without_fp8:
            command += ["--recipe", "fp8", "--alignment", 16]
        if timed and not self.cpu:
            command += ["--floor"] + (["--graph"] if case.tokens <= 256 else [])
        if not timed:
            command += ["--iters", 1, "--verify"]
        return [[*command, "--rank", rank] for rank in range(self.ranks)], [{}] * self.ranks

    def torch_start(self, _program, _case, options, timed):
        store = self.directory / "torch.store"
        store.unlink(missing_ok=True)
        command = [sys.executable, "-B", NATIVE / "moe_torch.py", "--store", store, "--device", "cpu" if self.cpu else "cuda",
                   *options] + ([] if timed else ["--iters", 0])
        return [command] * self.ranks, [{"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(self.ranks)}
                                        for rank in range(self.ranks)]

    def jax_start(self, program, _case, options, timed):
        command = [sys.executable, "-B", NATIVE / "moe_jax.py", "--ranks", self.ranks, "--variant",
                   program.removeprefix("jax-"), "--exchange", "gather" if self.cpu else "ragged", *options]
        command += [] if timed else ["--iters", 0]
        if self.cpu:
            return [command], [{"JAX_PLATFORMS": "cpu",
                                "XLA_FLAGS": f"--xla_force_host_platform_device_count={self.ranks}"}]
        # XLA would take three quarters of the memory at its start, which the other programs need, and no more later, which
        # the padded batch of a skewed routing needs.
        return [command], [{"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}]


def of_ep_bench(document):
    """Returns the only point of a file of ep_bench --json, with the run's version and number of ranks."""
    run, point = document["run"], document["starts"][0]["points"][0]
    return point | {"epx_version": run["library_version"], "ranks": run["ranks"]}


def versions_of(program, result):
    """Returns the versions that a program has reported, by library."""
    if program == "ep_bench":
        return {"epx": result["epx_version"]} | result["block"]["libraries"]
    return result["versions"]


def machine(cpu):
    """Returns what the tables say about where they were measured."""
    if cpu:
        return {"device": "CPUs", "driver": None, "power_limit": None}
    query = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"],
                           capture_output=True, text=True, check=True)
    name, driver, power = query.stdout.splitlines()[0].split(", ")
    return {"device": name, "driver": driver, "power_limit": power}


def commit():
    """Returns the commit of this source tree, with '-dirty' where files differ from it; None where git does not know it."""
    found = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"],
                           capture_output=True, text=True, check=False, env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"})
    return found.stdout.strip() or None
