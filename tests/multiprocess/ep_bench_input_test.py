#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ep_bench as it is started: what is refused before the run, with status 2 and one sentence, and what happens to --json's file."""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

LIMIT_S = 60
SUCCESS, USAGE = 0, 2  # exit statuses


class Inputs(unittest.TestCase):
    ep_bench = None

    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ep_bench_test.")
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)
        self.json = self.directory / "out.json"

    def run_it(self, *args):
        command = [self.ep_bench, "--bootstrap", f"file:{self.directory}", "--rank", "0", "--ranks", "1", "--tokens", "8",
                   "--iters", "1", "--warmup", "0", *map(str, args)]
        return subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)

    def refuse(self, *args, words):
        """No table is printed: the run has not taken place."""
        run = self.run_it(*args)
        self.assertEqual((run.returncode, run.stdout), (USAGE, ""), run)
        self.assertEqual(len(run.stderr.splitlines()), 1, run)
        for word in words:
            self.assertIn(word, run.stderr)

    def test_json_that_cannot_be_written(self):
        file = self.directory / "missing" / "out.json"
        self.refuse("--json", file, words=[f"'{file}' of --json", "No such file"])
        self.refuse("--json", self.directory, words=[f"'{self.directory}' of --json", "directory"])

    def test_json(self):
        self.json.write_text("x" * 100_000)
        run = self.run_it("--json", self.json)
        self.assertEqual(run.returncode, SUCCESS, run)
        self.assertEqual(json.loads(self.json.read_text())["config"]["tokens"], 8)

    def test_json_of_an_earlier_run_outlives_one_that_fails(self):
        self.json.write_text("earlier")
        self.refuse("--json", self.json, "--routing", "text:/dev/zero", words=["/dev/zero", "device"])
        self.assertEqual(self.json.read_text(), "earlier")
        self.json.unlink()
        self.refuse("--json", self.json, "--routing", "text:/dev/zero", words=["/dev/zero", "device"])
        self.assertFalse(self.json.exists())

    def test_text_that_nobody_writes(self):
        fifo = self.directory / "fifo"
        os.mkfifo(fifo)
        self.refuse("--routing", f"text:{fifo}", words=[str(fifo), "fifo"])

    def test_job_id(self):
        self.refuse("--job-id", "a b", words=["--job-id", "a b"])

    def test_memory(self):
        self.refuse("--hidden", 2**31 - 1, "--tokens", 4096, words=[f"--hidden {2**31 - 1}", "--tokens 4096", "bytes of memory"])

    def test_rank_major(self):
        """Rows beyond M are dropped, and all others are those of the oracle."""
        run = self.run_it("--json", self.json, "--verify", "--layout", "rank-major", "--max-rows", 5)
        self.assertEqual(run.returncode, SUCCESS, run)
        result = json.loads(self.json.read_text())
        self.assertEqual((result["config"]["layout"], result["config"]["max_rows"]), ("rank-major", 5))
        self.assertEqual({name: line["wrong"] for name, line in result["operations"].items()},
                         {"dispatch": 0, "combine": 0, "combine_bwd": 0, "dispatch_bwd": 0})
        self.assertEqual(result["dropped_routes"], 3 * 4)
        self.assertGreater(result["events"]["too_few_rows"], 0)

    def test_dump_that_cannot_be_written(self):
        """A directory that is not there is refused before the run; what fails after the run loses no table."""
        block = ["--block", "--dtype", "fp32", "--hidden", 64, "--ffn", 64, "--experts", 4, "--dump"]
        if "without libepx_moe" in self.run_it(*block, self.directory).stderr:
            self.skipTest("this ep_bench was built without libepx_moe")
        missing, file = self.directory / "missing", self.directory / "file"
        file.touch()
        self.refuse(*block, missing, words=[f"'{missing}' of --dump", "No such file"])
        self.refuse(*block, file, words=[f"'{file}' of --dump", "not a directory"])
        full = self.directory / "full"
        (full / "native.out.0.npy").mkdir(parents=True)
        run = self.run_it(*block, full, "--json", self.json)
        self.assertEqual(run.returncode, 1, run)
        self.assertIn("block fwd+bwd", run.stdout)
        self.assertIn("block fwd+bwd", self.json.read_text())
        self.assertIn(f"cannot write '{full}/native.out.0.npy' of --dump", run.stderr)

    def test_repeated_options(self):
        run = self.run_it("--json", "/missing/out.json", "--hidden", 0, "--hidden", 64, "--json", self.json)
        self.assertEqual(run.returncode, SUCCESS, run)
        self.assertEqual(json.loads(self.json.read_text())["config"]["hidden"], 64)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(epilog="Other arguments are unittest's.")
    parser.add_argument("--ep-bench", required=True)
    arguments, rest = parser.parse_known_args()
    Inputs.ep_bench = arguments.ep_bench
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
