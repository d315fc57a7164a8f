#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Between the two events of a measurement ep_bench does nothing but the measured calls: no wait, no copy, no kernel besides."""
import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

LIMIT_S = 100
WARMUP, ITERATIONS = 1, 3
LINES = ["prepare", "dispatch", "combine", "combine_bwd", "dispatch_bwd", "combine_bwd-nograd", "prepare+dispatch+combine",
         "prepare_dispatch", "prepare_dispatch+combine"]
SUMS = {"prepare+dispatch+combine": ("prepare", "dispatch", "combine"), "prepare_dispatch+combine": ("prepare_dispatch", "combine")}


class TimedWork(unittest.TestCase):
    ep_bench = counter = None

    def measure(self, *options):
        """Returns what was done between the events of each iteration: [(launches, synchronisations, copies) of each line]."""
        with tempfile.TemporaryDirectory(prefix="timed_work.") as directory:
            counts = pathlib.Path(directory) / "counts"
            command = [self.ep_bench, "--bootstrap", f"file:{directory}", "--rank", 0, "--ranks", 1, "--transport", "nccl",
                       "--tokens", 8, "--hidden", 64, "--experts", 4, "--top-k", 2, "--input-sets", 2, "--timeout-ms", 60000,
                       "--warmup", WARMUP, "--iters", ITERATIONS, *options]
            run = subprocess.run([str(part) for part in command], timeout=LIMIT_S, capture_output=True, text=True, check=False,
                                 stdin=subprocess.DEVNULL,
                                 env=os.environ | {"LD_PRELOAD": self.counter, "COUNT_TIMED_WORK": str(counts)})
            self.assertEqual(run.returncode, 0, run)
            rows = [tuple(map(int, line.split())) for line in counts.read_text(encoding="utf-8").splitlines()]
        self.assertEqual(len(rows), (WARMUP + ITERATIONS) * len(LINES))
        return [dict(zip(LINES, rows[i:i + len(LINES)])) for i in range(0, len(rows), len(LINES))]

    def test_graph_replays(self):
        for iteration in self.measure("--graph"):
            self.assertEqual(iteration, dict.fromkeys(LINES, (1, 0, 0)))

    def test_calls(self):
        """Each call launches; a sequence launches what its calls do, so no line has a kernel of ep_bench's own in it."""
        for iteration in self.measure():
            for name, (launches, synchronisations, copies) in iteration.items():
                self.assertEqual((synchronisations, copies), (0, 0), name)
                self.assertGreater(launches, 0, name)
            for name, parts in SUMS.items():
                self.assertEqual(iteration[name][0], sum(iteration[part][0] for part in parts), iteration)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(epilog="Other arguments are unittest's.")
    parser.add_argument("--ep-bench", required=True)
    parser.add_argument("--counter", required=True)
    arguments, rest = parser.parse_known_args()
    TimedWork.ep_bench, TimedWork.counter = arguments.ep_bench, arguments.counter
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
