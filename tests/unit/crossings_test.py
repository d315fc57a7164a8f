#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What tools/crossings.py reads off two files of ep_bench --json."""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

CROSSINGS = pathlib.Path(__file__).resolve().parents[2] / "tools" / "crossings.py"
SCHEMA = {"name": "ep_bench", "version": 2}


def document(times, layout="expert-major", line="combine", starts=1):
    """The file of a sweep over tokens; a point without a time has failed."""
    points = [{"config": {"tokens": tokens, "layout": layout, "num_comm_sms": 0}, "status": "failed" if us is None else "complete",
               "operations": {line: {"median_us": us}}} for tokens, us in times.items()]
    return {"schema": SCHEMA, "starts": [{"points": points}] * starts}


class Crossings(unittest.TestCase):
    def run_it(self, first, second, *args):
        with tempfile.TemporaryDirectory() as directory:
            for name, content in (("a", first), ("b", second)):
                text = content if isinstance(content, str) else json.dumps(content)
                (pathlib.Path(directory) / name).write_text(text, encoding="utf-8")
            return subprocess.run([sys.executable, CROSSINGS, "a", "b", *args], cwd=directory, capture_output=True, text=True,
                                  timeout=30, check=False)

    def test_a_crossing(self):
        """The ratio is 2 at 64 tokens and 1/2 at 128, so that it is 1 in the middle."""
        run = self.run_it(document({32: 10, 64: 10, 128: 20, 256: 40}), document({32: 20, 64: 20, 128: 10, 256: 20}))
        self.assertEqual(run.stdout, "combine: a is faster from 32 to 64 tokens; b is faster from 128 to 256 tokens "
                                     "(they cross at about 96); by 100.0 to 100.0 %\n", run.stderr)

    def test_the_same(self):
        run = self.run_it(document({8: 100, 16: 100}), document({8: 100.5, 16: 99.5}))
        self.assertEqual(run.stdout, "combine: the same within 1 % at 2 points\n", run.stderr)
        run = self.run_it(document({8: 100, 16: 100}), document({8: 100.5, 16: 100}), "--same", "0.1")
        self.assertEqual(run.stdout, "combine: a is faster at 8 tokens; by 0.5 to 0.5 %\n", run.stderr)

    def test_points_that_pair(self):
        """A failed point and a point of one file alone are left out; of starts the median counts; layouts are told apart."""
        first, second = document({8: 100, 16: None, 32: 1}, starts=3), document({8: 110, 16: 1})
        first["starts"][0] = document({8: 900})["starts"][0]
        for one in (first, second):
            one["starts"].append(document({8: 50}, layout="rank-major", line="dispatch")["starts"][0])
        run = self.run_it(first, second)
        self.assertEqual(run.stdout, "combine, layout expert-major: a is faster at 8 tokens; by 10.0 to 10.0 %\n"
                                     "dispatch, layout rank-major: the same within 1 % at 1 points\n", run.stderr)

    def test_files_that_are_no_good(self):
        good = document({8: 1})
        for bad, word in (("{", "is no file"), ({"schema": 1}, "has schema 1"), (document({9: 1}), "no complete point"),
                          ({"schema": SCHEMA, "starts": [{"points": [{"status": "complete"}]}]}, "is no file")):
            run = self.run_it(good, bad)
            self.assertEqual((run.returncode, run.stdout), (1, ""), run)
            self.assertIn(word, run.stderr)
            self.assertEqual(len(run.stderr.splitlines()), 1, run.stderr)


if __name__ == "__main__":
    unittest.main()
