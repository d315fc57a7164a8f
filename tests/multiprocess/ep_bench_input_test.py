#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ep_bench as it is started: what is refused before the run, with status 2 and one sentence, and what happens to --json's file."""
import argparse
import json
import os
import pathlib
import pty
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

LIMIT_S = 60
SUCCESS, FAILURE, USAGE = 0, 1, 2  # exit statuses


class Inputs(unittest.TestCase):
    ep_bench = None

    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ep_bench_test.")
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)
        self.json = self.directory / "out.json"

    def command(self, *args, rank=0, ranks=1):
        return [self.ep_bench, "--bootstrap", f"file:{self.directory}", "--rank", str(rank), "--ranks", str(ranks),
                "--warmup", "0", *map(str, args)]

    def run_it(self, *args):
        command = self.command("--tokens", 8, "--iters", 1, *args)
        return subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)

    def refuse(self, *args, words):
        """No table is printed: the run has not taken place."""
        run = self.run_it(*args)
        self.assertEqual((run.returncode, run.stdout), (USAGE, ""), run)
        self.assertEqual(len(run.stderr.splitlines()), 1, run)
        for word in words:
            self.assertIn(word, run.stderr)

    def document(self):
        return json.loads(self.json.read_text())

    def point(self):
        return self.document()["starts"][0]["points"][0]

    def statuses(self):
        return [point["status"] for point in self.document()["starts"][-1]["points"]]

    def start_ranks(self, *args, ranks):
        processes = [subprocess.Popen(self.command("--json", self.json, *args, rank=rank, ranks=ranks),
                                      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                     for rank in range(ranks)]
        for process in processes:
            self.addCleanup(process.communicate)
            self.addCleanup(process.kill)
        return processes

    def start_sweep(self, *args, ranks, iters=200):
        """Starts the ranks of a sweep whose first point takes a moment and whose second one does not end by itself."""
        return self.start_ranks("--tokens", "1,2,3", "--hidden", 64, "--iters", iters, *args, ranks=ranks)

    def wait_for_a_point(self):
        end = time.monotonic() + LIMIT_S
        while not self.json.exists() or not self.json.stat().st_size:
            self.assertLess(time.monotonic(), end, "no point was finished")
            time.sleep(0.001)

    def check_shape(self, value, shape, path="document"):
        """Compares JSON with a shape: a dict of the shapes of its members, a list of the one of its elements, or types."""
        if isinstance(shape, dict):
            self.assertEqual(set(value), set(shape), path)
            for name, of_member in shape.items():
                self.check_shape(value[name], of_member, f"{path}.{name}")
        elif isinstance(shape, list):
            self.assertIsInstance(value, list, path)
            for element in value:
                self.check_shape(element, shape[0], f"{path}[]")
        else:
            self.assertIsInstance(value, shape, path)

    def test_json_that_cannot_be_written(self):
        file = self.directory / "missing" / "out.json"
        self.refuse("--json", file, words=[f"'{file}' of --json", "No such file"])
        self.refuse("--json", self.directory, words=[f"'{self.directory}' of --json", "directory"])

    def test_json(self):
        self.json.write_text("x" * 100_000)
        run = self.run_it("--json", self.json)
        self.assertEqual(run.returncode, SUCCESS, run)
        self.assertEqual(self.point()["config"]["tokens"], 8)

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
        for layout in "rank-major", "rank-major-compact":
            run = self.run_it("--json", self.json, "--verify", "--layout", layout, "--max-rows", 5)
            self.assertEqual(run.returncode, SUCCESS, run)
            result = self.point()
            self.assertEqual((result["config"]["layout"], result["config"]["max_rows"]), (layout, 5))
            self.assertEqual({name: line["wrong"] for name, line in result["operations"].items()},
                             {"dispatch": 0, "combine": 0, "combine_bwd": 0, "dispatch_bwd": 0})
            self.assertEqual(result["dropped_routes"], 3 * 4)
            self.assertGreater(result["events"]["too_few_rows"], 0)

    def test_row_formats(self):
        """Rows and scales are those of the oracle, in each way through dispatch and each layout of scales."""
        fp8, mx, nv = 200 + 2 * 4, 200 + 7, 100 + 13 + 4  # bytes of a row of 200 elements
        for options, sizes in (
                (["--row-format", "fp8-block128", "--scale-layout", "columns"], (400, fp8, fp8)),
                (["--row-format", "fp8-mx", "--scale-layout", "packed", "--layout", "rank-major"], (400, mx, mx)),
                (["--row-format", "fp8-e5m2-mx", "--scale-layout", "tiles", "--alignment", 128], (400, mx, mx)),
                (["--row-format", "fp4-nv", "--quantised-input"], (nv, nv, nv)),
                (["--wire-format", "fp4-nv", "--layout", "rank-major-compact"], (400, nv, 400)),
                (["--wire-format", "fp8-block128-pow2"], (400, 202, 400))):
            run = self.run_it("--json", self.json, "--verify", "--hidden", 200, *options)
            self.assertEqual(run.returncode, SUCCESS, run)
            operations = self.point()["operations"]
            self.assertEqual({line["wrong"] for line in operations.values()}, {0}, options)
            self.assertEqual(tuple(operations["dispatch"]["row_bytes"][place] for place in ("input", "wire", "received")), sizes)
            self.assertEqual(set(operations["combine"]["row_bytes"].values()), {400})
            self.assertIn("rows of dispatch in ", run.stdout)

    def test_sum_formats(self):
        """Sums are those of the oracle for each format, in both layouts, on one to three ranks."""
        for name, size in (("fp8-block128", 200 + 2 * 4), ("fp8-mx", 200 + 7), ("fp8-e5m2-mx", 200 + 7)):
            for ranks in (1, 2, 3):
                processes = self.start_ranks("--tokens", 8, "--hidden", 200, "--layout", "both", "--iters", 1, "--verify", "--sum-format",
                                             name, "--job-id", f"{name}-{ranks}", ranks=ranks)
                outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
                self.assertEqual([process.returncode for process in processes], [SUCCESS] * ranks, outputs)
                self.assertIn(f"partial sums in {name}", outputs[0][0])
                for point in self.document()["starts"][0]["points"]:
                    operations = point["operations"]
                    self.assertEqual(point["config"]["sum_format"], name)
                    self.assertEqual({line["wrong"] for line in operations.values()}, {0}, (name, ranks))
                    for operation in ("combine", "dispatch_bwd"):
                        self.assertEqual(operations[operation]["row_bytes"], {"input": 400, "wire": size, "received": 400})
                    self.assertEqual(set(operations["combine_bwd"]["row_bytes"].values()), {400})

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
        self.assertEqual(self.point()["config"]["hidden"], 64)

    def test_sweep(self):
        """The file has every point, in the schema's form; progress goes to standard error, a line for each point."""
        run = self.run_it("--tokens", "4,8..16", "--layout", "both", "--hidden", 64, "--json", self.json)
        self.assertEqual(run.returncode, SUCCESS, run)
        self.assertIn("rank-major, 16 tokens", run.stdout)
        self.assertEqual([line.split(" (")[0] for line in run.stderr.splitlines()],
                         [f"ep_bench: point {i} of 6" for i in range(1, 7)])
        document = self.document()
        none, number = type(None), (int, float)
        operation = dict.fromkeys(
            ["median_us", "p99_us", "min_us", "logical_rows", "wire_rows", "written_rows", "start_skew_us"], number)
        operation |= dict.fromkeys(["samples", "outliers", "slowest_rank"], int)
        operation |= dict.fromkeys(["throttled", "floor", "ratio", "ratio_on_comm_sms", "rail", "wrong"], none)
        operation |= dict.fromkeys(["logical_gbps", "wire_gbps", "memcpy_ratio", "memcpy_us", "memcpy_total_gbps"], (*number, none))
        operation |= {"interval_us": [number], "converged": bool, "row_bytes": (dict, none)}
        machine = {"host": str, "cpu": str, "cores": int, "gpu": none, "driver": none, "nccl": none}
        run_shape = {"command": [str], "tuning": str, "began": str, "library_version": str, "ranks": int, "ranks_per_node": int, "transport": str}
        self.check_shape({name: value for name, value in document.items() if name != "starts"}, {
            "schema": {"name": str, "version": int}, "status": str, "run": run_shape, "machine": machine})
        self.assertEqual((document["schema"], document["status"]), ({"name": "ep_bench", "version": 2}, "complete"))
        (start,) = document["starts"]
        self.assertEqual((start["start"], start["status"]), (0, "complete"))
        self.assertEqual([(point["config"]["layout"], point["config"]["tokens"]) for point in start["points"]],
                         [(layout, tokens) for layout in ("expert-major", "rank-major") for tokens in (4, 8, 16)])
        for point in start["points"]:
            self.assertEqual((point["status"], point["error"], point["passed"]), ("complete", None, True))
            self.assertEqual(len(point["operations"]), 5 if point["config"]["layout"] == "expert-major" else 4)
            for name, line in point["operations"].items():
                self.check_shape(line, operation, name)
                self.assertLessEqual(line["interval_us"][0], line["median_us"])
                self.assertGreaterEqual(line["interval_us"][1], line["median_us"])
            self.check_shape(point["environment"], dict.fromkeys(
                ["sm_clock_mhz", "power_w", "temperature_c", "throttled_samples"], none))

    def test_noise(self):
        """Without --iters the budget bounds the iterations, whose number the file has."""
        begin = time.monotonic()
        command = self.command("--tokens", 4, "--hidden", 64, "--noise", 0.01, "--budget", 0.1, "--json", self.json)
        run = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        self.assertEqual(run.returncode, SUCCESS, run)
        self.assertLess(time.monotonic() - begin, 20)
        point = self.point()
        self.assertEqual((point["config"]["iters"], point["config"]["noise_percent"], point["config"]["budget_s"]), (None, 0.01, 0.1))
        samples = {line["samples"] for line in point["operations"].values()}
        self.assertEqual(len(samples), 1)
        self.assertGreaterEqual(min(samples), 20)
        self.assertIn(f"{min(samples)} iterations", run.stdout)

    def test_progress_on_a_terminal(self):
        ours, theirs = pty.openpty()
        self.addCleanup(os.close, ours)
        run = subprocess.run(self.command("--tokens", "1,2", "--hidden", 64, "--iters", 1), timeout=LIMIT_S,
                             stdout=subprocess.DEVNULL, stderr=theirs, stdin=subprocess.DEVNULL, check=False)
        os.close(theirs)
        self.assertEqual(run.returncode, SUCCESS)
        text = os.read(ours, 65536).decode()
        self.assertIn("] 0 % 1 tokens", text)
        self.assertIn("] 50 %,", text)
        self.assertIn("] 100 %", text)

    def test_point_that_fails(self):
        run = self.run_it("--routing", "uniform,text:/missing", "--json", self.json)
        self.assertEqual(run.returncode, FAILURE, run)
        self.assertIn("point 2 of 2 (text:/missing) failed: cannot read '/missing'", run.stderr)
        self.assertEqual((self.document()["status"], self.statuses()), ("partial", ["complete", "failed"]))
        self.assertIn("cannot read '/missing'", self.document()["starts"][0]["points"][1]["error"])

    def test_every_point_fails(self):
        self.json.write_text("earlier")
        run = self.run_it("--routing", "text:/missing,text:/gone", "--json", self.json)
        self.assertEqual(run.returncode, USAGE, run)
        self.assertEqual(self.json.read_text(), "earlier")

    def test_signal(self):
        """It reaches one rank; both end, and the file has what was finished."""
        for number, rank in ((signal.SIGINT, 0), (signal.SIGTERM, 1)):
            self.json.unlink(missing_ok=True)
            processes = self.start_sweep("--job-id", f"signal-{number}", ranks=2)
            self.wait_for_a_point()
            processes[rank].send_signal(number)
            outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
            self.assertEqual([process.returncode for process in processes], [128 + number] * 2, outputs)
            self.assertIn(f"rank {rank}: interrupted by signal {int(number)}", outputs[0][1])
            self.assertEqual(self.document()["status"], "partial")
            self.assertEqual(self.statuses()[0], "complete")
            self.assertEqual(self.statuses()[-1], "not run")
            self.assertIn("1 tokens  dispatch", outputs[0][0])

    def test_signal_while_a_group_is_created(self):
        """The second point's group, some milliseconds after the file of the first: the ranks still agree on what has ended them."""
        for delay_ms in range(8):
            self.json.unlink(missing_ok=True)
            processes = self.start_sweep("--job-id", f"signal-after-{delay_ms}", ranks=2, iters=20)
            self.wait_for_a_point()
            time.sleep(delay_ms / 1000)
            processes[0].send_signal(signal.SIGINT)
            outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
            self.assertEqual([process.returncode for process in processes], [128 + signal.SIGINT] * 2, outputs)

    def test_rank_that_dies(self):
        processes = self.start_sweep("--timeout-ms", 2000, ranks=2)
        self.wait_for_a_point()
        processes[1].kill()
        stdout, stderr = processes[0].communicate(timeout=LIMIT_S)
        self.assertEqual(processes[0].returncode, FAILURE, stderr)
        self.assertIn("rank 1", stderr)
        self.assertEqual(self.document()["status"], "partial")
        self.assertEqual((self.statuses()[0], self.statuses()[-1]), ("complete", "not run"))
        self.assertIn("1 tokens  dispatch", stdout)

    def test_starts(self):
        """Each start is another process, in one file; --append adds one more, and only of the same points."""
        run = self.run_it("--starts", 2, "--hidden", 64, "--json", self.json)
        self.assertEqual(run.returncode, SUCCESS, run)
        run = self.run_it("--append", "--hidden", 64, "--json", self.json)
        self.assertEqual(run.returncode, SUCCESS, run)
        self.assertEqual([start["start"] for start in self.document()["starts"]], [0, 1, 2])
        before = self.json.read_bytes()
        self.refuse("--append", "--hidden", 32, "--json", self.json, words=["hidden of point 0 is 64", "is 32"])
        with mock.patch.dict(os.environ, EPX_TUNING="batch_grid=7"):
            self.refuse("--append", "--hidden", 64, "--json", self.json, words=['EPX_TUNING is ""', '"batch_grid=7"'])
        self.assertEqual(self.json.read_bytes(), before)
        for content, words in (("", None), ("{", "not JSON"), ('{"schema": 1}', "version 2 of its schema"),
                               (before[: len(before) // 2].decode(), "not JSON")):
            self.json.write_text(content)
            if words:
                self.refuse("--append", "--hidden", 64, "--json", self.json, words=[str(self.json), words])
                self.assertEqual(self.json.read_text(), content)

    def test_append_to_what_is_no_result(self):
        self.refuse("--append", "--json", "/dev/zero", words=["'/dev/zero' of --json", "no regular file"])
        self.json.touch()
        os.truncate(self.json, 65 << 20)
        self.refuse("--append", "--json", self.json, words=[str(self.json), f"it has {65 << 20} bytes"])

    def test_starts_that_fail(self):
        run = self.run_it("--starts", 3, "--json", self.json, "--routing", "text:/missing")
        self.assertEqual((run.returncode, len(run.stderr.splitlines())), (USAGE, 1), run)
        self.assertFalse(self.json.exists())

    def test_pipe(self):
        """A pipe gets one document, after the run."""
        run = self.run_it("--tokens", "1,2", "--json", "/dev/stdout")
        self.assertEqual(run.returncode, SUCCESS, run)
        document = json.loads(run.stdout[run.stdout.index("{"):])
        self.assertEqual(len(document["starts"][0]["points"]), 2)

    def test_link(self):
        """The target of a symbolic link is written, and the link stays."""
        link = self.directory / "link.json"
        link.symlink_to(self.json)
        self.assertEqual(self.run_it("--json", link).returncode, SUCCESS)
        self.assertTrue(link.is_symlink())
        self.assertEqual(self.document()["status"], "complete")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(epilog="Other arguments are unittest's.")
    parser.add_argument("--ep-bench", required=True)
    arguments, rest = parser.parse_known_args()
    Inputs.ep_bench = arguments.ep_bench
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
