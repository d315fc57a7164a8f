# SPDX-License-Identifier: Apache-2.0
"""Runs train_moe, on ranks under mpirun, and hands back what it said; the base class of its tests."""
import argparse
import contextlib
import functools
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import unittest
from dataclasses import dataclass

TEXT = pathlib.Path("/usr/share/common-licenses/GPL-3")  # the program's default
FORMATS = ("fp8-block128", "fp8-block128-pow2", "fp8-mx", "fp8-e5m2-mx", "fp4-nv")
FP8_RECIPES = ("fp8_activations", "fp8")
PATHS = ("dispatch", "ring", "ragged", "native", "dense", "replicated", "both")
SUCCESS, FAILURE, USAGE = 0, 1, 2  # the program's exit statuses
SKIPPED = 77  # a test's, as Meson knows it


@dataclass(frozen=True)
class Run:
    command: str
    status: int
    stdout: str
    stderr: str

    @functools.cached_property
    def lines(self):
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def step_lines(self):
        """As they were printed, since runs are to agree byte for byte."""
        return [line for line in self.stdout.splitlines() if line.startswith('{"step":')]

    @property
    def losses(self):
        return [line["loss"] for line in self.lines if "loss" in line]

    @property
    def final(self):
        return self.lines[-1]

    @property
    def complaints(self):
        """Without what mpirun says of a rank that failed."""
        return [line for line in self.stderr.splitlines() if line.startswith("train_moe:")]

    def __str__(self):
        return f"$ {self.command}\nexit status {self.status}\n{self.stdout[-2000:]}{self.stderr[-2000:]}"


def session_of(pid):
    """None when the process has gone."""
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return None


def end_session(leader):
    """mpirun gives each rank a process group of its own, but all are in the session that it leads."""
    leader.terminate()  # mpirun ends its ranks, and removes what they shared
    with contextlib.suppress(subprocess.TimeoutExpired):
        leader.wait(timeout=10)
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        if session_of(int(entry.name)) == leader.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(entry.name), signal.SIGKILL)


def run_limited(command, timeout):
    """Raises TimeoutError after `timeout` seconds, with everything that the command started ended."""
    shown = shlex.join(map(str, command))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               start_new_session=True)
    is_done = True
    try:
        output = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        is_done = False
        end_session(process)
        output = process.communicate()
    except BaseException:
        end_session(process)
        raise
    run = Run(shown, process.returncode, *(stream.decode(errors="replace") for stream in output))
    if not is_done:
        raise TimeoutError(f"not done after {timeout} s:\n{run}")
    return run


def largest_deviation(values, expected):
    """Relative."""
    return max(abs(value - other) / abs(other) for value, other in zip(values, expected, strict=True))


class TrainTest(unittest.TestCase):
    train_moe = None
    mpirun = None
    file_calls = None  # a library to preload
    maxDiff = 2000

    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="train_moe_test.")
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)

    @classmethod
    def launch(cls, num_ranks, *args, timeout=100, wrapper=()):
        """A single rank runs without mpirun."""
        launcher = [cls.mpirun, "--oversubscribe", "-n", str(num_ranks)] if num_ranks > 1 else []
        return run_limited([*wrapper, *launcher, cls.train_moe, *map(str, args)], timeout)

    def train(self, num_ranks, *args):
        run = self.launch(num_ranks, *args)
        self.assertEqual(run.status, SUCCESS, run)
        return run

    def report(self, figures):
        print(figures, end=" ... ", flush=True)

    def assert_refused(self, run, *words, status=USAGE):
        """The program ended with `status` and one sentence, in which all of `words` are."""
        self.assertEqual(run.status, status, run)
        self.assertEqual(len(run.complaints), 1, run)
        for word in map(str, words):
            self.assertIn(word, run.complaints[0])

    def assert_close(self, run, expected, limit=1e-4):
        """At every step, and in the end."""
        deviation = largest_deviation([*run.losses, run.final["held_out_loss"]],
                                      [*expected.losses, expected.final["held_out_loss"]])
        self.assertLessEqual(deviation, limit, f"{run.command}\n{expected.command}")
        return deviation

    def assert_same_curve(self, run, expected):
        self.assertEqual(run.step_lines, expected.step_lines, f"{run.command}\n{expected.command}")
        self.assertEqual(run.final["held_out_loss"], expected.final["held_out_loss"], f"{run.command}\n{expected.command}")


def main(check=None, **options):
    """`options` are further ones, with their defaults; they become attributes of TrainTest. `check` is called before the tests,
    and may return a reason to skip them all."""
    parser = argparse.ArgumentParser(epilog="Other arguments are unittest's.")
    for name, default in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--train-moe", required=True)
    parser.add_argument("--mpirun", required=True)
    parser.add_argument("--file-calls", required=True)
    arguments, rest = parser.parse_known_args()
    TrainTest.train_moe = arguments.train_moe
    TrainTest.mpirun = arguments.mpirun
    TrainTest.file_calls = arguments.file_calls
    for name in options:
        setattr(TrainTest, name, getattr(arguments, name))
    if check is not None and (reason := check()):
        print(f"skipped: {reason}")
        sys.exit(SKIPPED)
    unittest.main(module="__main__", argv=[sys.argv[0], *rest], verbosity=2)
