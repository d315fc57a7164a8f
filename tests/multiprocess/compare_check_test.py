#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/compare_check.py and compare_builds.py with a command that writes what it is told to, and slowed_calls.so with ep_bench itself."""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

LIMIT_S = 60
PASSED, TOO_SLOW, FAILURE = 0, 1, 2  # exit statuses

# Writes the sample as a file of ep_bench, with times that FACTOR multiplies, and an ep_bench that is called "after" by 1.05. With
# --append it adds the sample's starts once more.
WRITER = """
import json, os, pathlib, sys
factor = 1.05 if any(word.endswith("/after") for word in sys.argv) else float(os.environ.get("FACTOR", 1))
document = json.loads(pathlib.Path(sys.argv[1]).read_text())
file = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
for start in document["starts"]:
    for figures in start["points"][0]["operations"].values():
        for name in ("median_us", "interval_us"):
            times = figures[name] if isinstance(figures[name], list) else [figures[name]]
            times = [time * factor for time in times]
            figures[name] = times if isinstance(figures[name], list) else times[0]
if "--append" in sys.argv:
    earlier = json.loads(file.read_text())
    document["starts"] = earlier["starts"] + document["starts"]
file.write_text(json.dumps(document))
"""


class CompareCheck(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="compare_check_test.")
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)
        self.writer = self.directory / "writer.py"
        self.writer.write_text(WRITER)

    def check(self, *args):
        command = [sys.executable, "-B", OPTIONS.tools / "compare_check.py", self.directory / "out", "--ep-bench", OPTIONS.ep_bench, "--pairs", "2", *args,
                   "--", sys.executable, self.writer, OPTIONS.sample]
        return subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, check=False)

    def test_one_build_is_the_same_and_a_slower_one_is_slower(self):
        run = self.check("--slowed", "FACTOR=1.05", "--starts", "2")
        self.assertEqual(run.returncode, PASSED, run)
        # Three lines at two files for each of two pairs.
        self.assertIn("one build: 100.0 % of 12 rows are same (95 % expected), 12 same, 0 slower", run.stdout)
        self.assertIn("FACTOR=1.05: 100.0 % of 12 rows are slower (90 % expected), 0 same, 12 slower", run.stdout)
        self.assertRegex(run.stdout, r"\n +128 expert-major +dispatch +median +31\.6 us, between 16 starts +0\.\d+ %\n")

    def test_shares_that_are_too_small(self):
        run = self.check("--slowed", "FACTOR=1.0")
        self.assertEqual(run.returncode, TOO_SLOW, run)
        self.assertIn("FACTOR=1.0: 0.0 % of 12 rows are slower", run.stdout)

    def test_command_lines(self):
        for args, word in ((["--pairs", "0"], "--pairs is 0"), (["--slowed", "FACTOR"], "--slowed is 'FACTOR'")):
            run = self.check(*args)
            self.assertEqual((run.returncode, run.stdout), (FAILURE, ""), run)
            self.assertIn(word, run.stderr)

    def test_directory_that_is_there_is_left_alone(self):
        (self.directory / "out").mkdir()
        run = self.check()
        self.assertEqual((run.returncode, run.stdout), (FAILURE, ""), run)
        self.assertEqual(len(run.stderr.splitlines()), 1, run)
        self.assertIn("exists", run.stderr)
        self.assertEqual(list((self.directory / "out").iterdir()), [])


class CompareBuilds(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="compare_builds_test.")
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)
        (self.directory / "writer.py").write_text(WRITER)
        for name in ("before", "after"):
            (self.directory / name).symlink_to(OPTIONS.ep_bench.resolve())

    def compare(self, *args, command=("{}",)):
        command = [sys.executable, "-B", OPTIONS.tools / "compare_builds.py", self.directory / "before", self.directory / "after",
                   "--out", self.directory, *args, "--", sys.executable, self.directory / "writer.py", OPTIONS.sample, *command]
        return subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, check=False)

    def test_builds_are_measured_and_compared(self):
        run = self.compare("--starts", "3", "--fail-if-slower", "2")
        self.assertEqual(run.returncode, TOO_SLOW, run)
        self.assertIn("3 of 3 rows are slower by more than 2 %", run.stderr)
        for name in ("before", "after"):
            self.assertIn(f"{name}.json, epx 0.2.0, 6 starts", run.stdout) # the sample has 2

    def test_files_that_are_there_are_not_overwritten(self):
        (self.directory / "after.json").write_text("mine")
        run = self.compare()
        self.assertEqual((run.returncode, run.stdout), (FAILURE, ""), run)
        self.assertIn("after.json is there already", run.stderr)
        self.assertEqual((self.directory / "after.json").read_text(), "mine")
        self.assertFalse((self.directory / "before.json").exists())

    def test_bad_commands(self):
        for args, command, word in (((), ("x",), "has no {}"), (("--starts", "0"), ("{}",), "--starts is 0"),
                                    ((), ("{}",), "exit status 2")):
            if word.startswith("exit"):
                (self.directory / "writer.py").unlink()
            run = self.compare(*args, command=command)
            self.assertEqual((run.returncode, run.stdout), (FAILURE, ""), run)
            self.assertIn(word, run.stderr)


class SlowedCalls(unittest.TestCase):
    def min_us_of_combine(self, percent):
        with tempfile.TemporaryDirectory(prefix="slowed_calls_test.") as directory:
            command = [OPTIONS.ep_bench, "--bootstrap", f"file:{directory}", "--rank", "0", "--ranks", "1", "--iters", "20"]
            environment = os.environ | {"LD_PRELOAD": str(OPTIONS.slowed_calls), "EPX_SLOWED_PERCENT": str(percent)}
            run = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, env=environment, check=True)
        return float(re.search(r"^combine +[\d.]+ +[\d.]+ +([\d.]+)", run.stdout, re.MULTILINE)[1])

    def test_calls_take_longer(self):
        self.assertGreater(self.min_us_of_combine(300), 2 * self.min_us_of_combine(0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("ep-bench", "tools", "sample", "slowed-calls"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=sys.argv[:1] + rest)
